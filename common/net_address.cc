#include "common/net_address.h"

#include <algorithm>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <arpa/inet.h>
#include <netinet/in.h>

namespace ravel {
namespace {

std::string_view WithoutBrackets(std::string_view host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

}  // namespace

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

}  // namespace ravel
