// Verbs that only look: list, get, describe, events, logs, metrics, nodes, top. Each
// builds either a table for people or the documents of the views for programs (PrintList), from the
// same answer. Streams print one object a line as it comes.

#include "coordinator/ctl/look_verbs.h"

#include <algorithm>
#include <cctype>
#include <deque>
#include <map>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/clock.h"
#include "common/time_text.h"
#include "coordinator/ctl/event_file.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/list_tables.h"
#include "coordinator/ctl/progress.h"

namespace ravel::ctl {
namespace {

// Connects, or reports and sets the exit code.
std::unique_ptr<JobsClient> ConnectOrReport(const CommonOptions& common, int& exit_code) {
  absl::StatusOr<std::unique_ptr<JobsClient>> client = JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    exit_code = Report(client.status());
    return nullptr;
  }
  return *std::move(client);
}

// A table, names, or the documents of the views.
template <typename View, typename NameOfView>
void PrintList(const CommonOptions& common,
               const std::vector<View>& views,
               const Table& table,
               const NameOfView& name_of) {
  if (common.format == Format::kTable) {
    Print(table.Text(!common.no_headers));
    return;
  }
  if (common.format == Format::kName) {
    std::string names;
    for (const View& view : views) {
      absl::StrAppend(&names, name_of(view), "\n");
    }
    Print(names);
    return;
  }
  json::Array items;
  for (const View& view : views) {
    items.push_back(view.document);
  }
  Print(FormatDocument(ListDocument(std::move(items)), common.format));
}

// On stderr, so that the table stays one: what queued jobs wait for. A few are named; of more the
// commonest reasons are counted.
void SayWhatJobsWaitFor(const std::vector<JobView>& jobs) {
  constexpr std::size_t kMostLines = 3;
  std::vector<const JobView*> waiting;
  std::map<std::string, int64_t> counts;
  for (const JobView& job : jobs) {
    if (job.state == "QUEUED" && !job.message.empty()) {
      waiting.push_back(&job);
      counts[job.message] += 1;
    }
  }
  if (waiting.size() <= kMostLines) {
    for (const JobView* job : waiting) {
      Say(absl::StrCat(job->namespace_name, "/", job->name, " is queued: ", OneLine(job->message)));
    }
    return;
  }
  std::vector<std::pair<int64_t, std::string>> reasons;
  for (const auto& [reason, count] : counts) {
    reasons.emplace_back(-count, reason);
  }
  std::sort(reasons.begin(), reasons.end());
  for (std::size_t i = 0; i < std::min(reasons.size(), kMostLines); ++i) {
    const int64_t count = -reasons[i].first;
    Say(absl::StrCat(count, count == 1 ? " job is" : " jobs are", " queued: ", reasons[i].second));
  }
  if (reasons.size() > kMostLines) {
    Say(absl::StrCat("and ", reasons.size() - kMostLines, " other reasons; see ravelctl get JOB"));
  }
}

// "10m" is ten minutes ago; empty: no bound.
bool ParseSince(const std::string& since, int64_t& since_ms) {
  if (since.empty()) {
    return true;
  }
  const absl::StatusOr<int64_t> ago = ParseDurationMs(since);
  since_ms = ago.ok() ? SystemClock::Get().WallMs() - *ago : 0;
  return ago.ok();
}

// Returns true if a list that ends is printed as one document; a list that is followed is one
// object a line.
bool IsOneDocument(Format format) {
  return format == Format::kJson || format == Format::kYaml;
}

void PrintEvent(Format format, const EventView& event) {
  if (format == Format::kTable) {
    Print(EventLine(event) + "\n");
  } else {
    Print(json::Serialize(event.document) + "\n");
  }
}

std::vector<std::string> MetricCells(const StepRecord& metric) {
  return {absl::StrCat(metric.step),
          absl::StrFormat("%.6g", metric.loss),
          absl::StrFormat("%.4g", metric.grad_norm),
          absl::StrFormat("%.4g", metric.lr),
          ShortNumber(metric.tokens_per_second),
          absl::StrFormat("%.3f", metric.step_seconds),
          absl::StrCat(metric.world_size),
          absl::StrCat(metric.epoch),
          absl::StrCat(metric.attempt),
          metric.has_validation_loss ? absl::StrFormat("%.6g", metric.validation_loss) : "-"};
}

struct NewestEvents {
  std::deque<EventView> events;
  int64_t older = 0;  // events before these
};

// Keeps what came before `status` failed.
absl::Status ReadNewestEvents(JobsClient& client, const JobName& name, NewestEvents& newest) {
  constexpr std::size_t kNewest = 50;
  return client.Events(name, {}, [&](const EventView& event) {
    newest.events.push_back(event);
    if (newest.events.size() > kNewest) {
      newest.events.pop_front();
      ++newest.older;
    }
    return true;
  });
}

std::string NewestEventsText(const std::string& job, const NewestEvents& newest) {
  std::string out = "\nevents:\n";
  if (newest.older > 0) {
    absl::StrAppend(&out, "  ", newest.older, " older: ravelctl events ", job, "\n");
  }
  for (const EventView& event : newest.events) {
    absl::StrAppend(&out, "  ", EventLine(event), "\n");
  }
  return out;
}

std::string ConditionText(const ConditionView& condition) {
  return absl::StrCat(condition.status ? "True" : "False",
                      " since ",
                      FormatTime(condition.time_ms),
                      " (",
                      condition.reason,
                      ")",
                      condition.message.empty() ? "" : ": ",
                      condition.message);
}

// The job's document with its newest events, each as `ravelctl events` prints it.
json::Value DescribeDocument(const JobView& job, const NewestEvents& newest) {
  json::Value document = WithSchemaVersion(job.document);
  json::Array events;
  for (const EventView& event : newest.events) {
    events.push_back(event.document);
  }
  document.Set("mesh", MeshDocument(job.mesh)).Set("events", std::move(events));
  document.Set("olderEvents", newest.older);
  return document;
}

// True, and told, where -o name asks for the names of what has none.
bool RefuseNames(const CommonOptions& common, const char* what) {
  if (common.format == Format::kName) {
    Say(absl::StrCat("ravelctl: --output: name: ", what, " have none; expected another format"));
  }
  return common.format == Format::kName;
}

}  // namespace

