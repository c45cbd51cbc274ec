// A step is moved away by its name, and another coordinator may have replaced it since it was
// judged. So COMMIT is read before the BAD report (who replaces a step moves its report away before
// the new one appears), and is read again under the new name: a step that is not the one that was
// judged gets its name back.

#include "coordinator/saves/taken_name.h"

#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "coordinator/saves/rollback.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;
using FoundCommit = absl::StatusOr<std::optional<ckpt::CommitRecord>>;

FoundCommit ReadCommitIn(const store::ObjectStore& store, const std::string& directory) {
  ASSIGN_OR_RETURN(const bool withdrawn,
                   store::Exists(store, JoinPath(directory, ckpt::kDeletedFile)));
  if (withdrawn) {
    return std::optional<ckpt::CommitRecord>();
  }
  const absl::StatusOr<std::string> text =
      store::ReadFile(store, JoinPath(directory, ckpt::kCommitFile), ckpt::kMaxCommitBytes);
  if (absl::IsNotFound(text.status())) {
    return std::optional<ckpt::CommitRecord>();
  }
  RETURN_IF_ERROR(text.status());
  ASSIGN_OR_RETURN(ckpt::CommitRecord commit, ckpt::ParseCommit(*text));
  return std::optional<ckpt::CommitRecord>(std::move(commit));
}

bool SameStep(const FoundCommit& a, const FoundCommit& b) {
  return a.ok() && b.ok() ? *a == *b : a.status().code() == b.status().code();
}

absl::Status RenameIfThere(store::ObjectStore& store,
                           const std::string& from,
                           const std::string& to) {
  const absl::Status renamed = store.PublishIfAbsent(from, to);
  return absl::IsNotFound(renamed) ? absl::OkStatus() : renamed;
}

// Another coordinator may have published this very save.
absl::Status LostUnlessOurs(const ckpt::CommitRecord& commit,
                            std::string_view job,
                            const ckpt::AttemptKey& key) {
  return IsSave(commit, job, key) ? absl::OkStatus() : LostTo(commit);
}

// `judged` is what was found in the step. Fine when it is gone: another coordinator moved it, or
// its deletion has ended.
absl::Status MoveJudgedStep(store::ObjectStore& store,
                            std::string_view job,
                            const ckpt::AttemptKey& key,
                            const std::string& aside,
                            const FoundCommit& judged) {
  const std::string step = ckpt::StepName(key.step);
  const absl::Status moved = store.PublishIfAbsent(step, aside);
  if (absl::IsNotFound(moved)) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(moved);
  const FoundCommit found = ReadCommitIn(store, aside);
  if (SameStep(found, judged)) {
    return absl::OkStatus();
  }
  const absl::Status back = store.PublishIfAbsent(aside, step);
  // AlreadyExists: yet another save has taken the name. Ours has lost in either case.
  RETURN_IF_ERROR(absl::IsAlreadyExists(back) ? absl::OkStatus() : back);
  RETURN_IF_ERROR(found.status());
  return *found ? LostUnlessOurs(**found, job, key)
                : absl::UnavailableError(
                      absl::StrCat(store.Locate(step), ": changed while it was to make room"));
}

}  // namespace

absl::StatusOr<std::optional<ckpt::CommitRecord>> ReadPublished(const store::ObjectStore& store,
                                                                int64_t step) {
  return ReadCommitIn(store, ckpt::StepName(step));
}

bool IsSave(const ckpt::CommitRecord& commit, std::string_view job, const ckpt::AttemptKey& key) {
  const ckpt::AttemptKey saved = {
      .step = commit.step, .epoch = commit.epoch, .attempt = commit.attempt};
  return commit.job == job && saved.SameSave(key);
}

absl::Status LostTo(const ckpt::CommitRecord& commit) {
  return absl::AlreadyExistsError(absl::StrCat(ckpt::StepName(commit.step),
                                               " is committed already, by epoch ",
                                               commit.epoch,
                                               ", save attempt ",
                                               commit.attempt));
}

absl::Status ClearTheWay(store::ObjectStore& store,
                         std::string_view job,
                         const ckpt::AttemptKey& key) {
  const std::string step = ckpt::StepName(key.step);
  const std::string report = JoinPath(ckpt::kBadFolder, step);
  const std::string aside = absl::StrCat(report, ".e", key.epoch, ".a", key.attempt);
  ASSIGN_OR_RETURN(const bool listed, store::Exists(store, step));
  const FoundCommit published = ReadCommitIn(store, step);
  RETURN_IF_ERROR(absl::IsDataLoss(published.status()) ? absl::OkStatus() : published.status());
  ASSIGN_OR_RETURN(const bool bad, store::Exists(store, report));
  if (!bad && published.ok() && *published) {
    return LostUnlessOurs(**published, job, key);
  }
  if (listed || !published.ok() || *published) {
    RETURN_IF_ERROR(EndCutOffMoves(store, key.step, key.step));
    RETURN_IF_ERROR(store::MakeDirectories(store, ckpt::kBadFolder));
    RETURN_IF_ERROR(MoveJudgedStep(store, job, key, aside + ".step", published));
  }
  return bad ? RenameIfThere(store, report, aside + ".reason") : absl::OkStatus();
}

}  // namespace ravel::coordinator
