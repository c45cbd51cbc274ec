// Verifies one step of a folder, or all of them, with the code that the coordinator and trainers
// use. A deep verification casts quantized weights again, too. With --all the text has one line per
// step below the problems of that step; one damaged step hides none of the others.

#include "coordinator/ctl/checkpoints_verify.h"

#include <algorithm>
#include <memory>
#include <ostream>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/ckpt/step_layout.h"
#include "common/store/committed_step.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/quantized_weights.h"
#include "coordinator/saves/saves.h"

namespace ravel::ctl {
namespace {

// Casts quantized weights again: their codes must have the digests that were saved.
absl::Status VerifyCodes(const store::ObjectStore& files,
                         const std::string& directory,
                         store::VerifyReport& report) {
  ASSIGN_OR_RETURN(store::CommittedStep step, store::CommittedStep::Open(&files, directory));
  if (step.manifest().quant.tensors.empty()) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(QuantizedWeights quantized, QuantizedWeights::Of(&step));
  for (const ckpt::QuantizedRecord& weight : quantized.weights()) {
    ASSIGN_OR_RETURN(const uint64_t digest, quantized.Digest(weight));
    if (digest != weight.digest64 && std::ssize(report.problems) < store::kMaxProblems) {
      report.problems.push_back(
          {.tensor = weight.name,
           .what = absl::StrFormat(
               "its codes have digest64 %016x, the manifest says %016x", digest, weight.digest64)});
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<store::VerifyReport> VerifyOne(const store::ObjectStore& files,
                                              const std::string& directory,
                                              store::VerifyDepth depth) {
  store::VerifyReport report = store::VerifyStep(files, directory, depth);
  if (report.ok() && depth == store::VerifyDepth::kDeep) {
    RETURN_IF_ERROR(VerifyCodes(files, directory, report));
  }
  return report;
}

const char* DepthName(store::VerifyDepth depth) {
  return depth == store::VerifyDepth::kDeep ? "deep" : "quick";
}

void PrintReport(const std::string& path,
                 const store::VerifyReport& report,
                 store::VerifyDepth depth,
                 std::ostream& out) {
  for (const store::StepProblem& problem : report.problems) {
    out << "BAD   " << problem.Text() << "\n";
  }
  for (const std::string& stray : report.stray) {
    out << "STRAY " << stray << ": not in the manifest; other readers would take it for data\n";
  }
  out << path << ": " << (report.ok() ? "ok" : "NOT WHOLE") << " (" << DepthName(depth)
      << "): " << report.files << " files, " << report.tensors << " tensors, "
      << FormatBytes(report.bytes) << "\n";
}

json::Value ReportJson(const std::string& path,
                       const store::VerifyReport& report,
                       store::VerifyDepth depth) {
  json::Value document;
  document.Set("path", path);
  document.Set("step", report.step);
  document.Set("ok", report.ok());
  document.Set("depth", DepthName(depth));
  document.Set("files", report.files);
  document.Set("tensors", report.tensors);
  document.Set("bytes", report.bytes);
  json::Array problems;
  for (const store::StepProblem& problem : report.problems) {
    json::Value entry;
    entry.Set("file", problem.file);
    entry.Set("tensor", problem.tensor);
    entry.Set("block", problem.block);
    entry.Set("what", problem.what);
    problems.push_back(std::move(entry));
  }
  document.Set("problems", std::move(problems));
  document.Set("stray", json::Array(report.stray.begin(), report.stray.end()));
  return document;
}

absl::Status StatusOf(const std::string& path, const store::VerifyReport& report) {
  return report.ok() ? absl::OkStatus()
                     : absl::DataLossError(
                           absl::StrCat(path, ": not whole: ", report.problems.front().Text()));
}

bool IsText(Format format) {
  return format == Format::kTable || format == Format::kName;
}

absl::StatusOr<StepLocation> LocateNumber(const std::string& folder, int64_t number) {
  StepLocation location;
  ASSIGN_OR_RETURN(location.store, OpenCheckpointFolder(folder));
  ASSIGN_OR_RETURN(const coordinator::StepListing listing, coordinator::ListSteps(*location.store));
  for (const coordinator::CommittedStepInfo& info : listing.steps) {
    if (info.step == number) {
      location.directory = info.directory;
      return location;
    }
  }
  const std::string name = ckpt::StepName(number);
  for (const coordinator::StepListing::Damaged& damaged : listing.damaged) {
    if (damaged.directory == name) {
      return absl::DataLossError(
          absl::StrCat(location.store->Locate(name), ": not whole: ", damaged.reason));
    }
  }
  return absl::NotFoundError(absl::StrCat("--step: ", folder, ": has no committed step ", number));
}

// The steps of a folder, one after another; what went wrong with them together.
class FolderVerifier {
 public:
  FolderVerifier(const store::ObjectStore& files,
                 const CheckpointVerifyOptions& options,
                 std::ostream& out)
      : files_(files), options_(options), out_(out) {}

  void Verify(const coordinator::CommittedStepInfo& info) {
    const std::string path = files_.Locate(info.directory);
    const absl::StatusOr<store::VerifyReport> report =
        VerifyOne(files_, info.directory, options_.depth);
    if (!report.ok()) {
      AddFailure(path, info.step, report.status());
    } else {
      Add(path, *report);
    }
  }

  // A step that has no report.
  void AddFailure(const std::string& path, int64_t step, const absl::Status& status) {
    store::VerifyReport report;
    report.step = step;
    report.problems.push_back({.what = std::string(status.message())});
    Add(path, report, status);
  }

  void Skip(const coordinator::CommittedStepInfo& info) {
    if (IsText(options_.format)) {
      out_ << files_.Locate(info.directory) << ": marked BAD, skipped: " << info.bad_reason << "\n";
    }
  }

  absl::Status Finish() {
    if (!IsText(options_.format)) {
      out_ << FormatDocument(ListDocument(std::move(items_)), options_.format);
    }
    return failed_ <= 1 ? worst_
                        : absl::Status(worst_.code(),
                                       absl::StrCat(failed_,
                                                    " of ",
                                                    steps_,
                                                    " steps are not whole; ",
                                                    std::string(worst_.message())));
  }

 private:
  void Add(const std::string& path, const store::VerifyReport& report, absl::Status status = {}) {
    status.Update(StatusOf(path, report));
    ++steps_;
    failed_ += status.ok() ? 0 : 1;
    if (worst_.ok() || (absl::IsDataLoss(status) && !absl::IsDataLoss(worst_))) {
      worst_ = status;
    }
    if (IsText(options_.format)) {
      PrintReport(path, report, options_.depth, out_);
    } else {
      items_.push_back(ReportJson(path, report, options_.depth));
    }
  }

  const store::ObjectStore& files_;
  const CheckpointVerifyOptions& options_;
  std::ostream& out_;
  json::Array items_;
  int64_t steps_ = 0;
  int64_t failed_ = 0;
  absl::Status worst_;
};

absl::Status VerifyFolder(const CheckpointVerifyOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<store::ObjectStore> files,
                   OpenCheckpointFolder(options.step));
  ASSIGN_OR_RETURN(const coordinator::StepListing listing, coordinator::ListSteps(*files));
  if (listing.steps.empty() && listing.damaged.empty()) {
    return absl::NotFoundError(
        absl::StrCat(options.step, ": --all: expected a folder with committed steps"));
  }
  FolderVerifier verifier(*files, options, out);
  for (const coordinator::CommittedStepInfo& info : listing.steps) {
    if (info.bad) {
      verifier.Skip(info);
    } else {
      verifier.Verify(info);
    }
  }
  for (const coordinator::StepListing::Damaged& damaged : listing.damaged) {
    if (!damaged.withdrawn) {
      verifier.AddFailure(files->Locate(damaged.directory),
                          ckpt::ParseStepName(damaged.directory).value_or(-1),
                          absl::DataLossError(damaged.reason));
    }
  }
  return verifier.Finish();
}

}  // namespace

absl::Status VerifyCheckpoint(const CheckpointVerifyOptions& options, std::ostream& out) {
  if (options.all && options.step_number >= 0) {
    return absl::InvalidArgumentError("--all: not with --step");
  }
  if (options.all) {
    return VerifyFolder(options, out);
  }
  ASSIGN_OR_RETURN(const StepLocation location,
                   options.step_number >= 0 ? LocateNumber(options.step, options.step_number)
                                            : LocateStep(options.step));
  ASSIGN_OR_RETURN(const store::VerifyReport report,
                   VerifyOne(*location.store, location.directory, options.depth));
  const std::string path = location.store->Locate(location.directory);
  if (IsText(options.format)) {
    PrintReport(path, report, options.depth, out);
  } else {
    out << FormatDocument(WithSchemaVersion(ReportJson(path, report, options.depth)),
                          options.format);
  }
  return StatusOf(path, report);
}

}  // namespace ravel::ctl
