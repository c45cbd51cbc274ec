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

// Both ends included; 0 and 0: any port.
struct PortRange {
  int first = 0;
  int last = 0;
};

// "FIRST-LAST", from 1024 to 65535; InvalidArgument says what was expected and got.
absl::StatusOr<PortRange> ParsePortRange(std::string_view text);

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

// The IPv4 address of one of this host's network interfaces, or its global IPv6 address where it
// has none. InvalidArgument names the interfaces that there are.
absl::StatusOr<std::string> AddressOfInterface(const std::string& name);

// InvalidArgument unless `text` is HOST:PORT of this machine alone: what listens there is
// plaintext.
absl::Status CheckLoopbackListener(std::string_view text);

}  // namespace ravel
