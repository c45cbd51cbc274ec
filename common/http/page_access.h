#pragma once

// Access to pages: this host reads them in plaintext, others over TLS with a token.

#include <optional>
#include <string>
#include <string_view>

#include "common/http/http_server.h"
#include "common/status.h"

namespace ravel::http {

// The flags of a program; `certificate_file` and `key_file` are empty where it has none.
struct PageFlags {
  std::string listen;      // HOST:PORT
  std::string token_file;  // empty: none
  std::string certificate_file = {};
  std::string key_file = {};
};
// With a token file the pages are served over TLS. InvalidArgument names the flag: an address
// beyond this host without a token file, a token file without a certificate.
absl::StatusOr<std::optional<ServerSecurity>> SecurityOf(const PageFlags& flags);

// OK if a request's `Authorization` shows a token of the file; PermissionDenied else, Unavailable
// when the file cannot be read or holds none.
absl::Status CheckToken(std::string_view authorization, const std::string& token_file);

}  // namespace ravel::http
