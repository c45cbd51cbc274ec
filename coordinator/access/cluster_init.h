#pragma once

// `ravel-coordinator init`: a state directory becomes a cluster with an authority and an
// administrator.

#include <cstdint>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "coordinator/access/authority_files.h"

namespace ravel::coordinator {

struct InitOrder {
  std::string state_dir;
  std::vector<std::string> names;  // how clients may call the coordinator
  int port = 7070;
  std::string admin = "admin";
  AuthoritySource authority = {};
};

struct InitResult {
  std::string context_path;  // of the administrator
  std::string coordinator;   // HOST:PORT in it
  std::string fingerprint;   // of the authority
};

// AlreadyExists: the state has an authority; nothing was changed.
absl::StatusOr<InitResult> InitCluster(const InitOrder& order, const Clock& clock);

}  // namespace ravel::coordinator
