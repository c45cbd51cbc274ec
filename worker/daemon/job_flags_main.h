#pragma once

// Flags of ravel-worker about what jobs may have of this node beside folders: variables, secrets,
// networks, and the user that their trainers run as.

#include <string>
#include <vector>

#include "common/job_environment.h"
#include "common/status.h"
#include "worker/daemon/daemon.h"

namespace CLI {
class App;
}

namespace ravel::daemon {

struct JobFlags {
  std::string environment = kDefaultJobEnvironment;
  std::string secrets_root;           // empty: jobs have no secrets here
  std::vector<std::string> networks;  // NAME=INTERFACE
  std::string trainer_user;           // empty: the daemon's own
};

void AddJobFlags(CLI::App& app, JobFlags& flags);
// After the roots are set. Errors name the flag.
absl::Status SetLaunchRules(const JobFlags& flags, bool dev_loopback, DaemonOptions& options);
// After the work folder is locked and the data cache is open: lets the trainers' user reach what is
// theirs, and refuses to start where they could reach what is not, or not the trainer program.
absl::Status SetTrainerUser(const JobFlags& flags, bool dev_loopback, DaemonOptions& options);

}  // namespace ravel::daemon
