// ravelctl: the command line of Ravel. This file turns arguments into options; the verbs live in
// *_verbs.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "common/clock.h"
#include "common/logging.h"
#include "common/name_suggestion.h"
#include "common/plan/device_kind.h"
#include "common/store/ravel_store_client.h"
#include "coordinator/ctl/access_main.h"
#include "coordinator/ctl/change_verbs.h"
#include "coordinator/ctl/checkpoint_verbs.h"
#include "coordinator/ctl/common_options.h"
#include "coordinator/ctl/completion.h"
#include "coordinator/ctl/data_verbs.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/explain_proto.h"
#include "coordinator/ctl/job_verbs.h"
#include "coordinator/ctl/look_verbs.h"
#include "coordinator/ctl/output_main.h"
#include "coordinator/ctl/plan_verbs.h"
#include "coordinator/ctl/trace_verbs.h"

namespace ravel::ctl {
namespace {

constexpr char kFooter[] =
    "\nexamples:\n"
    "  ravelctl submit -f job.yaml --follow\n"
    "  ravelctl list\n"
    "  ravelctl metrics my-job -o jsonl\n"
    "  ravelctl wait my-job --for=done --timeout 1h\n"
    "  ravelctl explain training.optimizer.lr\n"
    "\nexit codes: 0 succeeded, 1 other errors, 2 usage or invalid file, 3 not found, 4 conflict, "
    "5 not allowed,\n"
    "  6 coordinator unreachable, 7 job failed by its user's doing, 8 by the infrastructure, 9 "
    "cancelled,\n"
    "  124 wait timed out, 130 interrupted\n";

// The parsed command line: options of every verb, and the one that was chosen.
struct CommandLine {
  CommonOptions common;
  std::string format = "table";
  std::string job;
  EventsOptions events;
  bool client_only = false;
  std::string field;
  std::string shell;
  SubmitOptions submit;
  ValidateOptions validate;
  bool no_paths = false;
  PlanOptions plan;
  ListOptions list;
  LogsOptions logs;
  MetricsOptions metrics;
  WaitOptions wait;
  CancelOptions cancel;
  RetryOptions retry;
  DeleteOptions remove;
  std::vector<std::string> nodes;
  CheckpointOptions checkpoint;
  NodeOptions node;
  CheckpointVerbOptions checkpoints;
  PrepareOptions prepare;
  TraceOptions trace;
  PushOptions push;
  BatchOptions batch;
  GenerateOptions generate;
  AccessLine access;
  std::function<int()> run;
};

// A verb that runs `action` when it is chosen.
CLI::App* AddVerb(CLI::App& app,
                  CommandLine& line,
                  const std::string& name,
                  const std::string& help,
                  std::function<int()> action) {
  CLI::App* const verb = app.add_subcommand(name, help);
  verb->fallthrough();
  verb->callback([&line, action = std::move(action)] { line.run = action; });
  return verb;
}

CLI::App* AddGroup(CLI::App& app, const std::string& name, const std::string& help) {
  CLI::App* const group = app.add_subcommand(name, help);
  group->fallthrough();
  group->require_subcommand(1);
  return group;
}

void AddJob(CLI::App* verb, std::string& job) {
  verb->add_option("JOB", job, "Name of the job, or NAMESPACE/NAME")->required();
}

void AddCommon(CLI::App& app, CommandLine& line) {
  AddEndpoint(app, line.access);
  app.add_option("-n,--namespace", line.common.namespace_name, "Namespace of the job")
      ->capture_default_str();
  AddOutput(app, line.format);
  app.add_flag("--no-headers", line.common.no_headers, "Tables without titles");
}

void AddFileVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* verb = AddVerb(app, line, "submit", "Submit a job file", [&line] {
    return RunSubmit(line.common, line.submit);
  });
  verb->add_option("-f,--file", line.submit.file, "Job file; - for stdin")->required();
  verb->add_option("--dry-run", line.submit.dry_run, "client or server: check, submit nothing")
      ->check(CLI::IsMember({"client", "server"}));
  verb->add_option("--request-id", line.submit.request_id, "UUID: the same id submits once");
  verb->add_flag("--wait", line.submit.wait, "Wait for the job's end");
  verb->add_flag("--follow", line.submit.follow, "Show progress until the job's end");

