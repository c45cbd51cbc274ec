#include "coordinator/api/access_service.h"

#include <string>
#include <utility>

#include "common/clock.h"
#include "common/plain_text.h"
#include "coordinator/api/access_gate_service.h"
#include "coordinator/api/request_checks_service.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMaxPage = 1000;
constexpr int64_t kMaxSecretBytes = 128;
constexpr int64_t kMaxVersionBytes = 128;

grpc::ServerUnaryReactor* Finished(grpc::CallbackServerContext* context,
                                   const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

absl::Status NoRegistry() {
  return absl::FailedPreconditionError(
      "this coordinator is plaintext (--dev-loopback): it knows no identities");
}

absl::StatusOr<IdentityKind> KindOf(v1::IdentityKind kind) {
  switch (kind) {
    case v1::NODE:
      return IdentityKind::kNode;
    case v1::USER:
      return IdentityKind::kUser;
    default:
      return absl::InvalidArgumentError("kind: expected NODE or USER");
  }
}

v1::IdentityKind ToProto(IdentityKind kind) {
  return kind == IdentityKind::kNode ? v1::NODE : v1::USER;
}

v1::IdentityView ToProto(const IdentityRow& row) {
  v1::IdentityView view;
  view.set_kind(ToProto(row.kind));
  view.set_name(row.name);
  view.set_role(NameOf(row.role));
  view.set_namespace_(row.namespace_name);
  view.set_created_ms(row.created_ms);
  view.set_revoked_ms(row.revoked_ms);
  return view;
}

void Fill(const Trust& trust, v1::GetTrustResponse* response) {
  for (const EndedEnrolment& ended : trust.ended) {
    v1::RevokedEnrolment& revoked = *response->add_revoked();
    revoked.set_kind(ToProto(ended.kind));
    revoked.set_name(ended.name);
    revoked.set_serial_prefix(ended.enrolment);
    revoked.set_revoked_ms(ended.ended_ms);
  }
  response->set_authority(trust.authority);
  for (const std::string& key : trust.job_keys) {
    response->add_job_keys(key);
  }
}

void Fill(const Enrolment& enrolment, v1::EnrolResponse* response) {
  response->set_certificate(enrolment.certificate);
  response->set_authority(enrolment.authority);
  response->set_uri(enrolment.uri);
}

absl::StatusOr<Asker> AskerOf(const AccessRegistry& registry,
                              const grpc::CallbackServerContext& context,
                              const std::string& request_id) {
  ASSIGN_OR_RETURN(const Identity caller, CallerOf(registry, context));
  return Asker{.who = caller.Text(), .peer = context.peer(), .request_id = request_id};
}

absl::Status Create(AccessRegistry& registry,
                    const grpc::CallbackServerContext& context,
                    const v1::CreateTokenRequest& request,
                    v1::CreateTokenResponse& response) {
  RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  TokenOrder order{.name = request.name(), .uses = request.uses(), .ttl_ms = request.ttl_ms()};
  ASSIGN_OR_RETURN(order.kind, KindOf(request.kind()));
  if (order.kind == IdentityKind::kUser) {
    ASSIGN_OR_RETURN(order.role, ParseRole(request.role()));
  } else if (!request.role().empty()) {
    return absl::InvalidArgumentError("role: only users have one");
  }
  order.namespace_name = request.namespace_();
  if (order.role == Role::kUser && order.namespace_name.empty()) {
    order.namespace_name = "default";
  }
  ASSIGN_OR_RETURN(const Asker asker, AskerOf(registry, context, request.request_id()));
  ASSIGN_OR_RETURN(*response.mutable_token(), registry.MakeToken(order, asker));
  response.set_expires_ms(SystemClock::Get().WallMs() + order.ttl_ms);
  return absl::OkStatus();
}

}  // namespace

grpc::ServerUnaryReactor* AccessService::Enrol(Context* context,
                                               const v1::EnrolRequest* request,
                                               v1::EnrolResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  absl::Status status = CheckPlainText("secret", request->secret(), kMaxSecretBytes);
  status.Update(CheckPlainText("node", request->node(), kMaxNameBytes));
  if (status.ok()) {
    const absl::StatusOr<Enrolment> enrolment = registry_->Enrol(
        request->secret(), request->node(), request->certificate_request(), context->peer());
    status = enrolment.status();
    if (enrolment.ok()) {
      Fill(*enrolment, response);
    }
  }
  return Finished(context, status);
}

