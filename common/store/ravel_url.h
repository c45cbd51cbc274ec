#pragma once

// URLs of folders in ravel-store. Pure.

#include <string>
#include <string_view>

#include "common/net_address.h"
#include "common/status.h"

namespace ravel::store {

inline constexpr std::string_view kRavelScheme = "ravel://";

struct RavelUrl {
  HostPort host;
  std::string target;  // HOST:PORT
  std::string path;    // in the store, without slashes around it
};
// From "ravel://HOST:PORT" or "ravel://HOST:PORT/PATH". InvalidArgument says what is wrong with it.
absl::StatusOr<RavelUrl> ParseRavelUrl(std::string_view url);

}  // namespace ravel::store
