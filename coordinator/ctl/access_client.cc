#include "coordinator/ctl/access_client.h"

#include <chrono>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/certificate.h"
#include "common/join_token.h"
#include "common/peer_chain.h"
#include "coordinator/ctl/channel_client.h"
#include "coordinator/ctl/document_proto.h"
#include "coordinator/ctl/interrupt.h"
#include "coordinator/ctl/request_id.h"
#include "proto/access.grpc.pb.h"

namespace ravel::ctl {
namespace {

constexpr auto kCallTimeout = std::chrono::seconds(30);
constexpr auto kFirstContact = std::chrono::seconds(10);

IdentityEntry ToEntry(const v1::IdentityView& view) {
  return {.kind = view.kind() == v1::NODE ? "node" : "user",
          .name = view.name(),
          .role = view.role(),
          .namespace_name = view.namespace_(),
          .created_ms = view.created_ms(),
          .revoked_ms = view.revoked_ms(),
          .document = ToDocument(view)};
}

v1::IdentityKind KindOf(const IdentityName& identity) {
  return identity.node ? v1::NODE : v1::USER;
}

class GrpcAccessClient final : public AccessClient {
 public:
  GrpcAccessClient(Endpoint endpoint, const std::shared_ptr<grpc::Channel>& channel)
      : endpoint_(std::move(endpoint)), stub_(v1::Access::NewStub(channel)) {}

  absl::StatusOr<TokenAnswer> CreateToken(const TokenRequest& wanted) override {
    v1::CreateTokenRequest request;
    request.set_request_id(MakeRequestId());
    request.set_kind(KindOf(wanted.identity));
    request.set_name(wanted.identity.name);
    request.set_role(wanted.role);
    request.set_namespace_(wanted.namespace_name);
    request.set_uses(wanted.uses);
    request.set_ttl_ms(wanted.ttl_ms);
    v1::CreateTokenResponse response;
    RETURN_IF_ERROR(Call(&v1::Access::Stub::CreateToken, request, response));
    return TokenAnswer{.token = response.token(), .expires_ms = response.expires_ms()};
  }

  absl::Status Revoke(const IdentityName& identity) override {
    v1::RevokeRequest request;
    request.set_request_id(MakeRequestId());
    request.set_kind(KindOf(identity));
    request.set_name(identity.name);
    v1::RevokeResponse response;
    return Call(&v1::Access::Stub::Revoke, request, response);
  }

  absl::StatusOr<std::vector<IdentityEntry>> Identities() override {
    v1::ListIdentitiesResponse response;
    RETURN_IF_ERROR(Call(&v1::Access::Stub::ListIdentities, v1::ListIdentitiesRequest(), response));
    std::vector<IdentityEntry> entries;
    for (const v1::IdentityView& view : response.identities()) {
      entries.push_back(ToEntry(view));
    }
    return entries;
  }

  absl::StatusOr<std::vector<AuditEntry>> Audit(int64_t after_seq) override {
    std::vector<AuditEntry> entries;
    v1::ListAuditRequest request;
    request.set_after_seq(after_seq);
    v1::ListAuditResponse page;
    do {
      page.Clear();
      RETURN_IF_ERROR(Call(&v1::Access::Stub::ListAudit, request, page));
      for (const v1::AuditRecord& record : page.records()) {
        entries.push_back({.seq = record.seq(),
                           .time_ms = record.time_ms(),
                           .who = record.who(),
                           .verb = record.verb(),
                           .object = record.object(),
                           .result = record.result(),
                           .message = record.message(),
                           .document = ToDocument(record)});
        request.set_after_seq(record.seq());
      }
    } while (page.more());
    return entries;
  }

  absl::StatusOr<Caller> WhoAmI() override {
    v1::WhoAmIResponse response;
    RETURN_IF_ERROR(Call(&v1::Access::Stub::WhoAmI, v1::WhoAmIRequest(), response));
    return Caller{.identity = ToEntry(response.identity()),
                  .expires_ms = response.certificate_expires_ms()};
  }

  absl::Status Renew(const std::string& certificate_request,
                     coordinator::ContextFile& context) override {
    v1::RenewRequest request;
    request.set_certificate_request(certificate_request);
    v1::EnrolResponse response;
    RETURN_IF_ERROR(Call(&v1::Access::Stub::Renew, request, response));
    return Take(response, context);
  }

  absl::Status Enrol(const std::string& secret,
                     const std::string& request_pem,
                     coordinator::ContextFile& context) {
    v1::EnrolRequest request;
    request.set_secret(secret);
    request.set_certificate_request(request_pem);
    v1::EnrolResponse response;
    RETURN_IF_ERROR(Call(&v1::Access::Stub::Enrol, request, response));
    return Take(response, context);
  }

 private:
  static absl::Status Take(const v1::EnrolResponse& response, coordinator::ContextFile& context) {
    RETURN_IF_ERROR(
        Annotate(CheckKeyPair(response.certificate(), context.key), "the coordinator's answer"));
    context.certificate = response.certificate();
    if (!SplitCertificates(response.authority()).empty()) {  // two while it is rotated
      context.authority = response.authority();
    }
    return absl::OkStatus();
  }

  // Once: a token that was used cannot be used again, and a second revocation is NotFound.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    const Interrupt::Scope on_interrupt([&context] { context.TryCancel(); });
    const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      return ExplainTransport(endpoint_, status.error_message());
    }
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return ExplainUnknownCall(endpoint_);
    }
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

  const Endpoint endpoint_;
  const std::unique_ptr<v1::Access::Stub> stub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AccessClient>> AccessClient::Connect(const Endpoint& endpoint) {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, OpenChannel(endpoint));
  return std::make_unique<GrpcAccessClient>(endpoint, channel);
}

absl::StatusOr<coordinator::ContextFile> Login(const std::string& address,
                                               const std::string& token) {
  ASSIGN_OR_RETURN(const JoinToken parsed, ParseJoinToken(token));
  coordinator::ContextFile context{
      .coordinator = address, .authority = {}, .certificate = {}, .key = MakePrivateKey()};
  absl::StatusOr<std::string> authority =
      FetchAuthority(address, parsed.fingerprint, kFirstContact);
  RETURN_IF_ERROR(Annotate(authority.status(), absl::StrCat("coordinator ", address)));
  context.authority = *std::move(authority);
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(context.key));
  Endpoint endpoint(address);
  // Without a certificate of our own so far: enrolment is the one call that needs none.
  endpoint.context = std::make_shared<coordinator::ContextFile>(coordinator::ContextFile{
      .coordinator = address, .authority = context.authority, .certificate = {}, .key = {}});
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, OpenChannel(endpoint));
  GrpcAccessClient client(endpoint, channel);
  RETURN_IF_ERROR(client.Enrol(parsed.secret, request, context));
  return context;
}

}  // namespace ravel::ctl
