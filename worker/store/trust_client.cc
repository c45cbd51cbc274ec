#include "worker/store/trust_client.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/file_writer.h"
#include "common/logging.h"

namespace ravel::store_server {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr int kMaxAnswerBytes = 32 << 20;
constexpr int kReconnectMs = 200;
constexpr int kConnectMs = 5000;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

const char* KindText(v1::IdentityKind kind) {
  return kind == v1::NODE ? "node" : kind == v1::USER ? "user" : "identity";
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrustClient>> TrustClient::Start(TrustSource source,
                                                                TrustBook* book) {
  const std::string path = source.identity_folder + "/certificate.pem";
  ASSIGN_OR_RETURN(const std::string certificate, ReadWholeFile(path, kMaxFileBytes));
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(certificate);
  RETURN_IF_ERROR(Annotate(facts.status(), path));
  if (!facts->is_client) {
    return absl::FailedPreconditionError(
        absl::StrCat(path,
                     ": it cannot be shown to a coordinator; make the identity anew by "
                     "`ravel-coordinator certify-store`"));
  }
  std::unique_ptr<TrustClient> client(new TrustClient(std::move(source), book));
  client->Tell(client->Ask());
  client->thread_ = std::thread([raw = client.get()] { raw->Run(); });
  return client;
}

TrustClient::~TrustClient() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    if (call_ != nullptr) {
      call_->TryCancel();
    }
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void TrustClient::Run() {
  for (;;) {
    {
      const MutexLock lock(mutex_);
      const auto end = std::chrono::steady_clock::now() + source_.interval;
      for (auto now = std::chrono::steady_clock::now(); !ending_ && now < end;
           now = std::chrono::steady_clock::now()) {
        changed_.WaitFor(mutex_, std::chrono::ceil<std::chrono::milliseconds>(end - now));
      }
      if (ending_) {
        return;
      }
    }
    Tell(Ask());
  }
}

absl::Status TrustClient::Connect() {
  const auto read = [this](const char* name) {
    return ReadWholeFile(absl::StrCat(source_.identity_folder, "/", name), kMaxFileBytes);
  };
  ASSIGN_OR_RETURN(std::string authority, read("authority.pem"));
  ASSIGN_OR_RETURN(std::string certificate, read("certificate.pem"));
  ASSIGN_OR_RETURN(std::string key, read("key.pem"));
  std::string identity = absl::StrCat(authority, "\n", certificate, "\n", key);
  if (stub_ != nullptr && identity == identity_) {
    return absl::OkStatus();
  }
  // An identity that is replaced is, for a moment, the key of one and the certificate of another.
  RETURN_IF_ERROR(Annotate(CheckKeyPair(certificate, key), source_.identity_folder));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetMaxReceiveMessageSize(kMaxAnswerBytes);
  stub_ = v1::Access::NewStub(
      grpc::CreateCustomChannel(source_.coordinator,
                                grpc::SslCredentials({.pem_root_certs = std::move(authority),
                                                      .pem_private_key = std::move(key),
                                                      .pem_cert_chain = std::move(certificate)}),
                                arguments));
  identity_ = std::move(identity);
  version_.clear();  // the identity may have come with older authorities
  return absl::OkStatus();
}

absl::Status TrustClient::Ask() {
  RETURN_IF_ERROR(Connect());
  v1::GetTrustRequest request;
  request.set_version(version_);
  v1::GetTrustResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + source_.deadline);
  // A call that fails at once would end before the handshake of its connection.
  context.set_wait_for_ready(true);
  {
    const MutexLock lock(mutex_);
    if (ending_) {
      return absl::CancelledError("the store ends");
    }
    call_ = &context;
  }
  const grpc::Status status = stub_->GetTrust(&context, request, &response);
  {
    const MutexLock lock(mutex_);
    call_ = nullptr;
  }
  RETURN_IF_ERROR(FromGrpc(status));
  book_->Heard(SystemClock::Get().WallMs());
  return response.unchanged() ? absl::OkStatus() : Take(response);
}

absl::Status TrustClient::Take(const v1::GetTrustResponse& response) {
  if (SplitCertificates(response.authority()).empty()) {
    return absl::InvalidArgumentError("authority: expected certificates");
  }
  std::vector<RevokedEnrolment> revoked;
  for (const v1::RevokedEnrolment& each : response.revoked()) {
    revoked.push_back({.owner = absl::StrCat(KindText(each.kind()), "/", each.name()),
                       .serial_prefix = each.serial_prefix(),
                       .revoked_ms = each.revoked_ms()});
  }
  version_.clear();  // asked for again where it cannot be written
  RETURN_IF_ERROR(book_->Keep(revoked, {response.job_keys().begin(), response.job_keys().end()}));
  log::Info(absl::StrCat(revoked.size(), " enrolments are revoked"));
  TakeAuthority(response.authority());
  version_ = response.version();
  return absl::OkStatus();
}

void TrustClient::TakeAuthority(const std::string& authority) {
  const std::string path = source_.identity_folder + "/authority.pem";
  const absl::StatusOr<std::string> known = ReadWholeFile(path, kMaxFileBytes);
  if (known.ok() && *known == authority) {
    return;
  }
  const absl::Status written = WriteFileAtomically(path, authority, FileAccess::kOwner);
  if (written.ok()) {
    log::Info("the authorities that are trusted have changed");
  } else {  // such as in a folder that is mounted to be read only
    log::Warning(
        absl::StrCat("the authorities that are trusted have changed, and cannot be written; make "
                     "the identity anew: ",
                     std::string(written.message())));
  }
}

void TrustClient::Tell(const absl::Status& status) {
  if (status.ok()) {
    if (failures_ > 0) {
      log::Info(absl::StrCat("the coordinator ", source_.coordinator, " answers again"));
    }
    failures_ = 0;
  } else if (++failures_ == 1) {  // an outage may last for hours
    log::Warning(absl::StrCat("the coordinator ",
                              source_.coordinator,
                              " does not tell who is revoked; what it told last holds: ",
                              std::string(status.message())));
  }
}

}  // namespace ravel::store_server
