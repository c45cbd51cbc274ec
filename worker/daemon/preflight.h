#pragma once

// Looks at what a job names on this node before its trainers start: data, tokenizer, model
// directory, checkpoint store. A mount that hangs or a pipe fails the check and holds up nothing.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/path_roots.h"
#include "common/status.h"
#include "common/token_file.h"
#include "worker/daemon/bounded_threads.h"
#include "worker/daemon/trainer_user.h"

namespace ravel::daemon {

struct PreflightPaths {
  std::vector<std::string> token_files = {};
  TokenFormat format = TokenFormat::kAuto;
  std::string tokenizer = {};
  std::string model_directory = {};
  std::string checkpoint_root = {};
  std::string offload_folder = {};
  std::vector<RootedPath> named = {};  // all that the job names, to be held against the roots
};

struct PreflightResult {
  absl::Status status;
  // The reason for a status that is not OK (common/failure_reason.h): DataError when the node lacks
  // a path that the job names; StoreUnavailable; PreflightFailed when there was no answer in time.
  std::string reason;
};

// Blocks for as long as the file systems do. Writes nothing.
PreflightResult CheckPaths(const PreflightPaths& paths);
// The same of paths that lie beneath `roots`; others are refused with DataError before any of them
// is opened.
PreflightResult CheckPathsBeneath(const PathRoots& roots, const PreflightPaths& paths);
// The same, as trainers of that user would find the paths: a folder that is the daemon's alone is
// no use to them.
std::function<PreflightResult(const PreflightPaths&)> LookAs(const std::optional<TrainerUser>& user,
                                                             const PathRoots& roots);

// Used only from the thread of its io_context.
class Preflight {
 public:
  using Look = std::function<PreflightResult(const PreflightPaths&)>;

  Preflight(boost::asio::io_context& context,
            std::chrono::milliseconds limit,
            Look look = CheckPaths);
  // Checks on a thread of its own; `done` is called once, on the io_context's thread, after `limit`
  // at the latest. A thread that hangs in a file system is left behind; while kMostHanging do,
  // further checks fail at once.
  void Start(PreflightPaths paths, std::function<void(PreflightResult)> done);

  // Looks at paths of jobs that are not accepted yet (path_looks) have threads of their own, and
  // cannot keep launches waiting.
  static constexpr int kMostHanging = 8;

 private:
  const std::chrono::milliseconds limit_;
  const Look look_;
  BoundedThreads threads_;
};

}  // namespace ravel::daemon
