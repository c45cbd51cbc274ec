#include "coordinator/retention.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

// Everything but DELETED first: as long as the folder exists it says what it is.
absl::Status RemoveWithdrawn(store::ObjectStore& store, const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(directory));
  for (const store::ListedEntry& entry : entries) {
    if (entry.name == ckpt::kDeletedFile) {
      continue;
    }
    const std::string path = JoinPath(directory, entry.name);
    const absl::Status removed =
        entry.is_directory ? store::RemoveTree(store, path) : store.Remove(path);
    RETURN_IF_ERROR(absl::IsNotFound(removed) ? absl::OkStatus() : removed);
  }
  return store::RemoveTree(store, directory);
}

// Withdrawn, or emptied and not yet removed. Publishing never makes an empty folder.
absl::StatusOr<bool> IsRestOfDeletion(const store::ObjectStore& store,
                                      const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(directory));
  const auto contains = [&entries](std::string_view name) {
    return std::any_of(
        entries.begin(), entries.end(), [name](const auto& entry) { return entry.name == name; });
  };
  return entries.empty() || (contains(ckpt::kDeletedFile) && !contains(ckpt::kCommitFile));
}

}  // namespace

std::vector<int64_t> StepsToDelete(std::span<const CommittedStepInfo> steps,
                                   const RetentionPolicy& policy,
                                   const std::set<int64_t>& in_use) {
  CHECK_GE(policy.keep_last, 1);
  std::vector<const CommittedStepInfo*> good;
  for (const CommittedStepInfo& info : steps) {
    if (!info.bad) {
      good.push_back(&info);
    }
  }
  std::sort(
      good.begin(), good.end(), [](const auto* a, const auto* b) { return a->step > b->step; });
  std::vector<int64_t> unwanted;
  for (size_t i = static_cast<size_t>(policy.keep_last); i < good.size(); ++i) {
    const CommittedStepInfo& info = *good[i];
    const bool periodic = policy.every_steps > 0 && info.step % policy.every_steps == 0;
    if (!periodic && !info.pinned && !in_use.contains(info.step)) {
      unwanted.push_back(info.step);
    }
  }
  std::reverse(unwanted.begin(), unwanted.end());
  return unwanted;
}

absl::Status DeleteStep(store::ObjectStore& store, int64_t step) {
  const std::string directory = ckpt::StepName(step);
  ASSIGN_OR_RETURN(const bool exists, store::Exists(store, directory));
  if (!exists) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const bool committed,
                   store::Exists(store, JoinPath(directory, ckpt::kCommitFile)));
  if (committed) {
    RETURN_IF_ERROR(store.Replace(JoinPath(directory, ckpt::kCommitFile),
                                  JoinPath(directory, ckpt::kDeletedFile)));
    RETURN_IF_ERROR(store.SyncDirectory(directory));
  }
  return RemoveWithdrawn(store, directory);
}

absl::StatusOr<std::vector<int64_t>> ApplyRetention(store::ObjectStore& store,
                                                    const RetentionPolicy& policy,
                                                    const std::set<int64_t>& in_use) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  for (const StepListing::Damaged& damaged : listing.damaged) {
    ASSIGN_OR_RETURN(const bool rest, IsRestOfDeletion(store, damaged.directory));
    if (rest) {
      RETURN_IF_ERROR(RemoveWithdrawn(store, damaged.directory));
    }
  }
  std::vector<int64_t> deleted;
  for (const int64_t step : StepsToDelete(listing.steps, policy, in_use)) {
    RETURN_IF_ERROR(DeleteStep(store, step));
    deleted.push_back(step);
  }
  return deleted;
}

absl::StatusOr<std::vector<std::string>> SetAside(store::ObjectStore& store,
                                                  const std::string& job,
                                                  int64_t step) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  std::vector<std::string> moved;
  for (const CommittedStepInfo& info : listing.steps) {
    if (info.commit.job != job && info.step > step) {
      moved.push_back(info.directory);
    }
  }
  for (const StepListing::Damaged& damaged : listing.damaged) {
    if (ckpt::ParseStepName(damaged.directory).value_or(-1) > step) {
      moved.push_back(damaged.directory);
    }
  }
  const std::string aside = absl::StrCat("old-", job);
  for (const std::string& directory : moved) {
    // Marks first: one that stayed would be taken for a mark of the new step of that number.
    for (const std::string_view marks : {ckpt::kBadFolder, ckpt::kPinsFolder}) {
      const std::string mark = JoinPath(marks, directory);
      ASSIGN_OR_RETURN(const bool marked, store::Exists(store, mark));
      if (marked) {
        RETURN_IF_ERROR(store::MakeDirectories(store, JoinPath(aside, marks)));
        RETURN_IF_ERROR(store.RenameNoReplace(mark, JoinPath(aside, mark)));
        RETURN_IF_ERROR(store.SyncDirectory(marks));
      }
    }
    RETURN_IF_ERROR(store::MakeDirectories(store, aside));
    RETURN_IF_ERROR(store.RenameNoReplace(directory, JoinPath(aside, directory)));
  }
  if (!moved.empty()) {
    RETURN_IF_ERROR(store.SyncDirectory(aside));
    RETURN_IF_ERROR(store.SyncDirectory(""));
  }
  return moved;
}

absl::StatusOr<std::vector<ckpt::AttemptKey>> CleanAttempts(
    store::ObjectStore& store, std::span<const ckpt::AttemptKey> keep) {
  ASSIGN_OR_RETURN(const std::vector<ckpt::AttemptKey> attempts, ListAttempts(store));
  std::vector<ckpt::AttemptKey> removed;
  for (const ckpt::AttemptKey& key : attempts) {
    if (std::find(keep.begin(), keep.end(), key) == keep.end()) {
      // COMMIT, if there is one, goes first by its name: nobody publishes a half-removed attempt.
      RETURN_IF_ERROR(store::RemoveTree(store, ckpt::AttemptName(key)));
      removed.push_back(key);
    }
  }
  return removed;
}

}  // namespace ravel::coordinator
