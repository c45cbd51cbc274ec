// Two seams of gRPC. The metadata processor runs before a message is read, knows method and
// connection, and can refuse; it does not know the peer's address. The interceptor sees the whole
// call, but cannot refuse it. So the first one judges and the second one tells. Both work from the
// certificate of the connection alone: nothing that a client writes into a message says who it is.

#include "coordinator/api/access_gate_service.h"

#include <optional>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <google/protobuf/message.h>
#include <grpc/grpc.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include "common/plain_text.h"
#include "coordinator/api/request_checks_service.h"

namespace ravel::coordinator {
namespace {

constexpr unsigned int kReloadSeconds = 5;
constexpr size_t kMaxAuditText = 512;
constexpr char kPath[] = ":path";
constexpr char kEnded[] =
    "the caller's certificate was revoked, replaced or has expired while the call was under way";

std::string Told(const std::string& text) {
  return CutText(EscapeControlText(text), kMaxAuditText);
}

// Whom the verified certificate names, good for calls or not.
std::string NameBehind(const AccessRegistry& registry, const grpc::AuthContext& connection) {
  Identity named;
  for (const grpc::string_ref& uri : connection.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    if (ParseUri(registry.files().cluster,
                 std::string_view(uri.data(), uri.size()),
                 &named.kind,
                 &named.name)) {
      return named.Text();
    }
  }
  return "anonymous";
}

absl::StatusOr<Identity> IdentityBehind(const AccessRegistry& registry,
                                        const grpc::AuthContext& connection) {
  const std::vector<grpc::string_ref> shown =
      connection.FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (!connection.IsPeerAuthenticated() || shown.size() != 1) {
    return absl::UnauthenticatedError(
        "this coordinator needs a client certificate: `ravelctl login` or `ravel-worker join` "
        "makes "
        "one");
  }
  ASSIGN_OR_RETURN(const CertificateFacts certificate,
                   ReadCertificate(std::string(shown[0].data(), shown[0].size())));
  return registry.Identify(certificate);
}

const char* CodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND:
      return "NOT_FOUND";
    case grpc::StatusCode::ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case grpc::StatusCode::ABORTED:
      return "ABORTED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    default:
      return "INTERNAL";
  }
}

class Gate final : public grpc::AuthMetadataProcessor {
 public:
  Gate(AccessRegistry* registry, CallBudget* budget, const LiveCalls* live)
      : registry_(registry), budget_(budget), live_(live) {}
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata,
                       grpc::AuthContext* connection,
                       OutputMetadata* /*consumed*/,
                       OutputMetadata* /*response*/) override {
    const auto path = metadata.find(kPath);
    const std::string method =
        path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
    if (IsOpenMethod(method)) {
      return grpc::Status::OK;
    }
    const absl::StatusOr<Identity> caller = IdentityBehind(*registry_, *connection);
    const absl::Status judged = caller.ok() ? CheckMethod(*caller, method) : caller.status();
    if (!judged.ok()) {
      AuditRow row;
      row.who = NameBehind(*registry_, *connection);
      row.verb = Told(VerbOf(method));
      row.message = Told(std::string(judged.message()));
      row.result = CodeName(static_cast<grpc::StatusCode>(judged.code()));
      registry_->audit().Record(std::move(row));
      return ToGrpc(judged);
    }
    const absl::Status room = live_->CheckRoom(caller->Text());
    return ToGrpc(room.ok() ? budget_->Take(caller->Text()) : room);
  }

 private:
  AccessRegistry* const registry_;
  CallBudget* const budget_;
  const LiveCalls* const live_;
};

// The object of a request, by the names that fields have in all our messages.
std::string Field(const google::protobuf::Message& message, const char* name) {
  const google::protobuf::FieldDescriptor* const field =
      message.GetDescriptor()->FindFieldByName(name);
  const bool text = field != nullptr && !field->is_repeated() &&
                    field->type() == google::protobuf::FieldDescriptor::TYPE_STRING;
  return text ? message.GetReflection()->GetString(message, field) : "";
}

