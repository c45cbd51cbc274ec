#include "coordinator/access/store_certificate.h"

#include <filesystem>
#include <system_error>

#include <absl/strings/str_cat.h>

#include "common/certificate.h"
#include "common/crypto.h"
#include "common/file_writer.h"
#include "coordinator/access/identity.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
constexpr int64_t kStoreMs = 365 * kDayMs;
constexpr int64_t kClientMs = kDayMs;
constexpr int64_t kBackdateMs = 300'000;  // clocks of hosts differ
constexpr size_t kMaxNames = 32;

}  // namespace

absl::Status CertifyStore(const StoreCertificateOrder& order, int64_t now_ms) {
  if (order.names.empty() || order.names.size() > kMaxNames) {
    return absl::InvalidArgumentError("--name: expected 1 to 32 host names or addresses");
  }
  for (const std::string& name : order.names) {
    RETURN_IF_ERROR(CheckServerName(name));
  }
  ASSIGN_OR_RETURN(const AuthorityFiles files, LoadAuthorityFiles(order.state_dir));
  const std::string key = MakePrivateKey();
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(key));
  ASSIGN_OR_RETURN(const std::string certificate,
                   IssueCertificate(files.server_signer,
                                    request,
                                    {.uri = StoreUri(files.cluster),
                                     .serial = "\x01" + RandomBytes(15),
                                     .names = order.names,
                                     .use = CertificateUse::kServerAndClient,
                                     .not_before_ms = now_ms - kBackdateMs,
                                     .not_after_ms = now_ms + kStoreMs}));
  std::error_code error;
  std::filesystem::create_directories(order.output, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("--out ", order.output, ": ", error.message()));
  }
  const auto write = [&order](const char* name, const std::string& text) {
    return WriteFileAtomically(absl::StrCat(order.output, "/", name), text, FileAccess::kOwner);
  };
  RETURN_IF_ERROR(write("authority.pem", files.trusted));
  RETURN_IF_ERROR(write("key.pem", key));
  return write("certificate.pem", certificate);
}

absl::StatusOr<StoreClientCertificate> MakeStoreClientCertificate(const AuthorityFiles& files,
                                                                  int64_t now_ms) {
  StoreClientCertificate made;
  made.trusted = files.trusted;
  made.key = MakePrivateKey();
  made.renew_ms = now_ms + kClientMs / 3 * 2;
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(made.key));
  ASSIGN_OR_RETURN(made.certificate,
                   IssueCertificate(files.authority,
                                    request,
                                    {.uri = CoordinatorUri(files.cluster),
                                     .serial = "\x01" + RandomBytes(15),
                                     .use = CertificateUse::kClient,
                                     .not_before_ms = now_ms - kBackdateMs,
                                     .not_after_ms = now_ms + kClientMs}));
  return made;
}

}  // namespace ravel::coordinator
