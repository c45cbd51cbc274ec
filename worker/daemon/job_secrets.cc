#include "worker/daemon/job_secrets.h"

#include <algorithm>
#include <cerrno>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/job_environment.h"
#include "common/path_roots.h"
#include "common/signed_size.h"

namespace ravel::daemon {
namespace {

constexpr size_t kMaxNamespaceBytes = 63;

bool IsNamespace(const std::string& name) {
  const auto ok = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  return !name.empty() && name.size() <= kMaxNamespaceBytes && ok(name.front()) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return ok(c) || c == '-'; });
}

// The owner of a secret is this daemon's user or root. A group may read it, as Kubernetes has it
// with fsGroup; trainers of another user are never in that group.
absl::Status CheckOwner(const struct stat& facts) {
  if ((facts.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    return absl::PermissionDeniedError("expected mode 0600, 0400 or 0440");
  }
  return facts.st_uid == 0 || facts.st_uid == geteuid()
             ? absl::OkStatus()
             : absl::PermissionDeniedError("expected root or the daemon's user as its owner");
}

absl::StatusOr<std::string> ReadText(int fd) {
  struct stat facts = {};
  if (fstat(fd, &facts) != 0) {
    return ErrnoStatus(errno, "fstat");
  }
  RETURN_IF_ERROR(CheckOwner(facts));
  std::string text(Size(kMaxSecretBytes + 2), '\0');
  size_t length = 0;
  while (length < text.size()) {
    const ssize_t got = read(fd, text.data() + length, text.size() - length);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return ErrnoStatus(errno, "read");
    }
    if (got == 0) {
      break;
    }
    length += static_cast<size_t>(got);
  }
  text.resize(length);
  if (absl::EndsWith(text, "\n")) {
    text.pop_back();
  }
  if (text.empty() || static_cast<int64_t>(text.size()) > kMaxSecretBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a text of 1 to ", kMaxSecretBytes, " bytes"));
  }
  if (absl::StrContains(text, absl::string_view("\0", 1))) {
    return absl::InvalidArgumentError("expected a text without zero bytes");
  }
  return text;
}

}  // namespace

absl::Status CheckSecretsRoot(const std::string& root) {
  struct stat facts = {};
  if (!absl::StartsWith(root, "/") || stat(root.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(root, ": expected the absolute path of a folder"));
  }
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(root, ": expected a folder that only its owner can change"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSecret(const std::string& root,
                                       const std::string& namespace_name,
                                       const std::string& reference) {
  if (root.empty()) {
    return absl::FailedPreconditionError("this node has no secrets (--secrets-root)");
  }
  if (!IsNamespace(namespace_name)) {
    return absl::InvalidArgumentError("expected a DNS label as the job's namespace");
  }
  if (const std::string expected = ExpectedSecret(reference); !expected.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("expected ", expected));
  }
  const absl::StatusOr<int> file =
      OpenFileBeneath(absl::StrCat(root, "/", namespace_name), reference);
  const std::string what =
      absl::StrCat("secret ", reference, " of namespace ", namespace_name, " on this node");
  if (!file.ok()) {
    return Annotate(file.status(), what);
  }
  absl::StatusOr<std::string> text = ReadText(*file);
  close(*file);
  RETURN_IF_ERROR(Annotate(text.status(), what));
  return text;
}

}  // namespace ravel::daemon
