// Deletes steps and attempts so that a crash at any point leaves something that says what it is.
// DELETED beside COMMIT is the one atomic act: before it the step is committed, after it the step
// is gone and the rest can be removed at any time by anyone. Marks (pins, BAD reports) move before
// the step they belong to, or a new step of the same number would inherit them.

#include "coordinator/saves/retention.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "coordinator/saves/copy_marks.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

// COMMIT first, DELETED last: as long as the folder exists it says what it is.
absl::Status RemoveWithdrawn(store::ObjectStore& store, const std::string& directory) {
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(directory);
  if (absl::IsNotFound(entries.status())) {
    return absl::OkStatus();  // another coordinator was faster
  }
  RETURN_IF_ERROR(entries.status());
  for (const store::ListedEntry& entry : *entries) {
    if (entry.name == ckpt::kDeletedFile) {
      continue;
    }
    RETURN_IF_ERROR(store::WithdrawIfThere(store, JoinPath(directory, entry.name)));
  }
  return store::WithdrawIfThere(store, directory);
}

// Withdrawn, or emptied and not yet removed. Publishing never makes an empty folder.
absl::StatusOr<bool> IsRestOfDeletion(const store::ObjectStore& store,
                                      const std::string& directory) {
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(directory);
  if (absl::IsNotFound(entries.status())) {
    return false;  // gone since it was listed
  }
  RETURN_IF_ERROR(entries.status());
  const auto contains = [&entries](std::string_view name) {
    return std::any_of(
        entries->begin(), entries->end(), [name](const auto& entry) { return entry.name == name; });
  };
  return entries->empty() || contains(ckpt::kDeletedFile);
}

// Every mark of a step (a BAD report, pins of any holder) in a folder of marks.
absl::StatusOr<std::vector<std::string>> MarksOf(const store::ObjectStore& store,
                                                 std::string_view marks,
                                                 const std::string& directory) {
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(marks);
  std::vector<std::string> found;
  if (absl::IsNotFound(entries.status())) {
    return found;
  }
  RETURN_IF_ERROR(entries.status());
  for (const store::ListedEntry& entry : *entries) {
    const std::optional<ckpt::PinName> pin = ckpt::ParsePinName(entry.name);
    const bool of_step = entry.name == directory || (marks == ckpt::kPinsFolder && pin &&
                                                     ckpt::StepName(pin->step) == directory);
    if (of_step) {
      found.push_back(JoinPath(marks, entry.name));
    }
  }
  return found;
}

absl::Status MoveAside(store::ObjectStore& store,
                       const std::vector<std::string>& directories,
                       const std::string& aside) {
  for (const std::string& directory : directories) {
    // Marks first: one that stayed would be taken for a mark of the new step of that number.
    for (const std::string_view marks : {ckpt::kBadFolder, ckpt::kPinsFolder}) {
      ASSIGN_OR_RETURN(const std::vector<std::string> found, MarksOf(store, marks, directory));
      for (const std::string& mark : found) {
        RETURN_IF_ERROR(store::MakeDirectories(store, JoinPath(aside, marks)));
        RETURN_IF_ERROR(store.PublishIfAbsent(mark, JoinPath(aside, mark)));
      }
    }
    RETURN_IF_ERROR(store::MakeDirectories(store, aside));
    RETURN_IF_ERROR(store.PublishIfAbsent(directory, JoinPath(aside, directory)));
  }
  return absl::OkStatus();
}

// Makes the step gone for everybody.
absl::Status Condemn(store::ObjectStore& store, const std::string& directory) {
  const absl::Status put = store.Put(JoinPath(directory, ckpt::kDeletedFile), "");
  return absl::IsAlreadyExists(put) ? absl::OkStatus() : put;
}

// DELETED is taken back when the step was pinned in the meantime: PinStep writes its mark before it
// looks for DELETED.
absl::StatusOr<bool> WithdrawUnlessPinned(store::ObjectStore& store, int64_t step, int64_t now_s) {
  const std::string directory = ckpt::StepName(step);
  const absl::Status condemned = Condemn(store, directory);
  if (absl::IsNotFound(condemned)) {
    return true;  // another coordinator has deleted it
  }
  RETURN_IF_ERROR(condemned);
  ASSIGN_OR_RETURN(const std::vector<std::string> pins,
                   MarksOf(store, ckpt::kPinsFolder, directory));
  for (const std::string& pin : pins) {
    const std::string name = pin.substr(pin.rfind('/') + 1);
    if (!ckpt::ParsePinName(name)->Expired(now_s)) {
      RETURN_IF_ERROR(store::WithdrawIfThere(store, JoinPath(directory, ckpt::kDeletedFile)));
      return false;
    }
  }
  return true;
}

