#include "worker/daemon/job_flags_main.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <unistd.h>

#include "common/logging.h"
#include "common/net_address.h"
#include "worker/daemon/confinement.h"
#include "worker/daemon/job_secrets.h"

namespace ravel::daemon {
namespace {

// The thread's rights decide: those of the trainers' user.
bool MayAccess(const std::string& path, int mode) {
  return faccessat(AT_FDCWD, path.c_str(), mode, AT_EACCESS) == 0;
}

absl::Status CheckReach(const JobFlags& flags, const DaemonOptions& options) {
  const auto expected = [&flags](const std::string& path, const char* what) {
    return absl::FailedPreconditionError(
        absl::StrCat("--trainer-user ", flags.trainer_user, ": ", path, ": expected ", what));
  };
  if (!MayAccess(options.trainer_program, R_OK | X_OK)) {
    return expected(options.trainer_program, "a program that this user can read and execute");
  }
  if (options.data_cache != nullptr && !MayAccess(options.data_cache->sets_folder(), R_OK | X_OK)) {
    return expected(options.data_cache->sets_folder(), "a folder that this user can read");
  }
  if (!options.gemm_cache.empty() && !MayAccess(options.gemm_cache, W_OK | X_OK)) {
    return expected(options.gemm_cache, "a folder that this user can write to");
  }
  const std::string identity = options.work_dir + "/identity";
  if (MayAccess(identity, X_OK) || MayAccess(identity, R_OK)) {
    return expected(identity, "a folder that this user cannot enter: the node's key is there");
  }
  const std::string& secrets = options.launch_rules.secrets_root;
  if (!secrets.empty() && (MayAccess(secrets, X_OK) || MayAccess(secrets, R_OK))) {
    return expected(secrets, "a folder of secrets that this user cannot enter");
  }
  const char* const keys = std::getenv("RAVEL_S3_CREDENTIALS");
  if (keys != nullptr && !MayAccess(keys, R_OK)) {
    log::Warning(absl::StrCat("RAVEL_S3_CREDENTIALS: trainers run as ",
                              flags.trainer_user,
                              ", who cannot read it: jobs on s3:// bring keys of their own"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddJobFlags(CLI::App& app, JobFlags& flags) {
  app.add_option("--job-environment",
                 flags.environment,
                 "Names of variables that jobs may set for their trainers: NAME or BEGINNING*, "
                 "separated by commas. Names that could load a library, name a file or change "
                 "devices, addresses or threads are never allowed")
      ->capture_default_str();
  app.add_option(
      "--secrets-root",
      flags.secrets_root,
      "Folder of secrets, NAMESPACE/SECRET/KEY: jobs of a namespace name SECRET/KEY, and "
      "their trainers get the file's text as a variable. With --read-root or "
      "--write-root, and apart from them");
  app.add_option("--network",
                 flags.networks,
                 "NAME=INTERFACE: a network that jobs may name (communication.network) instead of "
                 "the one of --advertise or --data-interface; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--trainer-user",
                 flags.trainer_user,
                 "NAME or NAME:GROUP: trainers run as that user, without other groups and "
                 "capabilities, and cannot read this node's key and secrets. Needs root, or "
                 "CAP_SETUID, CAP_SETGID, CAP_KILL, CAP_CHOWN and CAP_FSETID");
}

absl::Status SetLaunchRules(const JobFlags& flags, bool dev_loopback, DaemonOptions& options) {
  LaunchRules& rules = options.launch_rules;
  absl::StatusOr<std::vector<std::string>> allowed = ParseNamePatterns(flags.environment);
  RETURN_IF_ERROR(Annotate(allowed.status(), "--job-environment"));
  rules.allowed = *std::move(allowed);
  absl::StatusOr<std::map<std::string, JobNetwork>> networks = ParseNetworks(flags.networks);
  RETURN_IF_ERROR(Annotate(networks.status(), "--network"));
  for (const auto& [name, network] : *networks) {
    const bool loopback = IsLoopbackHost(network.address);
    if (dev_loopback && !loopback) {
      return absl::FailedPreconditionError(
          absl::StrCat("--network ",
                       name,
                       ": ",
                       network.address,
                       ": with --dev-loopback expected an interface of loopback alone"));
    }
    if (!dev_loopback) {
      RETURN_IF_ERROR(CheckReachableHost("--network", network.address));
    }
  }
  rules.networks = *std::move(networks);
  if (flags.secrets_root.empty()) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Annotate(CheckSecretsRoot(flags.secrets_root), "--secrets-root"));
  if (!options.roots.any()) {
    return absl::InvalidArgumentError(
        "--secrets-root: expected --read-root or --write-root beside it: without them a job may "
        "name each file of this user as its data");
  }
  RETURN_IF_ERROR(CheckRoots(options.roots.folders(), flags.secrets_root, "--secrets-root"));
  rules.secrets_root = flags.secrets_root;
  return absl::OkStatus();
}

absl::Status SetTrainerUser(const JobFlags& flags, bool dev_loopback, DaemonOptions& options) {
  if (flags.trainer_user.empty()) {
    return absl::OkStatus();
  }
  absl::StatusOr<TrainerUser> user = FindTrainerUser(flags.trainer_user);
  absl::Status ready = user.ok() ? CheckMayBecome(*user) : user.status();
  if (ready.ok()) {
    const std::string sets = options.data_cache == nullptr ? "" : options.data_cache->sets_folder();
    ready = ShareFolders(*user,
                         {.work_dir = options.work_dir,
                          .gemm_cache = options.gemm_cache,
                          .data_cache = std::filesystem::path(sets).parent_path()});
  }
  RETURN_IF_ERROR(Annotate(ready, "--trainer-user"));
  RETURN_IF_ERROR(AsTrainerUser(*user, [&] { return CheckReach(flags, options); }));
  options.launch_rules.certify_trainers = !dev_loopback;
  options.trainer_user = *std::move(user);
  return absl::OkStatus();
}

}  // namespace ravel::daemon
