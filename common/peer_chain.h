#pragma once

// The first contact with a cluster: who has a fingerprint of its authority's certificate, and
// nothing else, asks a server for the certificate and knows it by the fingerprint.

#include <chrono>
#include <string>

#include "common/status.h"

namespace ravel {

// Connects to HOST:PORT by TLS, trusting nobody, and returns the certificate (PEM) of the chain
// shown whose SHA-256 is `fingerprint` (hex). PermissionDenied: the server shows another chain.
// Unavailable: nobody answers, or does not speak TLS. Blocks for `limit` at most, but for the
// resolution of the name. Nothing is sent to the server beyond the handshake.
absl::StatusOr<std::string> FetchAuthority(const std::string& address,
                                           const std::string& fingerprint,
                                           std::chrono::milliseconds limit);

}  // namespace ravel
