// Lists a checkpoint folder: the listing half of coordinator/saves/saves.h.

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "coordinator/saves/saves.h"

namespace ravel::coordinator {
namespace {

using store::JoinPath;

constexpr int64_t kMaxReasonBytes = 64 << 10;
constexpr std::string_view kWithdrawn = "withdrawn; its deletion is not finished";

// The entries of a folder; none when it does not exist.
absl::StatusOr<std::vector<store::ListedEntry>> ListOrEmpty(const store::ObjectStore& store,
                                                            std::string_view folder) {
  absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List(folder);
  if (absl::IsNotFound(entries.status())) {
    return std::vector<store::ListedEntry>();
  }
  return entries;
}

// COMMIT of a step folder, held against the manifest's size.
absl::StatusOr<ckpt::CommitRecord> ReadCommit(const store::ObjectStore& store,
                                              const std::string& directory,
                                              int64_t step) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, store.List(directory));
  std::map<std::string, int64_t> sizes;
  for (const store::ListedEntry& entry : entries) {
    sizes[entry.name] = entry.size;
  }
  if (sizes.contains(std::string(ckpt::kDeletedFile))) {
    return absl::DataLossError(std::string(kWithdrawn));
  }
  if (!sizes.contains(std::string(ckpt::kCommitFile))) {
    return absl::DataLossError("COMMIT is missing");
  }
  ASSIGN_OR_RETURN(
      const std::string text,
      store::ReadFile(store, JoinPath(directory, ckpt::kCommitFile), ckpt::kMaxCommitBytes));
  ASSIGN_OR_RETURN(ckpt::CommitRecord commit, ckpt::ParseCommit(text));
  if (commit.step != step) {
    return absl::DataLossError(absl::StrCat("COMMIT: step: is ", commit.step, ", expected ", step));
  }
  const auto manifest = sizes.find(std::string(ckpt::kManifestFile));
  if (manifest == sizes.end() || manifest->second != commit.manifest_bytes) {
    return absl::DataLossError(
        absl::StrCat("manifest.pb is missing or does not have ", commit.manifest_bytes, " bytes"));
  }
  return commit;
}

}  // namespace

bool StepListing::OthersAreWithdrawn() const {
  return std::all_of(
      damaged.begin(), damaged.end(), [](const Damaged& folder) { return folder.withdrawn; });
}

absl::StatusOr<std::vector<ckpt::AttemptKey>> ListAttempts(const store::ObjectStore& store) {
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, ListOrEmpty(store, ""));
  std::vector<ckpt::AttemptKey> attempts;
  for (const store::ListedEntry& entry : entries) {
    const std::optional<ckpt::AttemptKey> key = ckpt::ParseAttemptName(entry.name);
    if (key && entry.is_directory) {
      attempts.push_back(*key);
    }
  }
  std::sort(
      attempts.begin(), attempts.end(), [](const ckpt::AttemptKey& a, const ckpt::AttemptKey& b) {
        return std::tuple(a.step, a.epoch, a.attempt) < std::tuple(b.step, b.epoch, b.attempt);
      });
  return attempts;
}

absl::StatusOr<StepListing> ListSteps(const store::ObjectStore& store, int64_t now_s) {
  StepListing listing;
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> entries, ListOrEmpty(store, ""));
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> bad, ListOrEmpty(store, ckpt::kBadFolder));
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> pins,
                   ListOrEmpty(store, ckpt::kPinsFolder));
  const auto contains = [](const std::vector<store::ListedEntry>& list, const std::string& name) {
    return std::any_of(
        list.begin(), list.end(), [&](const auto& entry) { return entry.name == name; });
  };
  std::map<int64_t, std::vector<ckpt::PinName>> pins_of;
  for (const store::ListedEntry& entry : pins) {
    const std::optional<ckpt::PinName> pin = ckpt::ParsePinName(entry.name);
    if (pin && !pin->Expired(now_s)) {
      pins_of[pin->step].push_back(*pin);
    }
  }
  for (const store::ListedEntry& entry : entries) {
    const std::optional<int64_t> step = ckpt::ParseStepName(entry.name);
    if (!step || !entry.is_directory) {
      continue;
    }
    absl::StatusOr<ckpt::CommitRecord> commit = ReadCommit(store, entry.name, *step);
    if (!commit.ok()) {
      listing.damaged.push_back(
          {.directory = entry.name,
           .reason = std::string(commit.status().message()),
           .withdrawn = std::string(commit.status().message()) == kWithdrawn});
      continue;
    }
    CommittedStepInfo info = {.step = *step,
                              .directory = entry.name,
                              .commit = *std::move(commit),
                              .bad = contains(bad, entry.name),
                              .bad_reason = {},
                              .pinned = pins_of.contains(*step),
                              .pins = pins_of[*step]};
    if (info.bad) {
      const absl::StatusOr<std::string> reason =
          store::ReadFile(store, JoinPath(ckpt::kBadFolder, entry.name), kMaxReasonBytes);
      info.bad_reason = reason.ok() ? *reason : std::string(reason.status().message());
    }
    listing.steps.push_back(std::move(info));
  }
  std::reverse(listing.steps.begin(), listing.steps.end());
  return listing;
}

absl::Status MarkBad(store::ObjectStore& store, int64_t step, std::string_view reason) {
  RETURN_IF_ERROR(store::MakeDirectories(store, ckpt::kBadFolder));
  const std::string path = JoinPath(ckpt::kBadFolder, ckpt::StepName(step));
  const absl::Status put = store.Put(path, reason);
  return absl::IsAlreadyExists(put) ? absl::OkStatus() : put;
}

absl::Status UnmarkBad(store::ObjectStore& store, int64_t step) {
  return store.Withdraw(JoinPath(ckpt::kBadFolder, ckpt::StepName(step)));
}

}  // namespace ravel::coordinator
