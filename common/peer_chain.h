#pragma once

// The first contact with a cluster: who has a fingerprint of its authority's certificate, and
// nothing else, asks a server for the certificate and knows it by the fingerprint.

#include <chrono>
#include <string>

#include "common/status.h"

namespace ravel {

// Connects to HOST:PORT by TLS, trusting nobody, and returns the certificate (PEM) of the chain
// shown whose SHA-256 is `fingerprint` (hex). PermissionDenied: the server shows another chain.
// FailedPrecondition: it is no coordinator, by its certificate or its protocols. Unavailable:
// nobody answers, or does not speak TLS. Blocks for `limit` at most, but for the resolution of the
// name. Nothing is sent to the server beyond the handshake.
absl::StatusOr<std::string> FetchAuthority(const std::string& address,
                                           const std::string& fingerprint,
                                           std::chrono::milliseconds limit);

enum class Speech {
  kUnknown,    // nobody listens, or nothing can be told of it
  kTls,        // as a coordinator does
  kPlainGrpc,  // HTTP/2 without TLS
  kForeign,    // nothing that a coordinator says
};
struct ServerView {
  Speech speech = Speech::kUnknown;
  std::string text = {};  // of kPlainGrpc and kForeign: "it speaks HTTP without TLS"
};
// The server at HOST:PORT as its first answer tells it, for a message about a call that failed.
ServerView LookAtServer(const std::string& address, std::chrono::milliseconds limit);

}  // namespace ravel
