#include "worker/store/store_gate_service.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <absl/strings/str_cat.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/stat.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/file_writer.h"

namespace ravel::store_server {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr unsigned int kReloadSeconds = 5;

}  // namespace

absl::StatusOr<std::unique_ptr<StoreGate>> StoreGate::FromIdentity(
    const std::string& folder, std::vector<std::string> operators) {
  struct stat key = {};
  const std::string key_path = folder + "/key.pem";
  if (stat(key_path.c_str(), &key) != 0) {
    return ErrnoStatus(errno, key_path);
  }
  if ((key.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(key_path, ": others may read this private key; chmod 600 it"));
  }
  ASSIGN_OR_RETURN(const std::string certificate,
                   ReadWholeFile(folder + "/certificate.pem", kMaxFileBytes));
  ASSIGN_OR_RETURN(const std::string key_text, ReadWholeFile(key_path, kMaxFileBytes));
  RETURN_IF_ERROR(ReadWholeFile(folder + "/authority.pem", kMaxFileBytes).status());
  RETURN_IF_ERROR(Annotate(CheckKeyPair(certificate, key_text), folder));
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(certificate);
  RETURN_IF_ERROR(Annotate(facts.status(), folder + "/certificate.pem"));
  auto gate = std::make_unique<StoreGate>();
  gate->folder_ = folder;
  gate->operators_ = std::move(operators);
  const absl::StatusOr<std::string> cluster = ClusterOf(facts->uri);
  RETURN_IF_ERROR(Annotate(cluster.status(), folder + "/certificate.pem"));
  gate->cluster_ = *cluster;
  return gate;
}

std::shared_ptr<grpc::ServerCredentials> StoreGate::Credentials() const {
  if (folder_.empty()) {
    return grpc::InsecureServerCredentials();
  }
  namespace tls = grpc::experimental;
  tls::TlsServerCredentialsOptions options(
      std::make_shared<tls::FileWatcherCertificateProvider>(folder_ + "/key.pem",
                                                            folder_ + "/certificate.pem",
                                                            folder_ + "/authority.pem",
                                                            kReloadSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return tls::TlsServerCredentials(options);
}

absl::StatusOr<Caller> StoreGate::CallerOf(const grpc::ServerContextBase& context) const {
  if (folder_.empty()) {
    return Caller{CallerKind::kAnyone, "anyone"};
  }
  const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
  if (connection == nullptr || !connection->IsPeerAuthenticated()) {
    return absl::UnauthenticatedError("this store needs a certificate of its cluster");
  }
  const std::vector<grpc::string_ref> uris =
      connection->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME);
  const std::string_view uri =
      uris.size() == 1 ? std::string_view(uris[0].data(), uris[0].size()) : std::string_view();
  ASSIGN_OR_RETURN(Caller caller, store_server::CallerOf(cluster_, uri));
  const bool named = std::any_of(operators_.begin(), operators_.end(), [&](const auto& name) {
    return caller.text == absl::StrCat("user/", name);
  });
  if (named) {
    caller.kind = CallerKind::kOperator;
  }
  const std::vector<grpc::string_ref> shown =
      connection->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (shown.size() != 1) {
    return absl::UnauthenticatedError("this store needs a certificate of its cluster");
  }
  ASSIGN_OR_RETURN(const CertificateFacts facts,
                   ReadCertificate(std::string(shown[0].data(), shown[0].size())));
  caller.serial = facts.serial;
  caller.not_after_ms = facts.not_after_ms;
  RETURN_IF_ERROR(CheckStill(caller));
  if (trust_ != nullptr) {
    TakeToken(context, caller);
  }
  return caller;
}

void StoreGate::TakeToken(const grpc::ServerContextBase& context, Caller& caller) const {
  const std::vector<std::string> keys = trust_->job_keys();
  caller.needs_token = caller.kind == CallerKind::kNode && !keys.empty();
  if (!caller.needs_token) {
    return;
  }
  const grpc::string_ref name(kJobTokenMetadata.data(), kJobTokenMetadata.size());
  const auto [first, end] = context.client_metadata().equal_range(name);
  if (first != end && std::next(first) == end) {
    caller.token = CheckJobToken({first->second.data(), first->second.size()}, keys);
  }
}

absl::Status StoreGate::CheckStill(const Caller& caller) const {
  if (caller.serial.empty()) {
    return absl::OkStatus();
  }
  // TLS has looked at it once, and connections last. Unavailable, as a handshake with it is: the
  // caller comes again with its next one.
  if (caller.not_after_ms < SystemClock::Get().WallMs()) {
    return absl::UnavailableError(absl::StrCat("the certificate of ", caller.text, " has expired"));
  }
  return trust_ == nullptr ? absl::OkStatus() : trust_->Check(caller.serial);
}

}  // namespace ravel::store_server
