#pragma once

// wait, cancel, retry, delete, checkpoint, nodes drain...: verbs that wait for a job or change
// something.

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/ctl/common_options.h"
#include "coordinator/ctl/jobs_client.h"

namespace ravel::ctl {

// "running", "done", "checkpoint" (any commit), "checkpoint=N" (of step N or later), "step=N".
struct WaitCondition {
  enum class Kind { kRunning, kDone, kCheckpoint, kStep } kind = Kind::kDone;
  int64_t step = 0;
};
absl::StatusOr<WaitCondition> ParseWaitCondition(const std::string& text);
bool Holds(const WaitCondition& condition, const JobView& job);

struct WaitOptions {
  std::string job = {};
  std::string condition = "done";
  std::string timeout = {};  // a duration; "": none
  bool follow = false;       // show progress
};
int RunWait(const CommonOptions& common, const WaitOptions& options);

struct CancelOptions {
  std::string job = {};
  std::string reason = {};
  bool wait = false;
};
int RunCancel(const CommonOptions& common, const CancelOptions& options);

struct RetryOptions {
  std::string job;
  bool allow_numerics_change = false;  // sets checkpoint.allowNumericsChange in the job
  int64_t tensor = 0;                  // sets parallelism.tensor, if not 0
};
int RunRetry(const CommonOptions& common, const RetryOptions& options);

struct NodeOptions {
  std::string node = {};
  std::string reason = {};
};
// drain, quarantine; with `lift` undrain, release.
int RunNodesHold(const CommonOptions& common, const NodeOptions& options, NodeHold hold, bool lift);
// Lost nodes, out of the list.
int RunNodesForget(const CommonOptions& common, const std::vector<std::string>& nodes);

struct DeleteOptions {
  std::vector<std::string> jobs = {};
  bool force = false;        // also jobs that are not over: they are cancelled first
  bool checkpoints = false;  // delete them too
  std::string reason = {};
  std::string timeout = "60s";  // for jobs that have to end first
};
// Waits until the jobs are gone.
int RunDelete(const CommonOptions& common, const DeleteOptions& options);

struct CheckpointOptions {
  std::string job = {};
  bool wait = false;
  std::string timeout = "10m";
  std::string deadline = "10m";
};
int RunCheckpoint(const CommonOptions& common, const CheckpointOptions& options);

}  // namespace ravel::ctl