absl::Status RemoveExpiredPins(store::ObjectStore& store, int64_t now_s) {
  const absl::StatusOr<std::vector<store::ListedEntry>> pins = store.List(ckpt::kPinsFolder);
  if (absl::IsNotFound(pins.status())) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(pins.status());
  for (const store::ListedEntry& entry : *pins) {
    const std::optional<ckpt::PinName> pin = ckpt::ParsePinName(entry.name);
    if (pin && pin->Expired(now_s)) {
      RETURN_IF_ERROR(store::WithdrawIfThere(store, JoinPath(ckpt::kPinsFolder, entry.name)));
    }
  }
  return absl::OkStatus();
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
    RETURN_IF_ERROR(Condemn(store, directory));
  }
  return RemoveWithdrawn(store, directory);
}

absl::StatusOr<std::vector<int64_t>> ApplyRetention(store::ObjectStore& store,
                                                    const RetentionPolicy& policy,
                                                    const std::set<int64_t>& in_use,
                                                    int64_t now_s,
                                                    const DeletionGate& gate) {
  RETURN_IF_ERROR(RemoveExpiredPins(store, now_s));
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store, now_s));
  for (const StepListing::Damaged& damaged : listing.damaged) {
    ASSIGN_OR_RETURN(const bool rest, IsRestOfDeletion(store, damaged.directory));
    if (rest) {
      RETURN_IF_ERROR(RemoveWithdrawn(store, damaged.directory));
    }
  }
  std::vector<int64_t> deleted;
  for (const int64_t step : StepsToDelete(listing.steps, policy, in_use)) {
    if (gate && !gate(step)) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool withdrawn, WithdrawUnlessPinned(store, step, now_s));
    if (withdrawn) {
      RETURN_IF_ERROR(DeleteStep(store, step));
      deleted.push_back(step);
    }
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
  RETURN_IF_ERROR(MoveAside(store, moved, absl::StrCat("old-", job)));
  return moved;
}

absl::StatusOr<std::vector<std::string>> MoveStepsAbove(store::ObjectStore& store,
                                                        int64_t step,
                                                        const std::string& aside) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(""));
  std::vector<std::string> moved;
  for (const store::ListedEntry& entry : entries) {
    if (entry.is_directory && ckpt::ParseStepName(entry.name).value_or(-1) > step) {
      moved.push_back(entry.name);
    }
  }
  RETURN_IF_ERROR(MoveAside(store, moved, aside));
  return moved;
}

absl::StatusOr<std::vector<int64_t>> RemoveStepsOf(store::ObjectStore& store,
                                                   const std::string& job) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  std::vector<int64_t> removed;
  for (const CommittedStepInfo& info : listing.steps) {
    if (info.commit.job == job && !info.pinned) {
      RETURN_IF_ERROR(DeleteStep(store, info.step));
      removed.push_back(info.step);
    }
  }
  return removed;
}

absl::Status WithdrawAttempt(store::ObjectStore& store, const ckpt::AttemptKey& key) {
  const std::string name = ckpt::AttemptName(key);
  if (key.attempt > ckpt::kRemovedAttempt && !IsCopy(key)) {  // its removal was cut off
    return store::WithdrawIfThere(store, name);
  }
  ckpt::AttemptKey aside = key;
  aside.attempt += ckpt::kRemovedAttempt;
  const std::string removed = ckpt::AttemptName(aside);
  absl::Status renamed = store.PublishIfAbsent(name, removed);
  if (absl::IsAlreadyExists(renamed)) {
    RETURN_IF_ERROR(store::WithdrawIfThere(store, removed));
    renamed = store.PublishIfAbsent(name, removed);
  }
  if (absl::IsNotFound(renamed)) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(renamed);
  return store::WithdrawIfThere(store, removed);
}

absl::StatusOr<std::vector<ckpt::AttemptKey>> CleanAttempts(store::ObjectStore& store,
                                                            std::optional<uint32_t> job_tag,
                                                            int64_t end_epoch) {
  ASSIGN_OR_RETURN(const std::vector<ckpt::AttemptKey> attempts, ListAttempts(store));
  std::vector<ckpt::AttemptKey> removed;
  for (const ckpt::AttemptKey& key : attempts) {
    if (key.job_tag == job_tag && key.epoch < end_epoch && !IsCopy(key)) {
      RETURN_IF_ERROR(WithdrawAttempt(store, key));
      removed.push_back(key);
    }
  }
  return removed;
}

absl::Status CleanAttemptsOf(store::ObjectStore& store, const std::string& job, int64_t end_epoch) {
  RETURN_IF_ERROR(CleanAttempts(store, ckpt::JobTag(job), end_epoch).status());
  // Attempts of releases before 2 have no job tag in their names: this folder is one job's.
  return CleanAttempts(store, std::nullopt, end_epoch).status();
}

absl::Status RemoveAllOf(store::ObjectStore& store, const std::string& job) {
  constexpr int kLooks = 3;
  absl::Status removed;
  for (int look = 0; look < kLooks; ++look) {
    removed = RemoveStepsOf(store, job).status();
    removed = removed.ok() ? CleanAttemptsOf(store, job) : removed;
    if (removed.ok()) {
      return removed;
    }
  }
  return absl::UnavailableError(removed.message());
}

}  // namespace ravel::coordinator
