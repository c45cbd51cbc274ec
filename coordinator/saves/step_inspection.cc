// Tells damaged steps from steps that cannot be read now. The distinction decides what happens to
// progress: a damaged step is marked BAD and the job goes back, an unreadable one makes it wait.
// Damage needs proof: complete bytes that contradict a checksum, read twice with the same result.
// Missing or short files prove nothing, because network mounts show them for a while after a write.
// Candidates are tried from the newest down.

#include "coordinator/saves/step_inspection.h"

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/store/committed_step.h"
#include "common/store/step_verifier.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

StepInspection Unreadable(std::string reason) {
  return {StepCondition::kUnreadable, std::move(reason)};
}
StepInspection Unreadable(const absl::Status& status) {
  return Unreadable(std::string(status.message()));
}
StepInspection Damaged(std::string reason) {
  return {StepCondition::kDamaged, std::move(reason)};
}

absl::StatusOr<std::map<std::string, int64_t>> SizesOf(const store::ObjectStore& store,
                                                       const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(folder));
  std::map<std::string, int64_t> sizes;
  for (const store::ListedEntry& entry : entries) {
    sizes[entry.name] = entry.size;
  }
  return sizes;
}

// COMMIT alone: there, whole, and of this step.
StepInspection InspectCommit(const store::ObjectStore& store,
                             const std::string& directory,
                             int64_t step,
                             ckpt::CommitRecord& commit) {
  const absl::StatusOr<std::string> text =
      store::ReadFile(store, JoinPath(directory, ckpt::kCommitFile), ckpt::kMaxCommitBytes);
  if (absl::IsNotFound(text.status())) {
    return Unreadable("COMMIT is missing");
  }
  if (!text.ok()) {
    return Unreadable(text.status());
  }
  absl::StatusOr<ckpt::CommitRecord> parsed = ckpt::ParseCommit(*text);
  if (!parsed.ok()) {
    const bool whole = absl::IsDataLoss(parsed.status()) && absl::EndsWith(*text, "}\n");
    return whole ? Damaged(std::string(parsed.status().message())) : Unreadable(parsed.status());
  }
  commit = *std::move(parsed);
  if (commit.step != step) {
    return Damaged(absl::StrCat("COMMIT: step: is ", commit.step, ", expected ", step));
  }
  return {};
}

// Every file of the manifest lies there with its size.
StepInspection InspectSizes(const store::ObjectStore& store,
                            const std::string& directory,
                            const ckpt::Manifest& manifest) {
  std::map<std::string, std::map<std::string, int64_t>> folders;
  for (const ckpt::FileRecord& file : manifest.files) {
    const size_t slash = file.path.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : file.path.substr(0, slash);
    if (!folders.contains(folder)) {
      auto sizes = SizesOf(store, JoinPath(directory, folder));
      if (!sizes.ok()) {
        return Unreadable(sizes.status());
      }
      folders[folder] = *std::move(sizes);
    }
    const std::map<std::string, int64_t>& sizes = folders[folder];
    const auto found = sizes.find(file.path.substr(slash == std::string::npos ? 0 : slash + 1));
    if (found == sizes.end()) {
      return Unreadable(absl::StrCat(file.path, ": missing"));
    }
    if (found->second != file.size) {
      return Unreadable(
          absl::StrCat(file.path, ": ", found->second, " bytes, the manifest says ", file.size));
    }
  }
  return {};
}