  verb = AddVerb(app, line, "validate", "Check a job file without a coordinator", [&line] {
    line.validate.check_paths = !line.no_paths;
    return RunValidate(line.common, line.validate);
  });
  verb->add_option("-f,--file,FILE", line.validate.file, "Job file; - for stdin")->required();
  verb->add_flag("--no-paths", line.no_paths, "Do not look for the files that it names");

  verb = AddVerb(app, line, "plan", "Show memory and traffic of a job, without devices", [&line] {
    return RunPlan(line.common, line.plan);
  });
  verb->add_option("-f,--file,FILE", line.plan.file, "Job file; - for stdin")->required();
  verb->add_option("--devices",
                   line.plan.devices,
                   "Such as 64xH100-80G, 4xcpu or 8xNAME-48G; default the job's own. Known: " +
                       plan::KnownDeviceNames());
  verb->add_flag("--shared-memory,!--no-shared-memory",
                 line.plan.shared_memory,
                 "All ranks on one host, whose memory they share; default for cpu devices");
  verb->add_flag(
      "-v,--verbose", line.plan.verbose, "Every group, with the addresses of its buffers");

  verb = AddVerb(app, line, "explain", "Explain a field of the job file", [&line] {
    const absl::StatusOr<std::string> text = ExplainField(line.field);
    if (text.ok()) {
      Print(*text);
    }
    return Report(text.status());
  });
  verb->add_option("FIELD", line.field, "Such as spec.training.optimizer.lr; none: all");
}

void AddNodeVerbs(CLI::App& nodes, CommandLine& line) {
  struct NodeVerb {
    const char* name;
    const char* help;
    NodeHold hold;
    bool lift;
  };
  constexpr NodeVerb kVerbs[] = {
      {"drain", "Let jobs save and leave a node; no new work there", NodeHold::kDrained, false},
      {"undrain", "Give a drained node work again", NodeHold::kDrained, true},
      {"quarantine", "Give a node no new work", NodeHold::kQuarantined, false},
      {"release", "Give a quarantined node work again", NodeHold::kQuarantined, true}};
  for (const NodeVerb& known : kVerbs) {
    CLI::App* verb = AddVerb(nodes, line, known.name, known.help, [&line, known] {
      return RunNodesHold(line.common, line.node, known.hold, known.lift);
    });
    verb->add_option("NODE", line.node.node, "As nodes list names it")->required();
    if (!known.lift) {
      verb->add_option("--reason", line.node.reason, "Shown by nodes list");
    }
  }
}

void AddLookVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* verb =
      AddVerb(app, line, "list", "List jobs", [&line] { return RunList(line.common, line.list); });
  verb->add_flag("-A,--all-namespaces", line.list.all_namespaces, "Jobs of every namespace");
  verb->add_option("-l,--selector", line.list.selector, "Labels: key=value,...");
  verb->add_option("--state", line.list.state, "Only jobs in this state");

  verb = AddVerb(app, line, "get", "Show a job", [&line] { return RunGet(line.common, line.job); });
  AddJob(verb, line.job);
  verb = AddVerb(app, line, "describe", "Show a job with its spec and events", [&line] {
    return RunDescribe(line.common, line.job);
  });
  AddJob(verb, line.job);

  verb = AddVerb(app, line, "events", "Show what happened to a job", [&line] {
    return RunEvents(line.common, line.events);
  });
  AddJob(verb, line.events.job);
  verb->add_flag("-f,--follow", line.events.follow, "Go on with new ones");
  verb->add_option("--since", line.events.since, "Only of the last, such as 10m");

