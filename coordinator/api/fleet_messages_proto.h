#pragma once

// fleet_messages.h to proto/fleet.proto and back.

#include "common/status.h"
#include "coordinator/fleet/fleet_messages.h"
#include "proto/fleet.pb.h"

namespace ravel::coordinator {

// Errors name the field.
absl::StatusOr<HelloMessage> FromProto(const v1::Hello& message);
// Everything but Hello; InvalidArgument for an empty or unknown kind.
absl::StatusOr<UpMessage> FromProto(const v1::Up& message);
v1::Down ToProto(const DownMessage& message);

}  // namespace ravel::coordinator
