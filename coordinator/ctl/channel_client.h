#pragma once

#include <memory>

#include <grpcpp/channel.h>

#include "common/status.h"
#include "coordinator/ctl/endpoint.h"

namespace ravel::ctl {

// A channel with mutual TLS by the endpoint's context, or in plaintext to a loopback address.
// InvalidArgument: the address is neither, or none. Nothing is sent before the first call.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const Endpoint& endpoint);

// Explains a refusal of the transport (UNAVAILABLE) in words: connects once more, for half a second
// at most, to say what listens there.
absl::Status ExplainTransport(const Endpoint& endpoint, const std::string& message);
// The same of a server that does not know a call (UNIMPLEMENTED).
absl::Status ExplainUnknownCall(const Endpoint& endpoint);

}  // namespace ravel::ctl
