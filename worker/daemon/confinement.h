#pragma once

// Holds this process, and every process that it starts, to the folders that it needs, by the
// kernel's Landlock. Unlike a look at a path before it is opened, this holds at each open: a link
// that is exchanged in between leads nowhere. It cannot be undone.

#include <string>
#include <vector>

#include "common/path_roots.h"
#include "common/status.h"

namespace ravel::daemon {

// FailedPrecondition for a root that is no folder, and for one that holds the work folder or lies
// in it: the node's key is there, which no job may name.
absl::Status CheckRoots(const RootFolders& roots,
                        const std::string& work_dir,
                        const char* flag = "--work-dir");

struct Confinement {
  std::vector<std::string> readable = {};  // files and folders, with all beneath
  std::vector<std::string> writable = {};  // the same, which may also be changed
};

// The least that programs, libraries, devices and networks of a node need, with the folders of jobs
// and what variables of the environment name: libraries, keys of stores, CUDA's cache. Temporary
// folders and home folders are not among them.
Confinement ConfinementOf(const RootFolders& roots);

// Adds the folder of a file, so that one that is exchanged for a newer is found, too; the file
// alone if it lies in `/`. Nothing for no name.
void AddFolderOf(const std::string& file, std::vector<std::string>& paths);

// The wish of a daemon.
struct DaemonConfinement {
  std::string mode;                             // of --confine: auto, always, off
  RootFolders roots;                            // none: not confined
  std::vector<std::string> folders = {};        // its own; empty names are passed over
  std::vector<std::string> read_folders = {};   // the same, which it does not change
  std::vector<std::string> read_files = {};     // with the folders that they lie in
  std::vector<std::string> written_files = {};  // the same
};
// True if this process is confined now. No NVIDIA device has run so yet: there `auto` does not, nor
// where the kernel cannot.
absl::StatusOr<bool> ConfineDaemon(const DaemonConfinement& wish);

// The calling thread must be the only one. Paths that are not there are passed over.
// Unimplemented where the kernel has no Landlock or a filter of system calls forbids it. Processes
// that were confined by one call share memory through /proc with each other, with no others.
absl::Status Confine(const Confinement& confinement);

}  // namespace ravel::daemon
