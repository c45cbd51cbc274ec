// Deletes steps and attempts so that a crash at any point leaves something that says what it is.
// DELETED beside COMMIT is the one atomic act: before it the step is committed, after it the step
// is gone and the rest can be removed at any time by anyone. Data go under another name: a slow
// removal by the step's own name would go on in the next step of that number. Marks (pins, BAD
// reports) move before the step they belong to, or a new step of the same number would inherit
// them.

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

enum class FolderState {
  kGone,
  kRest,  // of a deletion: withdrawn, or emptied and not yet removed
  kOther,
};

// Publishing never makes an empty folder.
absl::StatusOr<FolderState> StateOf(const store::ObjectStore& store, const std::string& directory) {
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(directory);
  if (absl::IsNotFound(entries.status())) {
    return FolderState::kGone;
  }
  RETURN_IF_ERROR(entries.status());
  const bool withdrawn = std::any_of(entries->begin(), entries->end(), [](const auto& entry) {
    return entry.name == ckpt::kDeletedFile;
  });
  return entries->empty() || withdrawn ? FolderState::kRest : FolderState::kOther;
}

// COMMIT, whether or not the step is withdrawn; none when it is missing or damaged.
absl::StatusOr<std::optional<ckpt::CommitRecord>> CommitIn(const store::ObjectStore& store,
                                                           const std::string& directory) {
  const absl::StatusOr<std::string> text =
      store::ReadFile(store, JoinPath(directory, ckpt::kCommitFile), ckpt::kMaxCommitBytes);
  if (absl::IsNotFound(text.status()) || absl::IsDataLoss(text.status())) {
    return std::optional<ckpt::CommitRecord>();
  }
  RETURN_IF_ERROR(text.status());
  absl::StatusOr<ckpt::CommitRecord> commit = ckpt::ParseCommit(*text);
  return commit.ok() ? std::optional<ckpt::CommitRecord>(*std::move(commit)) : std::nullopt;
}

bool IsRemoved(const ckpt::AttemptKey& key) {
  return key.attempt > ckpt::kRemovedAttempt && key.attempt < kCopyAttempt;
}