  verb = AddVerb(
      app, line, "logs", "Show logs of a job", [&line] { return RunLogs(line.common, line.logs); });
  AddJob(verb, line.logs.job);
  verb->add_flag("-f,--follow", line.logs.follow, "Go on with new lines");
  verb->add_option("--rank", line.logs.rank, "Only of this rank")->check(CLI::Range(0, 65535));
  verb->add_option("--attempt", line.logs.attempt, "Only of this attempt")
      ->check(CLI::Range(1, 1'000'000'000));
  verb->add_option("--node", line.logs.node, "Only of this node");
  verb->add_option("--grep", line.logs.grep, "Only lines with this text");
  verb->add_option("--tail", line.logs.tail, "Only that many of the lines that are there")
      ->check(CLI::Range(1, 10'000));
  verb->add_option("--since", line.logs.since, "Only of the last, such as 10m");

  verb = AddVerb(app, line, "metrics", "Show loss and speed of every step", [&line] {
    return RunMetrics(line.common, line.metrics);
  });
  AddJob(verb, line.metrics.job);
  constexpr int64_t kMostSteps = 1'000'000'000'000;
  MetricsFilter& filter = line.metrics.filter;
  verb->add_option("--tensorboard",
                   line.metrics.tensorboard,
                   "Write the surviving history to this folder, for TensorBoard");
  verb->add_flag("--all", filter.all, "Also steps that a restart replaced");
  verb->add_flag("-f,--follow", filter.follow, "Go on with new steps");
  verb->add_option("--from", filter.from_step, "Only from this step on")
      ->check(CLI::Range(int64_t{1}, kMostSteps));
  verb->add_option("--to", filter.to_step, "Only up to this step")
      ->check(CLI::Range(int64_t{1}, kMostSteps));
  verb->add_option("--every", filter.every, "Only steps that it divides")
      ->check(CLI::Range(int64_t{1}, kMostSteps));
  verb->add_option("--last", filter.last, "Only that many steps up to the newest")
      ->check(CLI::Range(int64_t{1}, kMostSteps));

  AddVerb(app, line, "top", "Show what runs now", [&line] { return RunTop(line.common); });
  CLI::App* const nodes = AddGroup(app, "nodes", "Worker nodes");
  AddVerb(*nodes, line, "list", "List nodes", [&line] { return RunNodesList(line.common); });
  AddNodeVerbs(*nodes, line);
  verb = AddVerb(*nodes, line, "forget", "Take nodes that are gone out of the list", [&line] {
    return RunNodesForget(line.common, line.nodes);
  });
  verb->add_option("NODE", line.nodes, "Names of nodes that are LOST or LEFT")->required();
}

void AddChangeVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* verb = AddVerb(app, line, "wait", "Wait for a state of a job", [&line] {
    return RunWait(line.common, line.wait);
  });
  AddJob(verb, line.wait.job);
  verb->add_option(
          "--for", line.wait.condition, "running, step=N, checkpoint, checkpoint=N or done")
      ->capture_default_str();
  verb->add_option("--timeout", line.wait.timeout, "Such as 90s or 1h; exit code 124 after it");
  verb->add_flag("--follow", line.wait.follow, "Show progress until the job's end");

  verb = AddVerb(
      app, line, "cancel", "Cancel a job", [&line] { return RunCancel(line.common, line.cancel); });
  AddJob(verb, line.cancel.job);
  verb->add_option("--reason", line.cancel.reason, "Kept in the job's events");
  verb->add_flag("--wait", line.cancel.wait, "Wait until it has ended");

  verb = AddVerb(app, line, "retry", "Start a failed or cancelled job again", [&line] {
    return RunRetry(line.common, line.retry);
  });
  AddJob(verb, line.retry.job);
  verb->add_flag("--allow-numerics-change",
                 line.retry.allow_numerics_change,
                 "Also from a checkpoint of other numerics: sets checkpoint.allowNumericsChange");
  verb->add_option("--tensor",
                   line.retry.tensor,
                   "So many ranks share each layer from now on: sets parallelism.tensor, which "
                   "divides determinism.tensorParts; elastic sizes that it does not divide go")
      ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  verb = AddVerb(app, line, "delete", "Delete jobs that are over, and free their names", [&line] {
    return RunDelete(line.common, line.remove);
  });
  verb->add_option("JOB", line.remove.jobs, "Names of jobs, or NAMESPACE/NAME")->required();
  verb->add_flag("--force", line.remove.force, "Also jobs that are not over: cancel them first");
  verb->add_flag("--checkpoints", line.remove.checkpoints, "Delete their checkpoints too");
  verb->add_option("--reason", line.remove.reason, "Of the cancellation");
  verb->add_option("--timeout", line.remove.timeout, "Longest wait for each")
      ->capture_default_str();

  verb = AddVerb(app, line, "checkpoint", "Save a checkpoint now", [&line] {
    return RunCheckpoint(line.common, line.checkpoint);
  });
  AddJob(verb, line.checkpoint.job);
  verb->add_flag("--wait", line.checkpoint.wait, "Wait until it is committed");
  verb->add_option("--timeout", line.checkpoint.timeout, "Longest wait")->capture_default_str();
  verb->add_option("--deadline",
                   line.checkpoint.deadline,
                   "The coordinator gives up when nothing is committed by then, at most 1d")
      ->capture_default_str();
}

void AddMarkVerbs(CLI::App& group, CommandLine& line) {
  struct Verb {
    const char* name;
    const char* help;
    CheckpointMark mark;
  };
  for (const Verb& entry :
       {Verb{"pin", "Keep a step from being deleted", CheckpointMark::kPin},
        Verb{"unpin", "Let retention delete a pinned step again", CheckpointMark::kUnpin},
        Verb{"unmark", "A step is not BAD after all", CheckpointMark::kUnmarkBad}}) {
    CLI::App* const verb = AddVerb(group, line, entry.name, entry.help, [&line, mark = entry.mark] {
      return RunCheckpointsMark(line.common, line.checkpoints, mark);
    });
    verb->add_option("JOB", line.checkpoints.target, "A job, or the path of its checkpoint folder")
        ->required();
    verb->add_option("STEP", line.checkpoints.step, "Number of the step")
        ->required()
        ->check(CLI::Range(int64_t{0}, int64_t{1'000'000'000'000}));
    verb->add_option("--reason", line.checkpoints.reason, "Kept with the mark and in the events");
  }
}

void AddRollback(CLI::App& app, CommandLine& line) {
  CLI::App* const verb =
      AddVerb(app, line, "rollback", "Set a job back to an earlier step", [&line] {
        return RunRollback(line.common, line.checkpoints);
      });
  AddJob(verb, line.checkpoints.target);
  verb->add_option("--to", line.checkpoints.to, "step=N: a committed step")->required();
  verb->add_option("--reason", line.checkpoints.reason, "Kept in the job's events");
}

void AddCheckpointVerbs(CLI::App& app, CommandLine& line) {
  AddRollback(app, line);
  CLI::App* const group = AddGroup(app, "checkpoints", "Saved checkpoints");
  CheckpointVerbOptions& options = line.checkpoints;
  CLI::App* verb = AddVerb(*group, line, "list", "List checkpoints", [&line] {
    return RunCheckpointsList(line.common, line.checkpoints);
  });
  verb->add_option("JOB", options.target, "A job, or the path of its checkpoint folder")
      ->required();

  verb = AddVerb(*group, line, "show", "Show what a checkpoint holds", [&line] {
    return RunCheckpointsShow(line.common, line.checkpoints);
  });
  verb->add_option("DIR", options.target, "Step directory, or a folder of steps")->required();
  verb->add_option("--tensors", options.tensors, "Only tensors that match, such as '*.weight'");

  verb = AddVerb(*group, line, "verify", "Check every byte of a checkpoint", [&line] {
    return RunCheckpointsVerify(line.common, line.checkpoints);
  });
  verb->add_option(
          "DIR", options.target, "Step directory, or a folder of steps: its newest good one")
      ->required();
  verb->add_flag("--quick", options.quick, "Sizes and headers only");
  verb->add_flag("--all", options.all, "Every step of the folder that is not marked BAD");
  verb->add_option("--step", options.step, "This step of the folder")
      ->check(CLI::Range(int64_t{0}, int64_t{1'000'000'000'000}));

  AddMarkVerbs(*group, line);
  verb = AddVerb(*group, line, "copy", "Copy a checkpoint to another folder or store", [&line] {
    return RunCheckpointsCopy(line.common, line.checkpoints);
  });
  verb->add_option("FROM", options.target, "Step, or a folder of steps: its newest good one")
      ->required();
  verb->add_option("TO", options.to, "Folder of steps; made when it is missing")->required();

  verb = AddVerb(*group, line, "export", "Write a Hugging Face directory", [&line] {
    return RunCheckpointsExport(line.common, line.checkpoints);
  });
  verb->add_option("DIR", options.target, "Step directory, or a folder of steps")->required();
  verb->add_option("--format", options.format, "huggingface")->capture_default_str();
  verb->add_option("--output-dir,--output,--to", options.output, "Directory to make")->required();
  verb->add_option("--dtype", options.dtype, "f32 or bf16")->capture_default_str();
  verb->add_flag("--quantized",
                 options.quantized,
                 "Quantized weights as codes and scales, of a job with precision.recipe");
  verb->add_option("--reader",
                   options.reader,
                   "With --quantized: whose names scales have, transformers or vllm")
      ->capture_default_str();
}

void AddTraceMemoryVerb(CLI::App& group, CommandLine& line) {
  CLI::App* const verb =
      AddVerb(group, line, "memory", "Show the memory of each rank, planned and measured", [&line] {
        return RunTraceMemory(line.common, line.trace);
      });
  verb->add_option("INPUT", line.trace.inputs, "Memory files of ranks, or directories of them")
      ->required();
}

void AddTraceOverlapVerb(CLI::App& group, CommandLine& line) {
  CLI::App* const verb =
      AddVerb(group, line, "overlap", "Show how much of a step's communication is hidden", [&line] {
        return RunTraceOverlap(line.common, line.trace);
      });
  verb->add_option("INPUT", line.trace.inputs, "Trace files, or directories of them")->required();
  verb->add_option("--step", line.trace.step, "As metrics count; default the last");
}

void AddTraceVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* const group = AddGroup(app, "trace", "Recorded steps of a job");
  TraceOptions& options = line.trace;
  CLI::App* verb = AddVerb(*group, line, "merge", "Make one timeline of all ranks", [&line] {
    return RunTraceMerge(line.common, line.trace);
  });
  verb->add_option("INPUT", options.inputs, "Trace files of ranks, or directories of them")
      ->required();
  verb->add_option("--to", options.output, "File to make")->required();

  verb = AddVerb(*group, line, "gantt", "Draw a step as text", [&line] {
    return RunTraceGantt(line.common, line.trace);
  });
  verb->add_option("INPUT", options.inputs, "Trace files, or directories of them")->required();
  verb->add_option("--step", options.step, "As metrics count; default the last");
  verb->add_option("--width", options.width, "Columns")
      ->check(CLI::Range(10, 2000))
      ->capture_default_str();

  verb = AddVerb(*group, line, "stalls", "Show what waited longest in a step", [&line] {
    return RunTraceStalls(line.common, line.trace);
  });
  verb->add_option("INPUT", options.inputs, "Trace files, or directories of them")->required();
  verb->add_option("--step", options.step, "As metrics count; default the last");
  verb->add_option("--least", options.least_share, "Smallest share of the step to show")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  AddTraceOverlapVerb(*group, line);
  AddTraceMemoryVerb(*group, line);
}

void AddDataVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* const data = AddGroup(app, "data", "Token files");
  PrepareOptions& prepare = line.prepare;
  CLI::App* verb = AddVerb(*data, line, "prepare", "Make token files from text", [&line] {
    return RunDataPrepare(line.common, line.prepare);
  });
  verb->add_option("--input", prepare.inputs, "Text files")->required();
  verb->add_option("--tokenizer", prepare.tokenizer, "bytes, hf:tokenizer.json or train-bpe:VOCAB")
      ->capture_default_str();
  verb->add_option("--output", prepare.output, "Prefix of .bin, .idx and .tokenizer.json")
      ->required();
  verb->add_option("--validation-fraction",
                   prepare.validation_fraction,
                   "Part of the text that goes to PREFIX.validation.*, 0 to 0.5");
  verb->add_option("--document-separator",
                   prepare.document_separator,
                   "Text between documents, such as '\\n\\n'; none: a file is a document");
  verb->add_option("--end-of-document",
                   prepare.end_of_document,
                   "Token after each document; default the tokenizer's own; none: nothing");
  verb->add_flag("--require-utf8", prepare.require_utf8, "Refuse bytes that are not UTF-8");

  verb = AddVerb(*data, line, "push", "Copy a data set or a model into a store", [&line] {
    return RunDataPush(line.common, line.push);
  });
  verb->add_option("SOURCE", line.push.source, "PREFIX of token files; with --model a folder")
      ->required();
  verb->add_option("URL",
                   line.push.to,
                   "Folder for it in a store, from which nodes fetch: ravel://HOST:PORT/PATH, "
                   "s3://BUCKET/PATH, file:///PATH")
      ->required();
  verb->add_flag("--model", line.push.model, "SOURCE is a Hugging Face folder, for model.from");

  verb = AddVerb(*data, line, "batch", "Show the samples of a step", [&line] {
    return RunDataBatch(line.common, line.batch);
  });
  verb->add_option("-f,--file", line.batch.file, "Job file")->required();
  verb->add_option("--step", line.batch.step, "From 0; metrics report it as step + 1")->required();
}

void AddGenerate(CLI::App& app, CommandLine& line) {
  GenerateOptions& options = line.generate;
  CLI::App* const verb = AddVerb(app, line, "generate", "Sample text from a checkpoint", [&line] {
    return RunGenerate(line.common, line.generate);
  });
  verb->add_option("--checkpoint", options.checkpoint, "Step directory, or a folder of steps")
      ->required();
  verb->add_option("--prompt", options.prompt, "Text to go on from")->required();
  verb->add_option("--tokenizer", options.tokenizer, "tokenizer.json; default the checkpoint's");
  verb->add_option("--max-new-tokens", options.max_new_tokens, "At most so many tokens")
      ->capture_default_str();
  verb->add_option("--temperature", options.temperature, "0: always the likeliest token")
      ->capture_default_str();
  verb->add_option("--top-k", options.top_k, "Of the likeliest so many; 0: all")
      ->capture_default_str();
  verb->add_option("--seed", options.seed, "The same seed gives the same text")
      ->capture_default_str();
}

// Verbs and options as completion offers them; `path` is the verb so far.
void CollectEntries(CLI::App& app, const std::string& path, std::vector<CompletionEntry>& out) {
  CompletionEntry entry;
  entry.verb = path;
  for (CLI::App* const verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    entry.words.push_back(verb->get_name());
  }
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      entry.words.push_back("--" + name);
    }
    entry.takes_job = entry.takes_job || option->get_name() == "JOB";
  }
  out.push_back(std::move(entry));
  for (CLI::App* const verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    CollectEntries(*verb, path.empty() ? verb->get_name() : path + " " + verb->get_name(), out);
  }
}

