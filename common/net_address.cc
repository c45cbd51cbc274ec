#include "common/net_address.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ravel {
namespace {

std::string_view WithoutBrackets(std::string_view host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

}  // namespace

absl::StatusOr<PortRange> ParsePortRange(std::string_view text) {
  const size_t dash = text.find('-');
  PortRange range;
  const auto number = [](std::string_view part, int* value) {
    return absl::SimpleAtoi(absl::string_view(part.data(), part.size()), value);
  };
  if (dash != std::string_view::npos && number(text.substr(0, dash), &range.first) &&
      number(text.substr(dash + 1), &range.last) && range.first >= 1024 &&
      range.first <= range.last && range.last <= 65535) {
    return range;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected FIRST-LAST, two ports from 1024 to 65535, got '",
                   absl::string_view(text.data(), std::min<size_t>(text.size(), 256)),
                   "'"));
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const size_t colon = text.rfind(':');
  HostPort out;
  const bool has_port =
      colon != std::string_view::npos &&
      absl::SimpleAtoi(absl::string_view(text.data() + colon + 1, text.size() - colon - 1),
                       &out.port) &&
      out.port >= 0 && out.port <= 65535;
  if (has_port) {
    const std::string_view host = text.substr(0, colon);
    out.host = std::string(WithoutBrackets(host));
    const bool bracketed = out.host.size() != host.size();
    if (!out.host.empty() && out.host != "[]" &&
        bracketed == (out.host.find(':') != std::string::npos)) {
      return out;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected HOST:PORT or [IPV6]:PORT with a port from 0 to 65535, got '",
                   absl::string_view(text.data(), std::min<size_t>(text.size(), 256)),
                   "'"));
}

bool IsLoopbackHost(std::string_view host) {
  const std::string text(WithoutBrackets(host));
  if (text == "localhost") {
    return true;
  }
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) {
    return (ntohl(v4.s_addr) >> 24) == 127;
  }
  in6_addr v6{};
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::Status CheckReachableHost(std::string_view flag, std::string_view host) {
  const std::string text(WithoutBrackets(host));
  in_addr v4{};
  in6_addr v6{};
  const bool is_v4 = inet_pton(AF_INET, text.c_str(), &v4) == 1;
  const bool is_v6 = inet_pton(AF_INET6, text.c_str(), &v6) == 1;
  const bool any = (is_v4 && v4.s_addr == 0) || (is_v6 && IN6_IS_ADDR_UNSPECIFIED(&v6));
  const bool name =
      !text.empty() && text.size() <= 253 && text.front() != '-' && text.front() != '.' &&
      std::all_of(text.begin(), text.end(), [](char c) {
        return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-';
      });
  if (!any && (is_v4 || is_v6 || name)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(flag),
                   ": expected a host name or an address of this host, without a port, got '",
                   text.substr(0, 256),
                   "'"));
}

absl::StatusOr<std::string> LocalAddressTowards(const HostPort& peer) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int resolved =
      getaddrinfo(peer.host.c_str(), std::to_string(peer.port).c_str(), &hints, &found);
  if (resolved != 0) {
    return absl::UnavailableError(absl::StrCat(peer.host, ": ", gai_strerror(resolved)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const int file = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (file < 0) {
      continue;
    }
    sockaddr_storage own = {};
    socklen_t size = sizeof own;
    auto* const address = reinterpret_cast<sockaddr*>(&own);
    char text[NI_MAXHOST] = {};
    const bool known =
        connect(file, each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(file, address, &size) == 0 &&
        getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0;
    close(file);
    if (known) {
      return std::string(text);
    }
  }
  return absl::UnavailableError(absl::StrCat(peer.host, ": there is no route to it"));
}

absl::StatusOr<std::string> AddressOfInterface(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    return ErrnoStatus(errno, "getifaddrs");
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(found, freeifaddrs);
  std::set<std::string> names;
  std::string v4;
  std::string v6;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    names.insert(each->ifa_name);
    if (each->ifa_name != name || each->ifa_addr == nullptr) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = {};
    if (each->ifa_addr->sa_family == AF_INET && v4.empty()) {
      const auto* const address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
      v4 = inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
    } else if (each->ifa_addr->sa_family == AF_INET6 && v6.empty()) {
      const auto* const address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) {
        v6 = inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
      }
    }
  }
  if (!v4.empty() || !v6.empty()) {
    return v4.empty() ? v6 : v4;
  }
  return absl::InvalidArgumentError(absl::StrCat(names.contains(name)
                                                     ? "this interface has no address: '"
                                                     : "this host has no such interface: '",
                                                 name.substr(0, 64),
                                                 "'; there are ",
                                                 absl::StrJoin(names, ", ")));
}

absl::Status CheckLoopbackListener(std::string_view text) {
  const absl::string_view shown(text.data(), text.size());
  const absl::StatusOr<HostPort> place = ParseHostPort(text);
  if (!place.ok()) {
    return Annotate(place.status(), std::string(text));
  }
  return IsLoopbackHost(place->host)
             ? absl::OkStatus()
             : absl::InvalidArgumentError(
                   absl::StrCat(shown,
                                ": plaintext without certificates: expected 127.0.0.1, [::1] or "
                                "localhost"));
}

}  // namespace ravel