grpc::ServerUnaryReactor* AccessService::Renew(Context* context,
                                               const v1::RenewRequest* request,
                                               v1::EnrolResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  const absl::StatusOr<Identity> caller = CallerOf(*registry_, *context);
  if (!caller.ok()) {
    return Finished(context, caller.status());
  }
  const absl::StatusOr<Enrolment> enrolment = registry_->Renew(
      *caller, request->certificate_request(), {.who = caller->Text(), .peer = context->peer()});
  if (enrolment.ok()) {
    Fill(*enrolment, response);
  }
  return Finished(context, enrolment.status());
}

grpc::ServerUnaryReactor* AccessService::CertifyTrainer(Context* context,
                                                        const v1::CertifyTrainerRequest* request,
                                                        v1::EnrolResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  const absl::StatusOr<Identity> caller = CallerOf(*registry_, *context);
  if (!caller.ok()) {
    return Finished(context, caller.status());
  }
  const absl::StatusOr<Enrolment> enrolment =
      registry_->CertifyTrainer(*caller,
                                request->job_uid(),
                                request->certificate_request(),
                                {.who = caller->Text(), .peer = context->peer()});
  if (enrolment.ok()) {
    Fill(*enrolment, response);
  }
  return Finished(context, enrolment.status());
}

grpc::ServerUnaryReactor* AccessService::WhoAmI(Context* context,
                                                const v1::WhoAmIRequest* /*request*/,
                                                v1::WhoAmIResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  const absl::StatusOr<Identity> caller = CallerOf(*registry_, *context);
  if (caller.ok()) {
    *response->mutable_identity() = ToProto(IdentityRow{.kind = caller->kind,
                                                        .name = caller->name,
                                                        .role = caller->role,
                                                        .namespace_name = caller->namespace_name});
    response->set_certificate_expires_ms(caller->not_after_ms);
  }
  return Finished(context, caller.status());
}

grpc::ServerUnaryReactor* AccessService::CreateToken(Context* context,
                                                     const v1::CreateTokenRequest* request,
                                                     v1::CreateTokenResponse* response) {
  return Finished(
      context,
      registry_ == nullptr ? NoRegistry() : Create(*registry_, *context, *request, *response));
}

grpc::ServerUnaryReactor* AccessService::Revoke(Context* context,
                                                const v1::RevokeRequest* request,
                                                v1::RevokeResponse* /*response*/) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  absl::Status status = CheckRequestId(request->request_id());
  const absl::StatusOr<IdentityKind> kind = KindOf(request->kind());
  const absl::StatusOr<Asker> asker = AskerOf(*registry_, *context, request->request_id());
  status.Update(kind.status());
  status.Update(asker.status());
  if (status.ok()) {
    status = registry_->Revoke(*kind, request->name(), *asker);
  }
  return Finished(context, status);
}

grpc::ServerUnaryReactor* AccessService::ListIdentities(
    Context* context,
    const v1::ListIdentitiesRequest* /*request*/,
    v1::ListIdentitiesResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  for (const IdentityRow& row : registry_->Identities()) {
    *response->add_identities() = ToProto(row);
  }
  return Finished(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AccessService::ListAudit(Context* context,
                                                   const v1::ListAuditRequest* request,
                                                   v1::ListAuditResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  if (const absl::Status valid = CheckCount("page_size", request->page_size(), kMaxPage);
      !valid.ok()) {
    return Finished(context, valid);
  }
  const int64_t limit = request->page_size() == 0 ? kMaxPage : request->page_size();
  absl::StatusOr<std::vector<AuditRow>> rows = registry_->Audit(request->after_seq(), limit + 1);
  if (!rows.ok()) {
    return Finished(context, rows.status());
  }
  response->set_more(static_cast<int64_t>(rows->size()) > limit);
  if (response->more()) {
    rows->pop_back();
  }
  for (const AuditRow& row : *rows) {
    v1::AuditRecord& record = *response->add_records();
    record.set_seq(row.seq);
    record.set_time_ms(row.time_ms);
    record.set_who(row.who);
    record.set_peer(row.peer);
    record.set_verb(row.verb);
    record.set_object(row.object);
    record.set_request_id(row.request_id);
    record.set_result(row.result);
    record.set_message(row.message);
  }
  return Finished(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AccessService::GetTrust(Context* context,
                                                  const v1::GetTrustRequest* request,
                                                  v1::GetTrustResponse* response) {
  if (registry_ == nullptr) {
    return Finished(context, NoRegistry());
  }
  const absl::Status status = CheckPlainText("version", request->version(), kMaxVersionBytes);
  if (status.ok()) {
    const std::shared_ptr<const Trust> trust = registry_->trust();
    response->set_version(trust->version);
    response->set_unchanged(request->version() == trust->version);
    if (!response->unchanged()) {
      Fill(*trust, response);
    }
  }
  return Finished(context, status);
}

}  // namespace ravel::coordinator