int RunList(const CommonOptions& common, const ListOptions& options) {
  const std::string state = absl::AsciiStrToUpper(options.state);
  if (!state.empty() && !IsJobState(state)) {
    return ReportUsage(
        absl::StrCat("--state: expected a state such as RUNNING, got '", options.state, "'"));
  }
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  JobQuery query{
      options.all_namespaces ? "*" : common.namespace_name,
      options.selector,
      {},
      common.wide || (common.format != Format::kTable && common.format != Format::kName)};
  if (!state.empty()) {
    query.states.push_back(state);
  }
  const absl::StatusOr<std::vector<JobView>> jobs = client->List(query);
  if (!jobs.ok()) {
    return Report(jobs.status());
  }
  if (jobs->empty() && common.format == Format::kTable) {
    Say("no jobs");
    return kExitOk;
  }
  const Table table = JobTable(*jobs, options.all_namespaces, ColumnsOf(common));
  PrintList(common, *jobs, table, [](const JobView& job) { return job.name; });
  if (common.format == Format::kTable) {
    SayWhatJobsWaitFor(*jobs);
  }
  return kExitOk;
}

int RunGet(const CommonOptions& common, const std::string& name) {
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  const absl::StatusOr<JobView> job = client->Get(NameOf(common, name));
  if (!job.ok()) {
    return Report(job.status());
  }
  if (common.format == Format::kTable) {
    Print(JobTable({*job}, false, ColumnsOf(common)).Text(!common.no_headers));
    SayWhatJobsWaitFor({*job});
  } else if (common.format == Format::kName) {
    Print(job->name + "\n");
  } else {
    Print(FormatDocument(WithSchemaVersion(job->document), common.format));
  }
  return kExitOk;
}

