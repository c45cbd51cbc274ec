#include "common/store/ravel_url.h"

#include <algorithm>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace ravel::store {

absl::StatusOr<RavelUrl> ParseRavelUrl(std::string_view url) {
  const auto refuse = [url](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("store \"", std::string(url), "\": expected ravel://HOST:PORT/PATH: ", what));
  };
  if (!url.starts_with(kRavelScheme)) {
    return refuse("another scheme");
  }
  std::string_view rest = url.substr(kRavelScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  RavelUrl parsed;
  parsed.target = std::string(rest.substr(0, slash));
  const absl::StatusOr<HostPort> host = ParseHostPort(parsed.target);
  if (!host.ok() || host->port == 0) {
    return refuse(host.ok() ? "a port from 1 to 65535" : std::string(host.status().message()));
  }
  parsed.host = *host;
  rest.remove_prefix(slash);
  while (rest.starts_with('/')) {
    rest.remove_prefix(1);
  }
  while (rest.ends_with('/')) {
    rest.remove_suffix(1);
  }
  const std::string around = absl::StrCat("/", std::string(rest), "/");
  if (absl::StrContains(around, "//")
          ? !rest.empty()
          : absl::StrContains(around, "/../") || absl::StrContains(around, "/./")) {
    return refuse("a path without empty parts, '.' and '..'");
  }
  parsed.path = std::string(rest);
  return parsed;
}

}  // namespace ravel::store
