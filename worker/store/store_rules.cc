// A node's certificate is good for what trainers do: files below model/, optim/, hf/ and seals/ of
// unfinished saves, whose names carry step, epoch, save attempt and job; taking such files back;
// and setting aside an attempt that nobody commits. It can neither publish a step nor touch one
// that is published, nor a job's OWNER. Who commits is the coordinator alone.

#include "worker/store/store_rules.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "common/ckpt/step_layout.h"

namespace ravel::store_server {
namespace {

constexpr std::string_view kScheme = "spiffe://";
constexpr std::string_view kDomain = ".ravel/";

// A path in an unfinished save.
struct SavePath {
  std::string job_folder;
  ckpt::AttemptKey key;
  std::vector<std::string> rest;  // below the save's folder
};

std::optional<SavePath> ParseSave(std::string_view path) {
  const std::vector<std::string> names = absl::StrSplit(std::string(path), '/');
  for (size_t i = 0; i < names.size(); ++i) {
    const std::optional<ckpt::AttemptKey> key = ckpt::ParseAttemptName(names[i]);
    if (key) {
      const auto at = names.begin() + static_cast<int64_t>(i);
      return SavePath{absl::StrJoin(names.begin(), at, "/"), *key, {at + 1, names.end()}};
    }
  }
  return std::nullopt;
}

bool IsDataFolder(const std::string& name) {
  return name == ckpt::kModelFolder || name == ckpt::kOptimizerFolder ||
         name == ckpt::kHuggingFaceFolder || name == ckpt::kSealsFolder;
}

absl::Status Denied(const Caller& caller, std::string_view path) {
  return absl::PermissionDeniedError(
      absl::StrCat(caller.text,
                   " may not change ",
                   path.empty() ? "the store" : std::string(path),
                   caller.kind == CallerKind::kNode ? ": nodes write files of unfinished saves only"
                                                    : ": users read, and pin steps"));
}

absl::Status CheckEpoch(const SavePath& save, const FenceBook& fences) {
  const int64_t min_epoch = fences.MinEpoch(save.job_folder, save.key.job_tag.value_or(0));
  return save.key.epoch >= min_epoch
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat(ckpt::AttemptName(save.key),
                                                          ": epoch ",
                                                          save.key.epoch,
                                                          " is over; the job is in epoch ",
                                                          min_epoch));
}

absl::Status CheckJob(const Caller& caller, const SavePath& save) {
  if (caller.kind != CallerKind::kNode) {
    return absl::OkStatus();
  }
  const auto refuse = [&](const std::string& why) {
    return absl::PermissionDeniedError(absl::StrCat(caller.text,
                                                    " may not change ",
                                                    save.job_folder,
                                                    "/",
                                                    ckpt::AttemptName(save.key),
                                                    ": ",
                                                    why));
  };
  if (caller.job_tag && caller.job_tag != save.key.job_tag) {
    return refuse("its certificate is of another job");
  }
  if (!caller.needs_token) {
    return absl::OkStatus();
  }
  if (!caller.token.ok()) {
    return refuse(std::string(caller.token.status().message()));
  }
  const JobToken& token = *caller.token;
  if (caller.node != token.node) {
    return refuse(absl::StrCat("its token is of node/", token.node));
  }
  if (token.folder != JobFolderHash(save.job_folder) || token.job_tag != save.key.job_tag) {
    return refuse("its token is of another job");
  }
  return save.key.epoch <= token.epoch
             ? absl::OkStatus()
             : refuse(absl::StrCat("its token is of epoch ", token.epoch));
}

// True if a node may do this in a save, fences apart.
bool NodeMay(Act act, const SavePath& save) {
  const bool in_data = !save.rest.empty() && IsDataFolder(save.rest[0]);
  switch (act) {
    case Act::kWrite:
      return in_data && save.rest.size() == 2;
    case Act::kMakeFolder:
      return save.rest.empty() || (in_data && save.rest.size() == 1);
    case Act::kWithdraw:
      return (in_data && save.rest.size() == 2) ||
             (save.rest.empty() && save.key.attempt > ckpt::kRemovedAttempt);
    case Act::kMakeFolders:
      return false;
  }
  return false;
}

bool IsPin(Act act, std::string_view path) {
  const std::vector<std::string> names = absl::StrSplit(std::string(path), '/');
  if (act == Act::kMakeFolder) {
    return names.size() >= 2 && names.back() == ckpt::kPinsFolder;
  }
  return act != Act::kMakeFolders && names.size() >= 3 &&
         names[names.size() - 2] == ckpt::kPinsFolder;
}

}  // namespace

