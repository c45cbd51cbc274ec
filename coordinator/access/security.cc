#include "coordinator/access/security.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/logging.h"
#include "coordinator/access/authority_files.h"

namespace ravel::coordinator {
namespace {

// gRPC looks at what it trusts every 5 s: whoever got a certificate of a new authority before that
// would be refused with it.
constexpr std::chrono::seconds kTrustDelay{10};

bool IsOldEnough(const std::string& path) {
  std::error_code error;
  const auto written = std::filesystem::last_write_time(path, error);
  return !error && std::filesystem::file_time_type::clock::now() - written >= kTrustDelay;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Security>> OpenSecurity(const std::string& state_dir,
                                                       int64_t node_ms) {
  absl::StatusOr<AuthorityFiles> files = LoadAuthorityFiles(state_dir);
  if (absl::IsNotFound(files.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--state-dir ",
        state_dir,
        ": there are no certificates; `ravel-coordinator init` makes them, or pass --dev-loopback "
        "for a plaintext coordinator on this host only"));
  }
  RETURN_IF_ERROR(files.status());
  RETURN_IF_ERROR(RenewServerCertificate(*files, SystemClock::Get().WallMs()).status());
  auto security = std::make_unique<Security>();
  ASSIGN_OR_RETURN(security->registry,
                   AccessRegistry::Open(
                       state_dir, *std::move(files), &SystemClock::Get(), {.node_ms = node_ms}));
  security->registry->OnRevoked(
      [live = &security->live](const std::string& identity) { live->CancelOf(identity); });
  return security;
}

void WatchCertificates(Security& security) {
  const int64_t now_ms = SystemClock::Get().WallMs();
  security.live.CancelExpired(now_ms);
  const absl::StatusOr<bool> rotated = IsOldEnough(security.registry->files().CaPath())
                                           ? security.registry->ReloadAuthority()
                                           : false;
  if (!rotated.ok()) {
    log::Error(absl::StrCat("the authority's files: ", std::string(rotated.status().message())));
  } else if (*rotated) {
    log::Info("another authority is in force");
  }
  const absl::StatusOr<bool> renewed = RenewServerCertificate(security.registry->files(), now_ms);
  if (!renewed.ok()) {
    log::Error(absl::StrCat("the coordinator's certificate cannot be renewed: ",
                            std::string(renewed.status().message())));
  } else if (*renewed) {
    log::Info("the coordinator's certificate was renewed");
  }
}

CertificateEnds ReadCertificateEnds(const Security& security) {
  const AuthorityFiles files = security.registry->files();
  const auto end_of = [](const std::string& path) -> int64_t {
    std::ifstream input(path);
    const std::string text((std::istreambuf_iterator<char>(input)), {});
    const absl::StatusOr<CertificateFacts> facts = ReadCertificate(text);
    return facts.ok() ? facts->not_after_ms : 0;
  };
  return {.server_ms = end_of(files.ServerPath()), .authority_ms = end_of(files.CaPath())};
}

}  // namespace ravel::coordinator
