#pragma once

// Look and LookResult of proto/fleet.proto as plain values.

#include <cstdint>

#include "common/path_facts.h"
#include "common/status.h"
#include "proto/fleet.pb.h"

namespace ravel::daemon {

// InvalidArgument names the field that is over its limit.
absl::StatusOr<PathQuery> FromProto(const v1::Look& look);
v1::LookResult ToProto(int64_t look_id, const absl::StatusOr<PathFacts>& facts);

}  // namespace ravel::daemon
