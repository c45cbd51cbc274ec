// Verbs about checkpoints. A target that looks like a path is read directly, without a coordinator;
// anything else is the name of a job and is asked of the coordinator. Text that names problems is
// printed even when the verb fails.

#include "coordinator/ctl/checkpoint_verbs.h"

#include <algorithm>
#include <iostream>
#include <sstream>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/json.h"
#include "common/store/open_store.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/checkpoints_copy.h"
#include "coordinator/ctl/checkpoints_export.h"
#include "coordinator/ctl/checkpoints_verify.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/interrupt.h"
#include "coordinator/ctl/list_tables.h"

namespace ravel::ctl {
namespace {

bool IsPath(const std::string& target) {
  return target == "." || target == ".." || absl::StartsWith(target, "/") ||
         absl::StartsWith(target, "./") || absl::StartsWith(target, "../") ||
         absl::StartsWith(target, "file://") || store::IsRemoteStore(target) ||
         (absl::StrContains(target, '/') && access(target.c_str(), F_OK) == 0);
}

// Runs `action` with a text stream; prints the text even when it fails, because it names what is
// wrong.
template <typename Action>
int PrintAndReport(const Action& action) {
  std::ostringstream out;
  const absl::Status status = action(out);
  Print(out.str());
  return ReportEnd(status);
}

bool IsInterrupted() {
  return Interrupt::Get().requested();
}

// A table of nothing stays silent, as before.
int ReportMark(const CommonOptions& common,
               const CheckpointVerbOptions& options,
               CheckpointMark mark,
               const absl::Status& status) {
  if (status.ok() && common.format != Format::kTable && common.format != Format::kName) {
    json::Value document;
    document.Set("target", options.target).Set("step", options.step);
    document.Set("mark",
                 mark == CheckpointMark::kPin     ? "pin"
                 : mark == CheckpointMark::kUnpin ? "unpin"
                                                  : "unmark");
    Print(FormatDocument(WithSchemaVersion(document), common.format));
  }
  return Report(status);
}

// One line each, below the table of steps.
std::string LeftoverLines(const std::vector<LeftoverView>& leftovers) {
  std::string text;
  for (const LeftoverView& leftover : leftovers) {
    const int64_t age_ms = SystemClock::Get().WallMs() - leftover.changed_ms;
    absl::StrAppend(&text,
                    leftover.path,
                    ": ",
                    leftover.kind,
                    leftover.reason.empty() ? "" : ": ",
                    leftover.reason,
                    leftover.changed_ms > 0
                        ? absl::StrCat(", for ", FormatDuration(std::max<int64_t>(age_ms, 0)))
                        : "",
                    "\n");
  }
  return text;
}

int ListOfJob(const CommonOptions& common, const std::string& job) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const absl::StatusOr<CheckpointsView> checkpoints = (*client)->Checkpoints(NameOf(common, job));
  if (!checkpoints.ok()) {
    return Report(checkpoints.status());
  }
  if (!checkpoints->store_problem.empty()) {
    Say(absl::StrCat("pins and leftovers are not known: ", checkpoints->store_problem));
  }
  if (common.format == Format::kTable) {
    const Table table = StepTable(checkpoints->checkpoints, ColumnsOf(common));
    if (table.empty()) {
      Say("no checkpoints");
    } else {
      Print(table.Text(!common.no_headers));
    }
    Print(LeftoverLines(checkpoints->leftovers));
    return kExitOk;
  }
  std::string names;
  json::Array items;
  for (const CheckpointView& checkpoint : checkpoints->checkpoints) {
    absl::StrAppend(&names, checkpoint.path, "\n");
    items.push_back(checkpoint.document);
  }
  if (common.format == Format::kName || common.format == Format::kJsonl) {
    Print(common.format == Format::kName
              ? names
              : FormatDocument(json::Value(std::move(items)), common.format));
    return kExitOk;
  }
  json::Value document = ListDocument(std::move(items));
  json::Array leftovers;
  for (const LeftoverView& leftover : checkpoints->leftovers) {
    leftovers.push_back(leftover.document);
  }
  document.Set("leftovers", std::move(leftovers));
  document.Set("storeProblem", checkpoints->store_problem);
  Print(FormatDocument(document, common.format));
  return kExitOk;
}

}  // namespace

