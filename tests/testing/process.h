#pragma once

// Real processes for tests: started with their output in files, killed by signal, waited for with a
// deadline.

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "common/status.h"

namespace ravel::testing {

struct ProcessOptions {
  std::vector<std::string> arguments;                   // [0] is the program
  std::map<std::string, std::string> environment = {};  // added to ours
  std::string output_path = {};                         // stdout; /dev/null when empty
  std::string error_path = {};                          // stderr; may equal output_path
  std::string working_directory = {};                   // ours when empty
};

// A child of the test; killed with SIGKILL by the destructor, and by the kernel when the test dies.
// Thread-compatible.
class ChildProcess {
 public:
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const ProcessOptions& options);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  bool Running();
  void Signal(int number) const;
  // Exit status as a shell shows it (128 + signal), or nothing when it still runs at the deadline.
  std::optional<int> Wait(std::chrono::milliseconds deadline);
  // SIGKILL, and gone when this returns.
  void Kill();
  // As Kill, for one that waits for its only child (NetworkHosts::Prefix): the child is killed, and
  // all of its process namespace is gone when this returns.
  void KillInner();

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  pid_t pid_;
  std::optional<int> exit_;
};

struct RunResult {
  int exit_code = -1;  // 128 + signal; -1 when it was killed at the deadline
  std::string out;
  std::string err;
};

// Runs a program to its end. Output goes through files in `scratch`.
RunResult RunProgram(ProcessOptions options,
                     const std::string& scratch,
                     std::chrono::milliseconds deadline);

// Processes whose parent is `parent`.
std::vector<pid_t> ChildrenOf(pid_t parent);
// Proportional set size in bytes (smaps_rollup); 0 when the process is gone.
int64_t PssBytes(pid_t pid);

// All that is below a folder while others add to it and remove from it: what is there throughout is
// in the list. Empty when there is no such folder.
std::vector<std::filesystem::directory_entry> EntriesUnder(const std::string& folder);

std::string ReadText(const std::string& path);  // empty when there is no such file
void WriteText(const std::string& path, const std::string& text);

// A folder under TMPDIR, removed with everything in it by the destructor unless the test failed.
class ScratchFolder {
 public:
  // Below TMPDIR unless a root is given.
  explicit ScratchFolder(const std::string& root = {});
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ravel::testing
