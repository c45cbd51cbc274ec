#pragma once

#include <string>

#include "common/status.h"
#include "worker/daemon/node_identity.h"

namespace ravel::daemon {

// Joins a cluster by a one-time token: makes a key, and asks the coordinator for a certificate of
// that node. The token's secret is sent only after the coordinator has shown the authority whose
// fingerprint is in the token. Blocks for up to 40 s.
absl::StatusOr<NodeIdentity> Join(const std::string& coordinator,
                                  const std::string& node_id,
                                  const std::string& token);

}  // namespace ravel::daemon