absl::StatusOr<std::string> ClusterOf(std::string_view uri) {
  const size_t end = uri.find(kDomain);
  if (!uri.starts_with(kScheme) || end == std::string_view::npos || end <= kScheme.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", std::string(uri), "\": expected spiffe://CLUSTER.ravel/..."));
  }
  return std::string(uri.substr(kScheme.size(), end - kScheme.size()));
}

absl::StatusOr<Caller> CallerOf(std::string_view cluster, std::string_view uri) {
  const std::string beginning =
      absl::StrCat(std::string(kScheme), std::string(cluster), std::string(kDomain));
  if (uri.starts_with(beginning)) {
    const std::string name(uri.substr(beginning.size()));
    const std::vector<std::string> parts = absl::StrSplit(name, '/');
    const bool whole = std::none_of(
        parts.begin(), parts.end(), [](const std::string& part) { return part.empty(); });
    if (name == "coordinator") {
      return Caller{CallerKind::kCoordinator, name};
    }
    if (whole && parts.size() == 2 && parts[0] == "node") {
      return Caller{.kind = CallerKind::kNode, .text = name, .node = parts[1]};
    }
    if (whole && parts.size() == 2 && parts[0] == "user") {
      return Caller{CallerKind::kUser, name};
    }
    if (whole && parts.size() == 3 && parts[0] == "trainer") {
      return Caller{.kind = CallerKind::kNode,
                    .text = name,
                    .node = parts[1],
                    .job_tag = ckpt::JobTag(parts[2])};
    }
  }
  return absl::UnauthenticatedError(
      "this store needs a certificate of its cluster that names a node, a trainer, a user or the "
      "coordinator");
}

absl::Status CheckAct(const Caller& caller,
                      Act act,
                      std::string_view path,
                      const FenceBook& fences) {
  if (path.empty()) {
    return Denied(caller, path);
  }
  if (caller.kind == CallerKind::kCoordinator || caller.kind == CallerKind::kOperator) {
    return absl::OkStatus();
  }
  const std::optional<SavePath> save = ParseSave(path);
  if (caller.kind == CallerKind::kUser) {
    return IsPin(act, path) && !save ? absl::OkStatus() : Denied(caller, path);
  }
  if (caller.kind == CallerKind::kNode && (!save || !NodeMay(act, *save))) {
    return Denied(caller, path);
  }
  if (save) {
    RETURN_IF_ERROR(CheckJob(caller, *save));
  }
  // On loopback without identities anyone may do all, but what only trainers write is fenced.
  const bool data = save && act != Act::kWithdraw && NodeMay(act, *save);
  return data ? CheckEpoch(*save, fences) : absl::OkStatus();
}

absl::Status CheckPublish(const Caller& caller, std::string_view from, std::string_view to) {
  if (from.empty() || to.empty()) {
    return Denied(caller, "");
  }
  if (caller.kind == CallerKind::kUser) {
    return Denied(caller, to);
  }
  if (caller.kind != CallerKind::kNode) {
    return absl::OkStatus();
  }
  const std::optional<SavePath> source = ParseSave(from);
  const std::optional<SavePath> target = ParseSave(to);
  if (!source || !target || !source->rest.empty() || !target->rest.empty() ||
      source->job_folder != target->job_folder) {
    return Denied(caller, to);
  }
  RETURN_IF_ERROR(CheckJob(caller, *source));
  ckpt::AttemptKey aside = source->key;
  aside.attempt += ckpt::kRemovedAttempt;
  return aside == target->key ? absl::OkStatus() : Denied(caller, to);
}

absl::Status CheckFence(const Caller& caller) {
  return caller.kind == CallerKind::kNode || caller.kind == CallerKind::kUser ? Denied(caller, "")
                                                                              : absl::OkStatus();
}

}  // namespace ravel::store_server
