#include "coordinator/saves/checkpoint_leftovers.h"

#include <optional>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "coordinator/saves/copy_marks.h"
#include "coordinator/saves/saves.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

// Neither COMMIT nor a manifest: no save was ever published under this name.
absl::StatusOr<bool> NeverWasAStep(const store::ObjectStore& store, const std::string& directory) {
  ASSIGN_OR_RETURN(const bool commit, store::Exists(store, JoinPath(directory, ckpt::kCommitFile)));
  ASSIGN_OR_RETURN(const bool manifest,
                   store::Exists(store, JoinPath(directory, ckpt::kManifestFile)));
  return !commit && !manifest;
}

// The leftover that a folder of the root is, if it is one by its name.
std::optional<Leftover> ByName(const std::string& name, std::string_view job_uid) {
  Leftover leftover;
  leftover.path = name;
  if (const std::optional<ckpt::AttemptKey> key = ckpt::ParseAttemptName(name)) {
    if (IsCopy(*key)) {
      leftover.kind = LeftoverKind::kUnfinishedCopy;
      return leftover;
    }
    const bool foreign = !job_uid.empty() && key->job_tag && *key->job_tag != ckpt::JobTag(job_uid);
    leftover.kind = foreign ? LeftoverKind::kForeignSave : LeftoverKind::kUnfinishedSave;
    leftover.removable = !job_uid.empty() && !foreign;
    return leftover;
  }
  if (absl::StartsWith(name, std::string(kOldPrefix))) {
    leftover.kind = LeftoverKind::kOldHistory;
    leftover.removable =
        !job_uid.empty() && name == absl::StrCat(std::string(kOldPrefix), std::string(job_uid));
    return leftover;
  }
  if (absl::StartsWith(name, std::string(kRolledBackPrefix))) {
    leftover.kind = LeftoverKind::kRolledBack;
    return leftover;
  }
  return std::nullopt;
}

absl::Status AddBadCopies(const store::ObjectStore& store,
                          bool removable,
                          std::vector<Leftover>& leftovers) {
  const absl::StatusOr<std::vector<store::ListedEntry>> bad = store.List(ckpt::kBadFolder);
  if (absl::IsNotFound(bad.status())) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(bad.status());
  for (const store::ListedEntry& entry : *bad) {
    if (entry.is_directory && absl::EndsWith(entry.name, ".step")) {
      leftovers.push_back({.kind = LeftoverKind::kBadCopy,
                           .path = JoinPath(ckpt::kBadFolder, entry.name),
                           .reason = {},
                           .changed_ms = 0,
                           .removable = removable});
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view LeftoverKindName(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::kUnfinishedSave:
      return "unfinished save";
    case LeftoverKind::kForeignSave:
      return "save of another job";
    case LeftoverKind::kUnfinishedCopy:
      return "unfinished copy";
    case LeftoverKind::kDamagedStep:
      return "DAMAGED";
    case LeftoverKind::kBadCopy:
      return "copy of a bad step";
    case LeftoverKind::kOldHistory:
      return "earlier history";
    case LeftoverKind::kRolledBack:
      return "rolled back";
  }
  CheckFailed(__FILE__, __LINE__, "leftover", "unknown");
}

absl::StatusOr<std::vector<Leftover>> ListLeftovers(const store::ObjectStore& store,
                                                    std::string_view job_uid) {
  std::vector<Leftover> leftovers;
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(store));
  for (const StepListing::Damaged& damaged : listing.damaged) {
    ASSIGN_OR_RETURN(const bool never, NeverWasAStep(store, damaged.directory));
    leftovers.push_back({.kind = LeftoverKind::kDamagedStep,
                         .path = damaged.directory,
                         .reason = damaged.reason,
                         .changed_ms = 0,
                         .removable = !job_uid.empty() && never});
  }
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(""));
  for (const store::ListedEntry& entry : entries) {
    std::optional<Leftover> leftover = ByName(entry.name, job_uid);
    if (entry.is_directory && leftover) {
      leftovers.push_back(*std::move(leftover));
    }
  }
  RETURN_IF_ERROR(AddBadCopies(store, !job_uid.empty(), leftovers));
  for (Leftover& leftover : leftovers) {
    const absl::StatusOr<int64_t> changed = store.ChangedMs(leftover.path);
    leftover.changed_ms = changed.ok() ? *changed : 0;
  }
  return leftovers;
}

absl::StatusOr<std::vector<std::string>> RemoveOldLeftovers(store::ObjectStore& store,
                                                            std::string_view job_uid,
                                                            int64_t now_ms,
                                                            int64_t age_ms) {
  ASSIGN_OR_RETURN(const std::vector<Leftover> leftovers, ListLeftovers(store, job_uid));
  std::vector<std::string> removed;
  for (const Leftover& leftover : leftovers) {
    const bool old = leftover.changed_ms > 0 && leftover.changed_ms <= now_ms - age_ms;
    if (leftover.removable && old) {
      RETURN_IF_ERROR(store::WithdrawIfThere(store, leftover.path));
      removed.push_back(leftover.path);
    }
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> copies, RemoveDeadCopies(store, now_ms));
  removed.insert(removed.end(), copies.begin(), copies.end());
  return removed;
}

}  // namespace ravel::coordinator