int RunCheckpointsList(const CommonOptions& common, const CheckpointVerbOptions& options) {
  if (!IsPath(options.target)) {
    return ListOfJob(common, options.target);
  }
  return PrintAndReport([&](std::ostream& out) {
    return ListCheckpoints({.folder = options.target,
                            .format = common.format,
                            .wide = common.wide,
                            .no_headers = common.no_headers,
                            .now_ms = SystemClock::Get().WallMs()},
                           out);
  });
}

int RunCheckpointsShow(const CommonOptions& common, const CheckpointVerbOptions& options) {
  return PrintAndReport([&](std::ostream& out) {
    return ShowCheckpoint(
        {.step = options.target, .tensors = options.tensors, .format = common.format}, out);
  });
}

int RunCheckpointsVerify(const CommonOptions& common, const CheckpointVerbOptions& options) {
  return PrintAndReport([&](std::ostream& out) {
    return VerifyCheckpoint(
        {.step = options.target,
         .step_number = options.step,
         .all = options.all,
         .depth = options.quick ? store::VerifyDepth::kQuick : store::VerifyDepth::kDeep,
         .format = common.format},
        out);
  });
}

int RunCheckpointsMark(const CommonOptions& common,
                       const CheckpointVerbOptions& options,
                       CheckpointMark mark) {
  if (IsPath(options.target)) {
    return ReportMark(
        common, options, mark, MarkInFolder(options.target, options.step, mark, options.reason));
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  return ReportMark(common,
                    options,
                    mark,
                    (*client)->MarkCheckpoint(
                        NameOf(common, options.target), options.step, mark, options.reason));
}

int RunRollback(const CommonOptions& common, const CheckpointVerbOptions& options) {
  const std::string number = std::string(absl::StripPrefix(options.to, "step="));
  int64_t step = -1;
  if (!absl::SimpleAtoi(number, &step) || step < 0) {
    return ReportUsage(absl::StrCat("--to: expected step=N, got '", options.to, "'"));
  }
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const absl::StatusOr<JobView> job =
      (*client)->Rollback(NameOf(common, options.target), step, options.reason);
  if (!job.ok()) {
    return Report(job.status());
  }
  if (common.format == Format::kTable) {
    Print(absl::StrCat("job ",
                       job->namespace_name,
                       "/",
                       job->name,
                       ": ",
                       job->state,
                       ", goes on from step ",
                       step,
                       "\n"));
  } else if (common.format == Format::kName) {
    Print(job->name + "\n");
  } else {
    Print(FormatDocument(WithSchemaVersion(job->document), common.format));
  }
  return kExitOk;
}

int RunCheckpointsCopy(const CommonOptions& common, const CheckpointVerbOptions& options) {
  Interrupt::Get();  // from here on a signal is noticed between pieces, and told
  return PrintAndReport([&](std::ostream& out) {
    return CopyCheckpoint({.from = options.target,
                           .to = options.to,
                           .print = common.format,
                           .cancelled = IsInterrupted},
                          out);
  });
}

int RunCheckpointsExport(const CommonOptions& common, const CheckpointVerbOptions& options) {
  if (options.dtype != "f32" && options.dtype != "bf16") {
    return ReportUsage(absl::StrCat("--dtype: expected f32 or bf16, got '", options.dtype, "'"));
  }
  if (options.reader != "transformers" && options.reader != "vllm") {
    return ReportUsage(
        absl::StrCat("--reader: expected transformers or vllm, got '", options.reader, "'"));
  }
  Interrupt::Get();  // from here on a signal is noticed between pieces, and told
  return PrintAndReport([&](std::ostream& out) {
    return ExportCheckpoint({.step = options.target,
                             .format = options.format,
                             .output = options.output,
                             .dtype = options.dtype == "f32" ? DType::kF32 : DType::kBF16,
                             .quantized = options.quantized,
                             .for_vllm = options.reader == "vllm",
                             .print = common.format,
                             .cancelled = IsInterrupted},
                            out);
  });
}

}  // namespace ravel::ctl