// The name under which a step is removed: that of the removed attempt of its save, so that a
// removal that is cut off is collected with those, and steps of one number do not share it.
absl::StatusOr<std::string> RemovedName(const store::ObjectStore& store, int64_t step) {
  ckpt::AttemptKey key = {.step = step, .epoch = 1, .attempt = kCopyAttempt - 1};
  ASSIGN_OR_RETURN(const std::optional<ckpt::CommitRecord> commit,
                   CommitIn(store, ckpt::StepName(step)));
  if (commit && commit->attempt > 0 && commit->attempt < ckpt::kRemovedAttempt) {
    key.epoch = commit->epoch;
    key.attempt = commit->attempt + ckpt::kRemovedAttempt;
    key.job_tag = ckpt::JobTag(commit->job);
  }
  return ckpt::AttemptName(key);
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

// Unix time at which pins are looked at; none: they do not count.
using PinTime = std::optional<int64_t>;

absl::StatusOr<bool> IsPinned(const store::ObjectStore& store, int64_t step, PinTime time_s) {
  if (!time_s) {
    return false;
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> pins,
                   MarksOf(store, ckpt::kPinsFolder, ckpt::StepName(step)));
  return std::any_of(pins.begin(), pins.end(), [&](const std::string& pin) {
    return !ckpt::ParsePinName(store::SplitLast(pin).second)->Expired(*time_s);
  });
}

// A pinned step that lost nothing yet is committed again. COMMIT goes first in a removal.
absl::Status TakeBackDeleted(store::ObjectStore& store, int64_t step) {
  const std::string directory = ckpt::StepName(step);
  ASSIGN_OR_RETURN(const bool commit, store::Exists(store, JoinPath(directory, ckpt::kCommitFile)));
  return commit ? store::WithdrawIfThere(store, JoinPath(directory, ckpt::kDeletedFile))
                : absl::OkStatus();
}

// Removes what a step was renamed to. Two things get the name of the step back: what is no rest of
// a deletion, since it was published after somebody looked, and a step that was pinned before it
// was renamed: PinStep writes its mark before it looks for the step. Returns false if there is a
// step again.
absl::StatusOr<bool> EndRemoval(store::ObjectStore& store,
                                const std::string& name,
                                int64_t step,
                                PinTime pins_at_s) {
  ASSIGN_OR_RETURN(const FolderState state, StateOf(store, name));
  ASSIGN_OR_RETURN(const bool commit, store::Exists(store, JoinPath(name, ckpt::kCommitFile)));
  ASSIGN_OR_RETURN(const bool pinned, IsPinned(store, step, pins_at_s));
  if (state == FolderState::kOther || (commit && pinned)) {
    const absl::Status back = store.PublishIfAbsent(name, ckpt::StepName(step));
    if (absl::IsAlreadyExists(back) || absl::IsNotFound(back)) {
      return false;  // yet another save has taken the name; or another coordinator was faster
    }
    RETURN_IF_ERROR(back);
    RETURN_IF_ERROR(state == FolderState::kOther ? absl::OkStatus() : TakeBackDeleted(store, step));
    return false;
  }
  RETURN_IF_ERROR(RemoveWithdrawn(store, name));
  return true;
}

// Removes a step that is withdrawn, and nothing else of its name. DELETED is taken back from one
// that is pinned: who wrote it may have died before looking. Returns false if there is still a
// step.
absl::StatusOr<bool> RemoveRest(store::ObjectStore& store, int64_t step, PinTime pins_at_s) {
  const std::string directory = ckpt::StepName(step);
  ASSIGN_OR_RETURN(const std::string name, RemovedName(store, step));
  ASSIGN_OR_RETURN(const FolderState state, StateOf(store, directory));
  if (state != FolderState::kRest) {
    return state == FolderState::kGone;
  }
  ASSIGN_OR_RETURN(const bool commit, store::Exists(store, JoinPath(directory, ckpt::kCommitFile)));
  ASSIGN_OR_RETURN(const bool pinned, IsPinned(store, step, pins_at_s));
  if (commit && pinned) {
    RETURN_IF_ERROR(TakeBackDeleted(store, step));
    return false;
  }
  absl::Status renamed = store.PublishIfAbsent(directory, name);
  if (absl::IsAlreadyExists(renamed)) {  // the removal of another rest was cut off
    RETURN_IF_ERROR(RemoveWithdrawn(store, name));
    renamed = store.PublishIfAbsent(directory, name);
  }
  if (absl::IsNotFound(renamed)) {
    return true;  // another coordinator was faster
  }
  RETURN_IF_ERROR(renamed);
  return EndRemoval(store, name, step, pins_at_s);
}

// Ends removals of steps that were cut off, before or after the step got another name.
absl::Status RemoveRests(store::ObjectStore& store, const StepListing& listing, int64_t now_s) {
  for (const StepListing::Damaged& damaged : listing.damaged) {
    const std::optional<int64_t> step = ckpt::ParseStepName(damaged.directory);
    const absl::Status removed = step ? RemoveRest(store, *step, now_s).status() : absl::OkStatus();
    // Unavailable: an object store finds another name for it, of a removal that was cut off.
    RETURN_IF_ERROR(absl::IsUnavailable(removed) ? absl::OkStatus() : removed);
  }
  ASSIGN_OR_RETURN(const std::vector<ckpt::AttemptKey> attempts, ListAttempts(store));
  for (const ckpt::AttemptKey& key : attempts) {
    const std::string name = ckpt::AttemptName(key);
    if (!IsRemoved(key)) {
      continue;
    }
    ASSIGN_OR_RETURN(const FolderState state, StateOf(store, name));
    if (state == FolderState::kRest) {  // others are attempts, or a step that gets its name back
      RETURN_IF_ERROR(EndRemoval(store, name, key.step, now_s).status());
    }
  }
  return absl::OkStatus();
}

// Fine when it went since it was listed, by a retention. Returns false then.
absl::StatusOr<bool> MoveIfThere(store::ObjectStore& store,
                                 const std::string& path,
                                 const std::string& aside) {
  RETURN_IF_ERROR(store::MakeDirectories(store, store::SplitLast(JoinPath(aside, path)).first));
  const absl::Status moved = store.PublishIfAbsent(path, JoinPath(aside, path));
  RETURN_IF_ERROR(absl::IsNotFound(moved) ? absl::OkStatus() : moved);
  return moved.ok();
}

// Returns what moved. What is left of withdrawn steps is removed: under `aside` nobody would.
absl::StatusOr<std::vector<std::string>> MoveAside(store::ObjectStore& store,
                                                   const std::vector<std::string>& directories,
                                                   const std::string& aside) {
  std::vector<std::string> moved;
  for (const std::string& directory : directories) {
    // Every pin counts: a withdrawn step that is pinned is committed again, and moves.
    const std::optional<int64_t> step = ckpt::ParseStepName(directory);
    RETURN_IF_ERROR(step ? RemoveRest(store, *step, 0).status() : absl::OkStatus());
    // Marks first: one that stayed would be taken for a mark of the new step of that number.
    for (const std::string_view marks : {ckpt::kBadFolder, ckpt::kPinsFolder}) {
      ASSIGN_OR_RETURN(const std::vector<std::string> found, MarksOf(store, marks, directory));
      for (const std::string& mark : found) {
        RETURN_IF_ERROR(MoveIfThere(store, mark, aside).status());
      }
    }
    ASSIGN_OR_RETURN(const bool there, MoveIfThere(store, directory, aside));
    if (there) {
      moved.push_back(directory);
    }
  }
  return moved;
}

// Returns false if there is another step of that number now. It is looked at before, since a
// coordinator may die between the two writes, and after: another one may be saved meanwhile.
absl::StatusOr<bool> WithdrawListed(store::ObjectStore& store, const CommittedStepInfo& info) {
  ASSIGN_OR_RETURN(const std::optional<ckpt::CommitRecord> before, CommitIn(store, info.directory));
  if (before && *before != info.commit) {
    return false;
  }
  const std::string mark = JoinPath(info.directory, ckpt::kDeletedFile);
  const absl::Status put = store.Put(mark, "");
  if (absl::IsNotFound(put)) {
    return true;  // another coordinator has deleted it
  }
  RETURN_IF_ERROR(absl::IsAlreadyExists(put) ? absl::OkStatus() : put);
  ASSIGN_OR_RETURN(const std::optional<ckpt::CommitRecord> commit, CommitIn(store, info.directory));
  if (put.ok() && commit && *commit != info.commit) {  // a new step of the number
    RETURN_IF_ERROR(store::WithdrawIfThere(store, mark));
    return false;
  }
  return true;
}

// Returns false if there is still a step of that number.
absl::StatusOr<bool> RemoveUnlessPinned(store::ObjectStore& store,
                                        const CommittedStepInfo& info,
                                        int64_t now_s) {
  ASSIGN_OR_RETURN(const bool withdrawn, WithdrawListed(store, info));
  return withdrawn ? RemoveRest(store, info.step, now_s) : absl::StatusOr<bool>(false);
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

// Unavailable while a step that nobody has pinned, or the rest of one, is there.
absl::Status CheckNothingLeft(const store::ObjectStore& store,
                              const std::string& job,
                              int64_t now_s) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store, now_s));
  for (const StepListing::Damaged& damaged : listing.damaged) {
    if (damaged.withdrawn) {
      return absl::UnavailableError(
          absl::StrCat(store.Locate(damaged.directory), ": ", damaged.reason));
    }
  }
  for (const CommittedStepInfo& info : listing.steps) {
    if (info.commit.job == job && !info.pinned) {
      return absl::UnavailableError(
          absl::StrCat(store.Locate(info.directory), ": still there after its deletion"));
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
  const absl::Status put = store.Put(JoinPath(directory, ckpt::kDeletedFile), "");
  RETURN_IF_ERROR(absl::IsAlreadyExists(put) || absl::IsNotFound(put) ? absl::OkStatus() : put);
  return RemoveRest(store, step, std::nullopt).status();
}

absl::StatusOr<std::vector<int64_t>> ApplyRetention(store::ObjectStore& store,
                                                    const RetentionPolicy& policy,
                                                    const std::set<int64_t>& in_use,
                                                    int64_t now_s,
                                                    const DeletionGate& gate) {
  RETURN_IF_ERROR(RemoveExpiredPins(store, now_s));
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store, now_s));
  RETURN_IF_ERROR(RemoveRests(store, listing, now_s));
  const std::vector<int64_t> unwanted = StepsToDelete(listing.steps, policy, in_use);
  std::vector<int64_t> deleted;
  // Oldest first, as `unwanted` is.
  for (auto info = listing.steps.rbegin(); info != listing.steps.rend(); ++info) {
    const bool chosen = std::find(unwanted.begin(), unwanted.end(), info->step) != unwanted.end();
    if (!chosen || (gate && !gate(info->step))) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool removed, RemoveUnlessPinned(store, *info, now_s));
    if (removed) {
      deleted.push_back(info->step);
    }
  }
  return deleted;
}