int RunDescribe(const CommonOptions& common, const std::string& name) {
  if (common.format == Format::kName) {
    return RunGet(common, name);
  }
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  const absl::StatusOr<JobView> job = client->Get(NameOf(common, name));
  if (!job.ok()) {
    return Report(job.status());
  }
  NewestEvents newest;
  const absl::Status status = ReadNewestEvents(*client, NameOf(common, name), newest);
  if (common.format != Format::kTable) {
    if (status.ok()) {
      Print(FormatDocument(DescribeDocument(*job, newest), common.format));
    }
    return Report(status);
  }
  Table facts({"FIELD", "VALUE"});
  facts.AddRow({"Name", absl::StrCat(job->namespace_name, "/", job->name)});
  facts.AddRow({"Uid", job->uid});
  facts.AddRow(
      {"State", absl::StrCat(job->state, job->reason.empty() ? "" : " (" + job->reason + ")")});
  if (!job->message.empty()) {
    facts.AddRow({"Message", job->message});
  }
  facts.AddRow({"Progress", ProgressLine(*job)});
  facts.AddRow({"Loss", absl::StrFormat("%.4g -> %.4g", job->first_loss, job->loss)});
  facts.AddRow(
      {"Epoch",
       absl::StrCat(job->epoch, ", attempt ", job->attempt, ", ", job->restarts, " restarts")});
  facts.AddRow({"Mesh", job->mesh.empty() ? "-" : MeshText(job->mesh)});
  for (const GemmPathView& path : job->gemm_paths) {
    facts.AddRow({absl::StrCat("Gemm path, ", path.gemms), path.path});
  }
  facts.AddRow({"Checkpoint",
                job->committed_step < 0
                    ? "none"
                    : absl::StrCat("step ", job->committed_step, ", ", job->committed_path)});
  if (job->failed_saves > 0 || job->skipped_saves > 0) {
    facts.AddRow(
        {"Saves", absl::StrCat(job->failed_saves, " failed, ", job->skipped_saves, " skipped")});
  }
  if (const std::string goodput = GoodputText(job->document); !goodput.empty()) {
    facts.AddRow({"Goodput", goodput});
  }
  for (const ConditionView& condition : job->conditions) {
    facts.AddRow({condition.type, ConditionText(condition)});
  }
  facts.AddRow({"Created", FormatTime(job->created_ms)});
  facts.AddRow({"Started", job->started_ms == 0 ? "-" : FormatTime(job->started_ms)});
  facts.AddRow({"Finished", job->finished_ms == 0 ? "-" : FormatTime(job->finished_ms)});
  std::string out = facts.Text(false);
  if (const json::Value* const spec = job->document.Find("spec")) {
    json::Value wrapped;
    wrapped.Set("spec", *spec);
    out += "\n" + ToYaml(wrapped);
  }
  Print(out + NewestEventsText(name, newest));
  return Report(status);
}

int RunEvents(const CommonOptions& common, const EventsOptions& options) {
  if (RefuseNames(common, "events")) {
    return kExitUsage;
  }
  EventFilter filter{0, options.follow, 0};
  if (!ParseSince(options.since, filter.since_ms)) {
    return ReportUsage(
        absl::StrCat("--since: expected a duration such as 10m, got '", options.since, "'"));
  }
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  json::Array documents;
  const bool whole = IsOneDocument(common.format) && !options.follow;
  const absl::Status status =
      client->Events(NameOf(common, options.job), filter, [&](const EventView& event) {
        if (whole) {
          documents.push_back(event.document);
        } else {
          PrintEvent(common.format, event);
        }
        return true;
      });
  if (whole && status.ok()) {
    Print(FormatDocument(ListDocument(std::move(documents)), common.format));
  }
  return Report(status);
}

int RunLogs(const CommonOptions& common, const LogsOptions& options) {
  if (RefuseNames(common, "log lines")) {
    return kExitUsage;
  }
  LogFilter filter{options.rank, options.attempt, options.follow, options.tail, 0};
  if (!ParseSince(options.since, filter.since_ms)) {
    return ReportUsage(
        absl::StrCat("--since: expected a duration such as 10m, got '", options.since, "'"));
  }
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  json::Array documents;
  const bool whole = IsOneDocument(common.format) && !options.follow;
  const auto print = [&](const LogView& line) {
    if ((!options.node.empty() && line.node != options.node) ||
        !absl::StrContains(line.text, options.grep)) {
      return true;
    }
    if (common.format == Format::kTable) {
      Print(absl::StrCat("[", line.attempt, ".", line.rank, "] ", OneLine(line.text), "\n"));
    } else if (whole) {
      documents.push_back(line.document);
    } else {
      Print(json::Serialize(line.document) + "\n");
    }
    return true;
  };
  const absl::Status status = client->Logs(NameOf(common, options.job), filter, print);
  if (whole && status.ok()) {
    Print(FormatDocument(ListDocument(std::move(documents)), common.format));
  }
  return Report(status);
}

