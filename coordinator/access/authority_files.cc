#include "coordinator/access/authority_files.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "coordinator/access/identity.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
constexpr int64_t kAuthorityMs = 3650 * kDayMs;
constexpr int64_t kServerMs = 90 * kDayMs;
// Clocks of hosts differ: a certificate is good a little before it was made.
constexpr int64_t kBackdateMs = 300'000;
constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr size_t kMaxNames = 32;

absl::Status WriteServerCertificate(const AuthorityFiles& files,
                                    const std::string& key,
                                    const std::vector<std::string>& names,
                                    int64_t now_ms) {
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(key));
  ASSIGN_OR_RETURN(const std::string certificate,
                   IssueCertificate(files.authority,
                                    request,
                                    {.uri = CoordinatorUri(files.cluster),
                                     .serial = "\x01" + RandomBytes(15),
                                     .names = names,
                                     .use = CertificateUse::kServer,
                                     .not_before_ms = now_ms - kBackdateMs,
                                     .not_after_ms = now_ms + kServerMs}));
  // The authority's certificate goes along: who has only its fingerprint finds it there.
  return WriteFileAtomically(
      files.ServerPath(), certificate + files.authority.certificate, FileAccess::kOwner);
}

}  // namespace

absl::Status CheckServerName(const std::string& name) {
  in6_addr buffer = {};
  if (inet_pton(AF_INET, name.c_str(), &buffer) == 1 ||
      inet_pton(AF_INET6, name.c_str(), &buffer) == 1) {
    return absl::OkStatus();
  }
  const bool good =
      !name.empty() && name.size() <= 253 && name.front() != '.' && name.front() != '-' &&
      std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-';
      });
  return good ? absl::OkStatus()
              : absl::InvalidArgumentError(
                    absl::StrCat("--name: expected host names and addresses without ports, got '",
                                 name.substr(0, 253),
                                 "'"));
}

absl::StatusOr<AuthorityFiles> MakeAuthorityFiles(const std::string& state_dir,
                                                  const std::vector<std::string>& names,
                                                  int64_t now_ms) {
  if (names.empty() || names.size() > kMaxNames) {
    return absl::InvalidArgumentError("--name: expected 1 to 32 host names or addresses");
  }
  for (const std::string& name : names) {
    RETURN_IF_ERROR(CheckServerName(name));
  }
  AuthorityFiles files;
  files.folder = state_dir + "/tls";
  if (std::filesystem::exists(files.folder)) {
    return absl::AlreadyExistsError(
        absl::StrCat(files.folder, ": this state has an authority already; it was left as it is"));
  }
  files.cluster = RandomHex(6);
  ASSIGN_OR_RETURN(files.authority,
                   MakeAuthority(absl::StrCat("Ravel cluster ", files.cluster),
                                 now_ms - kBackdateMs,
                                 now_ms + kAuthorityMs));
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(files.authority.certificate));
  files.fingerprint = facts.fingerprint;
  // Under another name until it is whole: an interrupted start leaves no half authority.
  AuthorityFiles part = files;
  part.folder = absl::StrCat(files.folder, ".part-", RandomHex(4));
  std::error_code error;
  std::filesystem::create_directories(state_dir, error);
  if (error || mkdir(part.folder.c_str(), 0700) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "--state-dir ", state_dir, ": ", error ? error.message() : "the folder cannot be made"));
  }
  const std::string server_key = MakePrivateKey();
  RETURN_IF_ERROR(
      WriteFileAtomically(part.folder + "/cluster", files.cluster + "\n", FileAccess::kOwner));
  RETURN_IF_ERROR(
      WriteFileAtomically(part.CaPath(), files.authority.certificate, FileAccess::kOwner));
  RETURN_IF_ERROR(
      WriteFileAtomically(part.folder + "/ca.key", files.authority.key, FileAccess::kOwner));
  RETURN_IF_ERROR(WriteFileAtomically(part.ServerKeyPath(), server_key, FileAccess::kOwner));
  RETURN_IF_ERROR(WriteServerCertificate(part, server_key, names, now_ms));
  std::filesystem::rename(part.folder, files.folder, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(files.folder, ": ", error.message()));
  }
  return files;
}

absl::StatusOr<AuthorityFiles> LoadAuthorityFiles(const std::string& state_dir) {
  AuthorityFiles files;
  files.folder = state_dir + "/tls";
  ASSIGN_OR_RETURN(files.authority.certificate, ReadWholeFile(files.CaPath(), kMaxFileBytes));
  ASSIGN_OR_RETURN(files.authority.key, ReadWholeFile(files.folder + "/ca.key", kMaxFileBytes));
  ASSIGN_OR_RETURN(files.cluster, ReadWholeFile(files.folder + "/cluster", kMaxFileBytes));
  absl::StripAsciiWhitespace(&files.cluster);
  RETURN_IF_ERROR(
      Annotate(CheckKeyPair(files.authority.certificate, files.authority.key), files.CaPath()));
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(files.authority.certificate));
  files.fingerprint = facts.fingerprint;
  ASSIGN_OR_RETURN(const std::string server, ReadWholeFile(files.ServerPath(), kMaxFileBytes));
  ASSIGN_OR_RETURN(const std::string key, ReadWholeFile(files.ServerKeyPath(), kMaxFileBytes));
  RETURN_IF_ERROR(Annotate(CheckKeyPair(server, key), files.ServerPath()));
  return files;
}

absl::StatusOr<bool> RenewServerCertificate(const AuthorityFiles& files, int64_t now_ms) {
  ASSIGN_OR_RETURN(const std::string server, ReadWholeFile(files.ServerPath(), kMaxFileBytes));
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(server));
  const int64_t due_ms = facts.not_before_ms + (facts.not_after_ms - facts.not_before_ms) / 3 * 2;
  if (now_ms < due_ms) {
    return false;
  }
  ASSIGN_OR_RETURN(const std::string key, ReadWholeFile(files.ServerKeyPath(), kMaxFileBytes));
  RETURN_IF_ERROR(WriteServerCertificate(files, key, facts.names, now_ms));
  return true;
}

}  // namespace ravel::coordinator