absl::StatusOr<std::vector<std::string>> SetAside(store::ObjectStore& store,
                                                  const std::string& job,
                                                  int64_t step) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  std::vector<std::string> later;
  for (const CommittedStepInfo& info : listing.steps) {
    if (info.commit.job != job && info.step > step) {
      later.push_back(info.directory);
    }
  }
  for (const StepListing::Damaged& damaged : listing.damaged) {
    if (ckpt::ParseStepName(damaged.directory).value_or(-1) > step) {
      later.push_back(damaged.directory);
    }
  }
  return MoveAside(store, later, absl::StrCat("old-", job));
}

absl::StatusOr<std::vector<std::string>> MoveStepsAbove(store::ObjectStore& store,
                                                        int64_t step,
                                                        const std::string& aside) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(""));
  std::vector<std::string> later;
  for (const store::ListedEntry& entry : entries) {
    if (entry.is_directory && ckpt::ParseStepName(entry.name).value_or(-1) > step) {
      later.push_back(entry.name);
    }
  }
  return MoveAside(store, later, aside);
}

absl::StatusOr<std::vector<int64_t>> RemoveStepsOf(store::ObjectStore& store,
                                                   const std::string& job,
                                                   int64_t now_s) {
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store, now_s));
  RETURN_IF_ERROR(RemoveRests(store, listing, now_s));
  std::vector<int64_t> removed;
  for (const CommittedStepInfo& info : listing.steps) {
    if (info.commit.job != job || info.pinned) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool gone, RemoveUnlessPinned(store, info, now_s));
    if (gone) {
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

absl::Status RemoveAllOf(store::ObjectStore& store, const std::string& job, int64_t now_s) {
  constexpr int kLooks = 3;
  absl::Status removed;
  for (int look = 0; look < kLooks; ++look) {
    removed = RemoveStepsOf(store, job, now_s).status();
    removed = removed.ok() ? CleanAttemptsOf(store, job) : removed;
    removed = removed.ok() ? CheckNothingLeft(store, job, now_s) : removed;
    if (removed.ok()) {
      return removed;
    }
  }
  return absl::UnavailableError(removed.message());
}

}  // namespace ravel::coordinator