absl::Status WriteEvents(JobsClient& client,
                         const CommonOptions& common,
                         const MetricsOptions& options) {
  if (options.filter.all || options.filter.follow) {
    return absl::InvalidArgumentError(
        "--tensorboard: writes the surviving history once; not with --all or --follow");
  }
  const JobName name = NameOf(common, options.job);
  ASSIGN_OR_RETURN(const JobView job, client.Get(name));
  ASSIGN_OR_RETURN(const std::unique_ptr<EventFile> file,
                   EventFile::Create(options.tensorboard, absl::StrCat("0.", job.uid)));
  absl::Status written;
  RETURN_IF_ERROR(client.Metrics(name, options.filter, [&](const StepRecord& metric) {
    written = file->Add(metric);
    return written.ok();
  }));
  RETURN_IF_ERROR(written);
  RETURN_IF_ERROR(file->Publish());
  Say(absl::StrCat(file->steps(), " steps in ", file->path()));
  return absl::OkStatus();
}

int RunMetrics(const CommonOptions& common, const MetricsOptions& options) {
  if (RefuseNames(common, "steps")) {
    return kExitUsage;
  }
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  if (!options.tensorboard.empty()) {
    return Report(WriteEvents(*client, common, options));
  }
  Table table({"STEP",
               "LOSS",
               "GRAD-NORM",
               "LR",
               "TOK/S",
               "SECONDS",
               "WORKERS",
               "EPOCH",
               "ATTEMPT",
               "VALIDATION"});
  json::Array documents;
  const bool lines = common.format == Format::kJsonl || options.filter.follow;
  const absl::Status status =
      client->Metrics(NameOf(common, options.job), options.filter, [&](const StepRecord& metric) {
        if (lines && common.format != Format::kTable) {
          Print(json::Serialize(StepRecordJson(metric)) + "\n");
        } else if (lines) {
          Table row({"", "", "", "", "", "", "", "", "", ""});
          row.AddRow(MetricCells(metric));
          Print(row.Text(false));
        } else if (common.format == Format::kTable) {
          table.AddRow(MetricCells(metric));
        } else {
          documents.push_back(StepRecordJson(metric));
        }
        return true;
      });
  if (!lines && common.format == Format::kTable) {
    Print(table.empty() ? "" : table.Text(!common.no_headers));
  } else if (!lines) {
    Print(FormatDocument(ListDocument(std::move(documents)), common.format));
  }
  return Report(status);
}

int RunNodesList(const CommonOptions& common) {
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  const absl::StatusOr<std::vector<NodeView>> nodes = client->Nodes();
  if (!nodes.ok()) {
    return Report(nodes.status());
  }
  if (nodes->empty() && common.format == Format::kTable) {
    Say("no nodes");
    return kExitOk;
  }
  PrintList(common, *nodes, NodeTable(*nodes, ColumnsOf(common)), [](const NodeView& node) {
    return node.id;
  });
  return kExitOk;
}

int RunTop(const CommonOptions& common) {
  int exit_code = kExitOk;
  const std::unique_ptr<JobsClient> client = ConnectOrReport(common, exit_code);
  if (client == nullptr) {
    return exit_code;
  }
  const bool table = common.format == Format::kTable;
  const absl::StatusOr<std::vector<JobView>> jobs = client->List({"*", "", ActiveStates(), true});
  if (!jobs.ok()) {
    return Report(jobs.status());
  }
  const absl::StatusOr<std::vector<NodeView>> nodes = client->Nodes();
  if (!nodes.ok()) {
    return Report(nodes.status());
  }
  if (!table) {
    json::Value document;
    document.Set("schemaVersion", "ravel/v1");
    document.Set("jobs", json::Array());
    document.Set("nodes", json::Array());
    json::Array job_documents;
    for (const JobView& job : *jobs) {
      job_documents.push_back(job.document);
      job_documents.back().Set("mesh", MeshDocument(job.mesh));
    }
    json::Array node_documents;
    for (const NodeView& node : *nodes) {
      node_documents.push_back(node.document);
    }
    document.Set("jobs", std::move(job_documents));
    document.Set("nodes", std::move(node_documents));
    Print(FormatDocument(document, common.format));
    return kExitOk;
  }
  int64_t devices = 0;
  int64_t free = 0;
  for (const NodeView& node : *nodes) {
    devices += node.devices;
    free += node.devices_free;
  }
  Print(absl::StrCat(nodes->size(), " nodes, ", devices, " devices, ", free, " free\n"));
  for (const JobView& job : *jobs) {
    Print(absl::StrCat(job.namespace_name,
                       "/",
                       job.name,
                       "  ",
                       ProgressLine(job),
                       job.mesh.empty() ? "" : ", ",
                       MeshText(job.mesh),
                       "\n"));
  }
  return kExitOk;
}

}  // namespace ravel::ctl
