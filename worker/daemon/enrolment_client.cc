#include "worker/daemon/enrolment_client.h"

#include <chrono>

#include <absl/strings/str_cat.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include "common/certificate.h"
#include "common/join_token.h"
#include "common/peer_chain.h"
#include "proto/access.grpc.pb.h"

namespace ravel::daemon {
namespace {

constexpr auto kFirstContact = std::chrono::seconds(10);
constexpr auto kDeadline = std::chrono::seconds(30);

}  // namespace

absl::StatusOr<NodeIdentity> Join(const std::string& coordinator,
                                  const std::string& node_id,
                                  const std::string& token) {
  ASSIGN_OR_RETURN(const JoinToken parsed, ParseJoinToken(token));
  NodeIdentity identity{.node_id = node_id, .coordinator = coordinator, .tls = {}};
  absl::StatusOr<std::string> authority =
      FetchAuthority(coordinator, parsed.fingerprint, kFirstContact);
  RETURN_IF_ERROR(Annotate(authority.status(), absl::StrCat("coordinator ", coordinator)));
  identity.tls.authority = *std::move(authority);
  identity.tls.key = MakePrivateKey();
  v1::EnrolRequest request;
  request.set_secret(parsed.secret);
  request.set_node(node_id);
  ASSIGN_OR_RETURN(*request.mutable_certificate_request(),
                   MakeCertificateRequest(identity.tls.key));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Without a certificate of our own so far: enrolment is the one call that needs none.
  const std::unique_ptr<v1::Access::Stub> stub = v1::Access::NewStub(grpc::CreateCustomChannel(
      coordinator,
      grpc::SslCredentials(
          {.pem_root_certs = identity.tls.authority, .pem_private_key = {}, .pem_cert_chain = {}}),
      arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::EnrolResponse response;
  const grpc::Status status = stub->Enrol(&context, request, &response);
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return absl::FailedPreconditionError(absl::StrCat(
        "coordinator ", coordinator, ": it does not know this call: it is no ravel-coordinator"));
  }
  if (!status.ok()) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        absl::StrCat("coordinator ", coordinator, ": ", status.error_message()));
  }
  identity.tls.certificate = response.certificate();
  if (!SplitCertificates(response.authority()).empty()) {  // two while it is rotated
    identity.tls.authority = response.authority();
  }
  RETURN_IF_ERROR(Annotate(CheckKeyPair(identity.tls.certificate, identity.tls.key),
                           "the coordinator's answer"));
  return identity;
}

}  // namespace ravel::daemon
