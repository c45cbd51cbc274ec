#include "coordinator/ctl/checkpoint_verbs.h"

#include <iostream>
#include <sstream>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/checkpoints_export.h"
#include "coordinator/ctl/exit_code.h"

namespace ravel::ctl {
namespace {

bool IsPath(const std::string& target) {
  return target == "." || target == ".." || absl::StartsWith(target, "/") ||
         absl::StartsWith(target, "./") || absl::StartsWith(target, "../") ||
         absl::StartsWith(target, "file://") ||
         (absl::StrContains(target, '/') && access(target.c_str(), F_OK) == 0);
}

// Runs `action` with a text stream; prints the text even when it fails, because it names what is
// wrong.
template <typename Action>
int PrintAndReport(const Action& action) {
  std::ostringstream out;
  const absl::Status status = action(out);
  Print(out.str());
  return Report(status);
}

int ListOfJob(const CommonOptions& common, const std::string& job) {
  const absl::StatusOr<std::unique_ptr<JobsClient>> client =
      JobsClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const absl::StatusOr<std::vector<CheckpointView>> checkpoints =
      (*client)->Checkpoints(NameOf(common, job));
  if (!checkpoints.ok()) {
    return Report(checkpoints.status());
  }
  if (common.format == Format::kTable) {
    Table table({"STEP", "STATE", "SIZE", "FILES", "WORKERS", "EPOCH", "AGE", "PATH"});
    for (const CheckpointView& checkpoint : *checkpoints) {
      table.AddRow({absl::StrCat(checkpoint.step),
                    checkpoint.state,
                    FormatBytes(checkpoint.bytes),
                    absl::StrCat(checkpoint.files),
                    absl::StrCat(checkpoint.world_size),
                    absl::StrCat(checkpoint.epoch),
                    FormatDuration(SystemClock::Get().WallMs() - checkpoint.created_ms),
                    checkpoint.path});
    }
    if (table.empty()) {
      Say("no checkpoints");
    } else {
      Print(table.Text(!common.no_headers));
    }
    return kExitOk;
  }
  std::string names;
  json::Array items;
  for (const CheckpointView& checkpoint : *checkpoints) {
    absl::StrAppend(&names, checkpoint.path, "\n");
    items.push_back(checkpoint.document);
  }
  Print(common.format == Format::kName
            ? names
            : FormatDocument(ListDocument(std::move(items)), common.format));
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
         .depth = options.quick ? store::VerifyDepth::kQuick : store::VerifyDepth::kDeep,
         .format = common.format},
        out);
  });
}

int RunCheckpointsExport(const CommonOptions& common, const CheckpointVerbOptions& options) {
  (void)common;
  if (options.dtype != "f32" && options.dtype != "bf16") {
    return ReportUsage(absl::StrCat("--dtype: expected f32 or bf16, got '", options.dtype, "'"));
  }
  return PrintAndReport([&](std::ostream& out) {
    return ExportCheckpoint({.step = options.target,
                             .format = options.format,
                             .output = options.output,
                             .dtype = options.dtype == "f32" ? DType::kF32 : DType::kBF16},
                            out);
  });
}

}  // namespace ravel::ctl