void AddHelpVerbs(CLI::App& app, CommandLine& line) {
  CLI::App* verb = AddVerb(app, line, "completion", "Print a completion script", [&app, &line] {
    std::vector<CompletionEntry> entries;
    CollectEntries(app, "", entries);
    const absl::StatusOr<std::string> script = CompletionScript(line.shell, entries);
    if (script.ok()) {
      Print(*script);
    }
    return Report(script.status());
  });
  verb->add_option("SHELL", line.shell, "bash, zsh or fish")->required();
  verb = AddVerb(app, line, "version", "Show versions", [&line] {
    return RunVersion(line.common, line.client_only);
  });
  verb->add_flag("--client", line.client_only, "Ask no coordinator");
}

// Names a word that stands where a verb should be, and the verb that was probably meant.
std::string VerbSuggestion(const CLI::App& app, int argc, char** argv) {
  const CLI::App* level = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] == '-') {
      return "";
    }
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* const verb :
         level->get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(verb->get_name());
      next = verb->get_name() == word ? verb : next;
    }
    if (next == nullptr) {
      const std::string near = names.empty() ? "" : SuggestName(word, names);
      return names.empty()  ? ""
             : near.empty() ? "no verb '" + word + "'"
                            : "no verb '" + word + "'; did you mean '" + near + "'?";
    }
    level = next;
  }
  return "";
}

