#pragma once

// Flags of ravel-worker that name folders of jobs: what they may open, and where the data sets are
// that they name by URL.

#include <string>

#include "common/path_roots.h"
#include "common/status.h"
#include "worker/daemon/daemon.h"

namespace CLI {
class App;
}

namespace ravel::daemon {

struct FolderFlags {
  RootFolders roots;  // none: jobs may name any path
  std::string confine = "auto";
  std::string data_cache;  // empty: in the work folder
  std::string data_cache_bytes = "100GiB";
};

void AddFolderFlags(CLI::App& app, FolderFlags& flags);
// Errors name the flag.
absl::Status SetRoots(const FolderFlags& flags,
                      const std::string& work_dir,
                      DaemonOptions& options);
// Opens the cache of data sets, which has a lock of its own: it need not be in the work folder.
absl::Status SetDataCache(const FolderFlags& flags,
                          const std::string& work_dir,
                          DaemonOptions& options);

}  // namespace ravel::daemon
