#pragma once

#include <functional>

#include "coordinator/ctl/jobs_client.h"

namespace ravel::ctl {

// Watches until `enough(job)` or a terminal state, over restarts of the coordinator: when it cannot
// be reached, tries again for a minute. The last state of the job, or Cancelled, DeadlineExceeded
// (timeout_ms, 0: none), Unavailable, NotFound.
absl::StatusOr<JobView> WatchUntil(JobsClient& client,
                                   const JobName& job,
                                   int64_t timeout_ms,
                                   const std::function<bool(const JobView&)>& enough);

enum class FollowMode { kQuiet, kProgress };
// Follows to the job's end; Ctrl-C detaches and says how to come back. Returns the exit code.
int FollowJob(JobsClient& client, const JobName& job, FollowMode mode);

// "job default/demo succeeded: 2000 steps, loss 5.61 -> 1.43, checkpoint /path".
std::string Outcome(const JobView& job);

}  // namespace ravel::ctl
