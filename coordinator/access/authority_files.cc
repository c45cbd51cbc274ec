#include "coordinator/access/authority_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>

#include <absl/cleanup/cleanup.h>
#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/time_text.h"
#include "coordinator/access/identity.h"

namespace ravel::coordinator {
namespace {

constexpr char kPart[] = ".part-";  // after the name of the place: not published yet
constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
constexpr int64_t kAuthorityMs = 3650 * kDayMs;
constexpr int64_t kServerMs = 90 * kDayMs;
// The life of users' certificates, the longest of all.
constexpr int64_t kLongestMs = 90 * kDayMs;
// Clocks of hosts differ: a certificate is good a little before it was made.
constexpr int64_t kBackdateMs = 300'000;
constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr size_t kMaxNames = 32;

// A folder like `files`, beside it, with what `fill` writes into it, in its place: one exchange, so
// that no reader sees a half of it.
absl::Status ReplaceFolder(const AuthorityFiles& files,
                           const std::function<absl::Status(const AuthorityFiles& part)>& fill) {
  AuthorityFiles part = files;
  part.folder = absl::StrCat(files.folder, ".part-", RandomHex(4));
  std::error_code error;
  std::filesystem::copy(files.folder, part.folder, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(part.folder, ": ", error.message()));
  }
  const absl::Cleanup remove = [&part] {
    std::error_code ignored;
    std::filesystem::remove_all(part.folder, ignored);
  };
  std::filesystem::permissions(part.folder, std::filesystem::perms::owner_all, error);
  RETURN_IF_ERROR(fill(part));
  const int exchanged = static_cast<int>(syscall(SYS_renameat2,
                                                 AT_FDCWD,
                                                 part.folder.c_str(),
                                                 AT_FDCWD,
                                                 files.folder.c_str(),
                                                 RENAME_EXCHANGE));
  return exchanged == 0 ? absl::OkStatus() : ErrnoStatus(errno, files.folder);
}

// Two authorities of a cluster have names of their own: a verifier looks its trusted ones up by
// name.
absl::StatusOr<Authority> NewAuthority(const std::string& cluster, int64_t now_ms) {
  return MakeAuthority(absl::StrCat("Ravel cluster ", cluster, " ", RandomHex(4)),
                       now_ms - kBackdateMs,
                       now_ms + kAuthorityMs);
}

absl::StatusOr<Authority> GivenAuthority(const std::string& folder, int64_t now_ms) {
  Authority given;
  absl::StatusOr<std::string> certificate = ReadWholeFile(folder + "/tls.crt", kMaxFileBytes);
  RETURN_IF_ERROR(Annotate(certificate.status(), "--authority"));
  absl::StatusOr<std::string> key = ReadWholeFile(folder + "/tls.key", kMaxFileBytes);
  RETURN_IF_ERROR(Annotate(key.status(), "--authority"));
  const std::vector<std::string> all = SplitCertificates(*certificate);
  if (all.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--authority ", folder, "/tls.crt: expected one certificate"));
  }
  given.certificate = all.front();
  given.key = *std::move(key);
  RETURN_IF_ERROR(Annotate(CheckAuthority(given, now_ms), absl::StrCat("--authority ", folder)));
  return given;
}

// The name becomes the first part of a host name in URIs.
absl::Status CheckClusterName(const std::string& name) {
  const bool good = name.size() <= 63 && absl::ascii_isalnum(static_cast<unsigned char>(name[0])) &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_islower(static_cast<unsigned char>(c)) ||
                             absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-';
                    });
  return good ? absl::OkStatus()
              : absl::InvalidArgumentError(
                    "--cluster: expected 1 to 63 lower-case letters, digits and '-'");
}

absl::Status WriteServerCertificate(const AuthorityFiles& files,
                                    const std::string& key,
                                    const std::vector<std::string>& names,
                                    int64_t now_ms) {
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(key));
  ASSIGN_OR_RETURN(const std::string certificate,
                   IssueCertificate(files.server_signer,
                                    request,
                                    {.uri = CoordinatorUri(files.cluster),
                                     .serial = "\x01" + RandomBytes(15),
                                     .names = names,
                                     .use = CertificateUse::kServer,
                                     .not_before_ms = now_ms - kBackdateMs,
                                     .not_after_ms = now_ms + kServerMs}));
  // The authority's certificate goes along: who has only its fingerprint finds it there.
  return WriteFileAtomically(
      files.ServerPath(), certificate + files.server_signer.certificate, FileAccess::kOwner);
}