std::string ObjectOf(const google::protobuf::Message& message) {
  if (const std::string node = Field(message, "node"); !node.empty()) {
    return absl::StrCat("node/", node);
  }
  const google::protobuf::Message* named = &message;
  for (const char* inner : {"job", "metadata"}) {  // SubmitJobRequest
    const google::protobuf::FieldDescriptor* const field =
        named->GetDescriptor()->FindFieldByName(inner);
    if (field != nullptr && field->type() == google::protobuf::FieldDescriptor::TYPE_MESSAGE) {
      named = &named->GetReflection()->GetMessage(*named, field);
    }
  }
  const std::string space = Field(*named, "namespace");
  return absl::StrCat(space.empty() ? "default" : space, "/", Field(*named, "name"));
}

// One call, from its first byte to its last.
class WatchedCall final : public grpc::experimental::Interceptor {
 public:
  WatchedCall(grpc::experimental::ServerRpcInfo* call, AccessRegistry* registry, LiveCalls* live)
      : call_(call), registry_(registry), live_(live), change_(IsChange(call->method())) {}
  ~WatchedCall() override {
    if (id_) {
      live_->Remove(*id_);
    }
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_INITIAL_METADATA)) {
      Begin();
    }
    if (change_ && methods->QueryInterceptionHookPoint(Point::POST_RECV_MESSAGE) &&
        methods->GetRecvMessage() != nullptr) {
      // Messages of generated services derive from Message alone.
      const auto& message =
          *static_cast<const google::protobuf::Message*>(methods->GetRecvMessage());
      row_.object =
          Told(row_.verb.starts_with("Access.") ? Field(message, "name") : ObjectOf(message));
      row_.request_id = Told(Field(message, "request_id"));
    }
    if (change_ && methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS)) {
      End(methods->GetSendStatus());
    }
    methods->Proceed();
  }

 private:
  void Begin() {
    grpc::ServerContextBase* const context = call_->server_context();
    const absl::StatusOr<Identity> caller = CallerOf(*registry_, *context);
    row_.who = caller.ok() ? caller->Text() : "anonymous";
    row_.peer = context->peer();
    row_.verb = VerbOf(call_->method());
    if (!caller.ok()) {
      return;  // Enrol
    }
    // A share of gRPC's own call object: the context may go while a cancel is under way.
    grpc_call_ref(context->c_call());
    const std::shared_ptr<grpc_call> call(context->c_call(), grpc_call_unref);
    id_ = live_->Add(caller->Text(), caller->not_after_ms, [call] {
      grpc_call_cancel_with_status(call.get(), GRPC_STATUS_UNAUTHENTICATED, kEnded, nullptr);
    });
    // It may have been revoked between the gate and the list.
    if (!CallerOf(*registry_, *context).ok()) {
      live_->CancelOf(caller->Text());
    }
  }
  void End(const grpc::Status& status) {
    // The registry has written its own changes, together with the change.
    if (status.ok() && row_.verb.starts_with("Access.")) {
      return;
    }
    row_.result = CodeName(status.error_code());
    row_.message = Told(status.error_message());
    registry_->audit().Record(row_);
  }

  grpc::experimental::ServerRpcInfo* const call_;
  AccessRegistry* const registry_;
  LiveCalls* const live_;
  const bool change_;
  std::optional<LiveCalls::CallId> id_;
  AuditRow row_;
};

class Watcher final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Watcher(AccessRegistry* registry, LiveCalls* live) : registry_(registry), live_(live) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override {
    return new WatchedCall(call, registry_, live_);
  }

 private:
  AccessRegistry* const registry_;
  LiveCalls* const live_;
};

}  // namespace

absl::StatusOr<Identity> CallerOf(const AccessRegistry& registry,
                                  const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
  if (connection == nullptr) {
    return absl::UnauthenticatedError("this call came without a secure connection");
  }
  return IdentityBehind(registry, *connection);
}

std::shared_ptr<grpc::ServerCredentials> GateCredentials(AccessRegistry* registry,
                                                         CallBudget* budget,
                                                         const LiveCalls* live) {
  namespace tls = grpc::experimental;
  const AuthorityFiles files = registry->files();
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.ServerKeyPath(), files.ServerPath(), files.CaPath(), kReloadSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  const std::shared_ptr<grpc::ServerCredentials> credentials = tls::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<Gate>(registry, budget, live));
  return credentials;
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CallWatcher(
    AccessRegistry* registry, LiveCalls* live) {
  return std::make_unique<Watcher>(registry, live);
}

}  // namespace ravel::coordinator