int Main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  store::SetStoreFirstContactTime(std::chrono::seconds(4));
  log::Init("ravelctl", log::Format::kConsole, log::Level::kWarning);
  CommandLine line;
  CLI::App app("ravelctl: submit training jobs and look after them", "ravelctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  AddCommon(app, line);
  AddFileVerbs(app, line);
  AddLookVerbs(app, line);
  AddChangeVerbs(app, line);
  AddCheckpointVerbs(app, line);
  AddDataVerbs(app, line);
  AddTraceVerbs(app, line);
  AddGenerate(app, line);
  AddAccessVerbs(app, line.common, line.access, line.run);
  AddHelpVerbs(app, line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      return app.exit(error);  // --help
    }
    const std::string suggestion = VerbSuggestion(app, argc, argv);
    return ReportUsage(std::string(error.what()) + (suggestion.empty() ? "" : "; " + suggestion));
  }
  line.common.namespace_given = app.count("--namespace") > 0;
  if (const absl::Status output = ReadOutput(app, line.format, line.common); !output.ok()) {
    return Report(output);
  }
  if (NeedsEndpoint(app)) {
    if (const absl::Status found = FindCoordinator(line.access, line.common); !found.ok()) {
      return Report(found);
    }
  }
  return line.run();
}

}  // namespace
}  // namespace ravel::ctl

int main(int argc, char** argv) {
  return ravel::ctl::Main(argc, argv);
}
