#include "worker/daemon/folders_main.h"

#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include <CLI/CLI.hpp>
#include <absl/strings/match.h>

#include "common/store/open_store.h"
#include "common/time_text.h"
#include "worker/daemon/confinement.h"
#include "worker/daemon/data_cache.h"

namespace ravel::daemon {
namespace {

void AddRoots(CLI::App& app, FolderFlags& flags) {
  app.add_option("--read-root",
                 flags.roots.read,
                 "Folder beneath which jobs may name data, tokenizers, models and checkpoints to "
                 "start from; may be given several times. With a root of either kind no job opens "
                 "a path elsewhere; with none, any that this user can open")
      ->allow_extra_args(false);
  app.add_option("--write-root",
                 flags.roots.write,
                 "The same for stores of checkpoints, traces and offloaded state; reading is "
                 "allowed, too")
      ->allow_extra_args(false);
  app.add_option(
         "--confine",
         flags.confine,
         "Have the kernel (Landlock) hold this daemon and its trainers to these folders and "
         "those of the system: auto, where there are roots and no NVIDIA device; always, or "
         "do not start; off")
      ->check(CLI::IsMember({"auto", "always", "off"}))
      ->capture_default_str();
}

void AddDataCache(CLI::App& app, FolderFlags& flags) {
  app.add_option("--data-cache",
                 flags.data_cache,
                 "Folder for data sets and models that jobs name by URL; default: data in the work "
                 "folder")
      ->check([](const std::string& path) {
        return absl::StartsWith(path, "/") ? "" : "expected an absolute path";
      });
  app.add_option("--data-cache-bytes",
                 flags.data_cache_bytes,
                 "Size of that folder; what no job uses goes, the least recently used first")
      ->capture_default_str();
}

}  // namespace

void AddFolderFlags(CLI::App& app, FolderFlags& flags) {
  AddDataCache(app, flags);
  AddRoots(app, flags);
}

absl::Status SetRoots(const FolderFlags& flags,
                      const std::string& work_dir,
                      DaemonOptions& options) {
  ASSIGN_OR_RETURN(options.roots, PathRoots::Create(flags.roots));
  if (flags.confine == "always" && !options.roots.any()) {
    return absl::InvalidArgumentError("--confine always: expected --read-root or --write-root");
  }
  return CheckRoots(options.roots.folders(), work_dir);
}

absl::Status SetDataCache(const FolderFlags& flags,
                          const std::string& work_dir,
                          DaemonOptions& options) {
  const absl::StatusOr<int64_t> limit = ParseBytes(flags.data_cache_bytes);
  RETURN_IF_ERROR(Annotate(limit.status(), "--data-cache-bytes"));
  std::error_code ignored;
  const std::string folder =
      std::filesystem::weakly_canonical(
          flags.data_cache.empty() ? work_dir + "/data" : flags.data_cache, ignored)
          .string();
  if (options.roots.any()) {  // trainers get the folder beside them
    RETURN_IF_ERROR(CheckRoots(options.roots.folders(), folder, "--data-cache"));
    RETURN_IF_ERROR(
        Annotate(PathRoots::Create({.read = {folder}}).status(), "--data-cache " + folder));
  }
  absl::StatusOr<std::shared_ptr<DataCache>> cache =
      DataCache::Open({.folder = folder, .limit_bytes = *limit, .open = [](const std::string& url) {
                         return store::OpenStore(url);
                       }});
  RETURN_IF_ERROR(Annotate(cache.status(), "--data-cache"));
  options.data_cache = *std::move(cache);
  return absl::OkStatus();
}

}  // namespace ravel::daemon
