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

// A token of nodes that was made before the cluster, for an authority that is there already.
struct NodeTokenSource {
  std::string path = {};  // a file with its text; empty: none
  int64_t uses = 1;
  std::string ttl = "1h";
};

struct InitOrder {
  std::string state_dir;
  std::vector<std::string> names;  // how clients may call the coordinator
  int port = 7070;
  std::string admin = "admin";
  AuthoritySource authority = {};
  NodeTokenSource node_token = {};
};

struct InitResult {
  std::string context_path;  // of the administrator
  std::string coordinator;   // HOST:PORT in it
  std::string fingerprint;   // of the authority
};

// AlreadyExists: the state has an authority; nothing was changed. InvalidArgument names the flag
// that is wrong; nothing was made.
absl::StatusOr<InitResult> InitCluster(const InitOrder& order, const Clock& clock);

}  // namespace ravel::coordinator
