#pragma once

// A child of the daemon with a socketpair, two pipes and a pidfd. No event loop: descriptors only.

#include <string>
#include <vector>

#include <sys/types.h>

#include "common/status.h"
#include "worker/daemon/exit_reason.h"
#include "worker/daemon/trainer_user.h"

namespace ravel::daemon {

// Owns nothing: who starts the child closes the descriptors and reaps it.
struct ChildProcess {
  pid_t pid = -1;
  int pidfd = -1;
  int socket = -1;  // our end; the child has its end as kTrainerSocketFd
  int out = -1;     // reads the child's stdout
  int err = -1;     // reads the child's stderr
};

// Forks and executes `arguments[0]`. The child gets /dev/null as stdin, no other descriptor of
// ours, an environment without what could redirect its communicators, no core dumps, and SIGKILL
// when the calling THREAD ends: call it from one that lives as long as the daemon. A program that
// cannot be executed exits with 127 and says so on stderr.
// `variables`: "NAME=value" that it gets besides, in place of ours of these names; the first of one
// name holds. `user`, where there is one, becomes its user before it is executed.
absl::StatusOr<ChildProcess> StartChild(const std::vector<std::string>& arguments,
                                        const std::vector<std::string>& variables = {},
                                        const TrainerUser* user = nullptr);

// Reaps a child that has ended; FailedPrecondition while it still runs.
absl::StatusOr<ExitStatus> ReapChild(const ChildProcess& child);

// SIGKILL through the pidfd: never reaches another process that got the same number.
void KillChild(const ChildProcess& child);

}  // namespace ravel::daemon
