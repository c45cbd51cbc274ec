#pragma once

// Addresses as people write them, taken apart rather than compared by their beginnings.

#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel {

struct HostPort {
  std::string host;  // without the brackets of an IPv6 address
  int port = 0;
};

// "HOST:PORT" or "[IPV6]:PORT", port 0 to 65535; InvalidArgument says what was expected and got.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);

// Returns true if a host can only be this machine: `localhost`, an IPv4 address of 127.0.0.0/8 in
// four parts, or the IPv6 address ::1, with or without brackets. Any other name gives false:
// resolving it may give any address.
bool IsLoopbackHost(std::string_view host);

// Checks an address at which other hosts are to reach this one: a host name or an address, no port,
// and none of the addresses that mean all or nobody (0.0.0.0, ::). `flag` names it in the message.
absl::Status CheckReachableHost(std::string_view flag, std::string_view host);

// This host's own address on the way to another one, as the routing table has it. Resolves the
// name; sends nothing.
absl::StatusOr<std::string> LocalAddressTowards(const HostPort& peer);

// InvalidArgument unless `text` is HOST:PORT of this machine alone: what listens there is
// plaintext.
absl::Status CheckLoopbackListener(std::string_view text);

}  // namespace ravel