// Folders of authorities that were never published.
void RemoveParts(const std::string& state_dir) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(state_dir, error)) {
    if (absl::StartsWith(entry.path().filename().string(), absl::StrCat("tls", kPart))) {
      std::filesystem::remove_all(entry.path(), error);
    }
  }
}

absl::Status CheckUnmade(const std::string& place) {
  return std::filesystem::exists(place)
             ? absl::AlreadyExistsError(absl::StrCat(
                   place, ": this state has an authority already; it was left as it is"))
             : absl::OkStatus();
}

// Two that work at once would remove each other's folder and mix their administrators. The lock is
// on the directory itself, and ends with its process.
absl::StatusOr<std::shared_ptr<void>> TakeTurn(const std::string& state_dir) {
  const int fd = open(state_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return ErrnoStatus(errno, absl::StrCat("--state-dir ", state_dir));
  }
  const std::shared_ptr<void> turn(nullptr, [fd](void*) { close(fd); });
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return errno == EWOULDBLOCK
               ? absl::AbortedError(
                     absl::StrCat("--state-dir ", state_dir, ": another `init` is at work there"))
               : ErrnoStatus(errno, absl::StrCat("--state-dir ", state_dir));
  }
  return turn;
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
                                                  const AuthoritySource& source,
                                                  int64_t now_ms) {
  if (names.empty() || names.size() > kMaxNames) {
    return absl::InvalidArgumentError("--name: expected 1 to 32 host names or addresses");
  }
  for (const std::string& name : names) {
    RETURN_IF_ERROR(CheckServerName(name));
  }
  AuthorityFiles files;
  const std::string place = state_dir + "/tls";
  RETURN_IF_ERROR(CheckUnmade(place));
  if (!source.cluster.empty()) {
    RETURN_IF_ERROR(CheckClusterName(source.cluster));
  }
  files.cluster = source.cluster.empty() ? RandomHex(6) : source.cluster;
  ASSIGN_OR_RETURN(files.authority,
                   source.folder.empty() ? NewAuthority(files.cluster, now_ms)
                                         : GivenAuthority(source.folder, now_ms));
  files.server_signer = files.authority;
  files.trusted = files.authority.certificate;
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(files.authority.certificate));
  files.fingerprint = facts.fingerprint;
  files.folder = absl::StrCat(place, kPart, RandomHex(4));
  std::error_code error;
  std::filesystem::create_directories(state_dir, error);
  if (!error) {
    ASSIGN_OR_RETURN(files.turn, TakeTurn(state_dir));
    RETURN_IF_ERROR(CheckUnmade(place));  // one may have ended since
    RemoveParts(state_dir);
  }
  if (error || mkdir(files.folder.c_str(), 0700) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "--state-dir ", state_dir, ": ", error ? error.message() : "the folder cannot be made"));
  }
  const std::string server_key = MakePrivateKey();
  RETURN_IF_ERROR(
      WriteFileAtomically(files.folder + "/cluster", files.cluster + "\n", FileAccess::kOwner));
  RETURN_IF_ERROR(
      WriteFileAtomically(files.CaPath(), files.authority.certificate, FileAccess::kOwner));
  RETURN_IF_ERROR(WriteFileAtomically(files.CaKeyPath(), files.authority.key, FileAccess::kOwner));
  RETURN_IF_ERROR(WriteFileAtomically(files.ServerKeyPath(), server_key, FileAccess::kOwner));
  RETURN_IF_ERROR(WriteServerCertificate(files, server_key, names, now_ms));
  return files;
}

absl::Status PublishAuthorityFiles(const AuthorityFiles& files, const std::string& state_dir) {
  std::error_code error;
  std::filesystem::rename(files.folder, state_dir + "/tls", error);
  return error ? absl::UnavailableError(absl::StrCat(state_dir, "/tls: ", error.message()))
               : absl::OkStatus();
}