StepInspection InspectOnce(const store::ObjectStore& store, int64_t step, InspectionDepth depth) {
  const std::string directory = ckpt::StepName(step);
  ckpt::CommitRecord commit;
  StepInspection result = InspectCommit(store, directory, step, commit);
  if (result.condition != StepCondition::kGood) {
    return result;
  }
  const auto sizes = SizesOf(store, directory);
  if (!sizes.ok()) {
    return Unreadable(sizes.status());
  }
  if (sizes->contains(std::string(ckpt::kDeletedFile))) {
    return Unreadable("it is being deleted");
  }
  const auto manifest = sizes->find(std::string(ckpt::kManifestFile));
  if (manifest == sizes->end() || manifest->second != commit.manifest_bytes) {
    return Unreadable(
        absl::StrCat("manifest.pb is missing or does not have ", commit.manifest_bytes, " bytes"));
  }
  const absl::StatusOr<store::CommittedStep> opened = store::CommittedStep::Open(&store, directory);
  if (!opened.ok()) {
    const std::string where = store.Locate(directory) + ": ";
    std::string why(opened.status().message());
    why.erase(0, absl::StartsWith(why, where) ? where.size() : 0);
    return absl::IsDataLoss(opened.status()) ? Damaged(why) : Unreadable(why);
  }
  result = InspectSizes(store, directory, opened->manifest());
  if (result.condition != StepCondition::kGood) {
    return result;
  }
  const store::VerifyReport report = store::VerifyStep(
      store,
      directory,
      depth == InspectionDepth::kDeep ? store::VerifyDepth::kDeep : store::VerifyDepth::kQuick);
  for (const store::StepProblem& problem : report.problems) {
    if (problem.unread) {
      return Unreadable(problem.Text());
    }
  }
  return report.ok() ? StepInspection() : Damaged(report.problems.front().Text());
}

// A folder with a step's name, newest first.
struct Candidate {
  int64_t step = 0;
  const CommittedStepInfo* info = nullptr;  // null: its COMMIT does not tell
};

std::vector<Candidate> CandidatesOf(const StepListing& listing) {
  std::vector<Candidate> candidates;
  for (const CommittedStepInfo& info : listing.steps) {
    candidates.push_back({info.step, &info});
  }
  for (const StepListing::Damaged& damaged : listing.damaged) {
    const int64_t step = ckpt::ParseStepName(damaged.directory).value_or(-1);
    if (step >= 0 && !damaged.withdrawn) {
      candidates.push_back({step, nullptr});
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.step > b.step;
  });
  return candidates;
}

absl::Status CannotRead(const store::ObjectStore& store, int64_t step, std::string_view reason) {
  return absl::UnavailableError(absl::StrCat(
      store.Locate(ckpt::StepName(step)), " cannot be read now: ", std::string(reason)));
}

}  // namespace

StepInspection InspectStep(const store::ObjectStore& store, int64_t step, InspectionDepth depth) {
  const StepInspection first = InspectOnce(store, step, depth);
  return first.condition == StepCondition::kDamaged ? InspectOnce(store, step, depth) : first;
}

absl::StatusOr<RestoreChoice> ChooseRestore(store::ObjectStore& store,
                                            const RestoreWindow& window) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  std::vector<std::string> damages;  // newest first
  bool recorded_seen = window.committed_step < 0;
  for (const Candidate& candidate : CandidatesOf(listing)) {
    const bool recorded = candidate.step <= window.committed_step;
    if (!recorded && (candidate.info == nullptr || candidate.info->commit.job != window.job_uid)) {
      continue;  // never a step of this job
    }
    if (!recorded_seen && candidate.step < window.committed_step) {
      break;
    }
    recorded_seen = recorded_seen || candidate.step == window.committed_step;
    const bool marked = candidate.info != nullptr && candidate.info->bad;
    const StepInspection inspected =
        marked ? Damaged(candidate.info->bad_reason) : InspectStep(store, candidate.step);
    if (inspected.condition == StepCondition::kGood) {
      RestoreChoice choice = {.step = candidate.step,
                              .directory = ckpt::StepName(candidate.step),
                              .fallback_reason = {}};
      if (candidate.step < window.committed_step) {
        choice.fallback_reason = absl::StrJoin(damages, "; ");
      }
      return choice;
    }
    if (inspected.condition == StepCondition::kUnreadable) {
      return CannotRead(store, candidate.step, inspected.reason);
    }
    if (!marked) {
      RETURN_IF_ERROR(MarkBad(store, candidate.step, inspected.reason));
    }
    damages.push_back(absl::StrCat("step ", candidate.step, ": ", inspected.reason));
  }
  if (!recorded_seen) {
    return CannotRead(store, window.committed_step, "the folder of the newest commit is missing");
  }
  if (!window.has_commit) {
    return RestoreChoice();
  }
  return absl::DataLossError(absl::StrCat(
      store.Locate(""),
      " holds no good step: ",
      damages.empty() ? "no commit of the job is left" : absl::StrJoin(damages, "; ")));
}

}  // namespace ravel::coordinator
