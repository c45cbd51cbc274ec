#pragma once

// wait, cancel, retry, checkpoint, nodes drain...: verbs that wait for a job or change something.

#include <cstdint>
#include <string>

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

int RunRetry(const CommonOptions& common, const std::string& job);

struct NodeOptions {
  std::string node = {};
  std::string reason = {};
};
// drain, quarantine; with `lift` undrain, release.
int RunNodesHold(const CommonOptions& common, const NodeOptions& options, NodeHold hold, bool lift);

struct CheckpointOptions {
  std::string job = {};
  bool wait = false;
  std::string timeout = "10m";
  std::string deadline = "10m";
};
int RunCheckpoint(const CommonOptions& common, const CheckpointOptions& options);

}  // namespace ravel::ctl