absl::StatusOr<AuthorityFiles> LoadAuthorityFiles(const std::string& state_dir) {
  AuthorityFiles files;
  files.folder = state_dir + "/tls";
  ASSIGN_OR_RETURN(files.trusted, ReadWholeFile(files.CaPath(), kMaxFileBytes));
  const std::vector<std::string> trusted = SplitCertificates(files.trusted);
  if (trusted.empty()) {
    return absl::InvalidArgumentError(files.CaPath() + ": no certificate in it");
  }
  files.authority.certificate = trusted.front();
  ASSIGN_OR_RETURN(files.authority.key, ReadWholeFile(files.CaKeyPath(), kMaxFileBytes));
  ASSIGN_OR_RETURN(files.cluster, ReadWholeFile(files.folder + "/cluster", kMaxFileBytes));
  absl::StripAsciiWhitespace(&files.cluster);
  RETURN_IF_ERROR(
      Annotate(CheckKeyPair(files.authority.certificate, files.authority.key), files.CaPath()));
  files.server_signer = files.authority;
  absl::StatusOr<std::string> old = ReadWholeFile(files.OldCaPath(), kMaxFileBytes);
  if (old.ok()) {
    files.rotating = true;
    files.server_signer.certificate = *std::move(old);
    ASSIGN_OR_RETURN(files.server_signer.key, ReadWholeFile(files.OldCaKeyPath(), kMaxFileBytes));
    RETURN_IF_ERROR(Annotate(CheckKeyPair(files.server_signer.certificate, files.server_signer.key),
                             files.OldCaPath()));
  } else if (!absl::IsNotFound(old.status())) {
    return old.status();
  }
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(files.server_signer.certificate));
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

absl::Status BeginRotation(const std::string& state_dir, int64_t now_ms) {
  ASSIGN_OR_RETURN(const AuthorityFiles files, LoadAuthorityFiles(state_dir));
  if (files.rotating) {
    return absl::FailedPreconditionError(
        absl::StrCat(files.folder, ": a rotation is under way; finish it first"));
  }
  ASSIGN_OR_RETURN(const Authority next, NewAuthority(files.cluster, now_ms));
  return ReplaceFolder(files, [&](const AuthorityFiles& part) -> absl::Status {
    const Authority& old = files.authority;
    RETURN_IF_ERROR(WriteFileAtomically(part.OldCaPath(), old.certificate, FileAccess::kOwner));
    RETURN_IF_ERROR(WriteFileAtomically(part.OldCaKeyPath(), old.key, FileAccess::kOwner));
    RETURN_IF_ERROR(
        WriteFileAtomically(part.CaPath(), next.certificate + old.certificate, FileAccess::kOwner));
    return WriteFileAtomically(part.CaKeyPath(), next.key, FileAccess::kOwner);
  });
}

absl::Status FinishRotation(const std::string& state_dir, int64_t now_ms, bool force) {
  ASSIGN_OR_RETURN(AuthorityFiles files, LoadAuthorityFiles(state_dir));
  if (!files.rotating) {
    return absl::FailedPreconditionError(absl::StrCat(files.folder, ": no rotation is under way"));
  }
  ASSIGN_OR_RETURN(const CertificateFacts next, ReadCertificate(files.authority.certificate));
  const int64_t safe_ms = next.not_before_ms + kBackdateMs + kLongestMs;
  if (now_ms < safe_ms && !force) {
    return absl::FailedPreconditionError(absl::StrCat(
        files.folder,
        ": certificates of users that the old authority signed may be in use until ",
        FormatTime(safe_ms),
        "; with --force they end now, and whoever has not renewed since must enrol again"));
  }
  ASSIGN_OR_RETURN(const std::string server, ReadWholeFile(files.ServerPath(), kMaxFileBytes));
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(server));
  ASSIGN_OR_RETURN(const std::string key, ReadWholeFile(files.ServerKeyPath(), kMaxFileBytes));
  files.server_signer = files.authority;
  return ReplaceFolder(files, [&](const AuthorityFiles& part) -> absl::Status {
    RETURN_IF_ERROR(
        WriteFileAtomically(part.CaPath(), files.authority.certificate, FileAccess::kOwner));
    RETURN_IF_ERROR(WriteServerCertificate(part, key, facts.names, now_ms));
    std::error_code error;
    std::filesystem::remove(part.OldCaPath(), error);
    std::filesystem::remove(part.OldCaKeyPath(), error);
    return error ? absl::UnavailableError(absl::StrCat(part.folder, ": ", error.message()))
                 : absl::OkStatus();
  });
}

}  // namespace ravel::coordinator
