#include "common/http/page_access.h"

#include <algorithm>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/net_address.h"

namespace ravel::http {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr size_t kLeastTokenBytes = 16;
constexpr std::string_view kScheme = "Bearer ";

absl::StatusOr<std::vector<std::string>> TokensOf(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxFileBytes));
  std::vector<std::string> tokens;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::string token(absl::StripAsciiWhitespace(line));
    if (token.empty()) {
      continue;
    }
    if (token.size() < kLeastTokenBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": expected tokens of ", kLeastTokenBytes, " bytes at least"));
    }
    tokens.push_back(token);
  }
  if (tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected a token on a line"));
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::optional<ServerSecurity>> SecurityOf(const PageFlags& flags) {
  const absl::StatusOr<HostPort> place = ParseHostPort(flags.listen);
  RETURN_IF_ERROR(Annotate(place.status(), absl::StrCat("--http-listen ", flags.listen)));
  if (flags.token_file.empty()) {
    if (!IsLoopbackHost(place->host)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--http-listen ",
                       flags.listen,
                       ": beyond this host the pages are served over TLS to who shows a token: "
                       "expected --http-token-file, or 127.0.0.1, [::1] or localhost"));
    }
    return std::optional<ServerSecurity>();
  }
  if (flags.certificate_file.empty() || flags.key_file.empty()) {
    return absl::InvalidArgumentError(
        "--http-token-file: pages with a token are served over TLS, and there is no certificate: "
        "expected --http-certificate and --http-key");
  }
  RETURN_IF_ERROR(Annotate(TokensOf(flags.token_file).status(), "--http-token-file"));
  return std::optional<ServerSecurity>({.certificate_file = flags.certificate_file,
                                        .key_file = flags.key_file,
                                        .token_file = flags.token_file});
}

absl::Status CheckToken(std::string_view authorization, const std::string& token_file) {
  const absl::StatusOr<std::vector<std::string>> tokens = TokensOf(token_file);
  if (!tokens.ok()) {
    return absl::UnavailableError("the tokens of this server cannot be read");
  }
  if (!authorization.starts_with(kScheme)) {
    return absl::PermissionDeniedError("expected Authorization: Bearer TOKEN");
  }
  // Hashes are compared, so that the time it takes tells nothing of a token.
  const Sha256Digest shown = Sha256(authorization.substr(kScheme.size()));
  const bool known = std::any_of(tokens->begin(), tokens->end(), [&](const std::string& token) {
    return Sha256(token) == shown;
  });
  return known ? absl::OkStatus() : absl::PermissionDeniedError("the token is not known");
}

}  // namespace ravel::http
