#pragma once

// How the ranks of a group find each other before they can talk.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::comm {

// Publishes `record` as this rank's record of `group`, waits until every rank of the group has
// published its own, and returns all of them in rank order. Single use per group; records are
// secrets and are never logged. The wait ends with an error when its owner gives up (time-out, peer
// lost, stop).
using Rendezvous = std::function<absl::StatusOr<std::vector<std::string>>(std::string_view group,
                                                                          std::string record)>;

}  // namespace ravel::comm
