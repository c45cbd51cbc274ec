#include "coordinator/ctl/channel_client.h"

#include <chrono>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/net_address.h"
#include "common/peer_chain.h"
#include "coordinator/api/job_file_proto.h"

namespace ravel::ctl {

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const Endpoint& endpoint) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(endpoint.address);
  RETURN_IF_ERROR(Annotate(parsed.status(), "--coordinator"));
  if (parsed->port == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--coordinator: expected a port from 1 to 65535, got '", endpoint.address, "'"));
  }
  if (endpoint.context == nullptr && !IsLoopbackHost(parsed->host)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator: without a context (`ravelctl login`) expected a loopback "
                     "address, because nothing would be encrypted, got '",
                     endpoint.address,
                     "'"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   5000);  // in truth: how long one connect may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxRequestBytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(kMaxRequestBytes));
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (endpoint.context != nullptr) {
    credentials = grpc::SslCredentials({.pem_root_certs = endpoint.context->authority,
                                        .pem_private_key = endpoint.context->key,
                                        .pem_cert_chain = endpoint.context->certificate});
  }
  return grpc::CreateCustomChannel(endpoint.address, credentials, arguments);
}

namespace {

constexpr auto kLookTime = std::chrono::milliseconds(500);

// The words about a server that is reached, and is no coordinator that this endpoint can talk to.
std::string Reached(const Endpoint& endpoint) {
  const ServerView view = LookAtServer(endpoint.address, kLookTime);
  const bool plain = endpoint.context == nullptr;
  if (view.speech == Speech::kForeign || (view.speech == Speech::kPlainGrpc && !plain)) {
    return absl::StrCat("expected a ravel-coordinator there, but ", view.text, ": ");
  }
  return view.speech == Speech::kTls && plain
             ? "it speaks TLS, and no context is in use (`ravelctl login`): "
             : "";
}

}  // namespace

absl::Status ExplainTransport(const Endpoint& endpoint, const std::string& message) {
  return absl::UnavailableError(
      absl::StrCat("coordinator ",
                   endpoint.address,
                   " cannot be reached",
                   endpoint.context == nullptr ? "" : " by TLS with this context",
                   ": ",
                   // A name that does not resolve would hold this up, and has no server.
                   absl::StrContains(message, "DNS") ? "" : Reached(endpoint),
                   message));
}

absl::Status ExplainUnknownCall(const Endpoint& endpoint) {
  const std::string reached = Reached(endpoint);
  return absl::UnimplementedError(
      absl::StrCat("coordinator ",
                   endpoint.address,
                   ": ",
                   reached,
                   "the server does not know this call",
                   reached.empty() ? ": it is no ravel-coordinator, or of an older release" : ""));
}

}  // namespace ravel::ctl
