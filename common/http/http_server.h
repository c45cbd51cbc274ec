#pragma once

// A small server for probes and metrics: it answers GET and HEAD of a fixed set of pages and
// changes nothing. In plaintext, for addresses of this host, or over TLS to who shows a token.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common/status.h"

namespace ravel::http {

struct Answer {
  int status = 200;
  std::string body = {};
  std::string content_type = "text/plain; charset=utf-8";
  // Set: makes the body, on the server's thread: for text that takes a while to make.
  std::function<std::string()> make_body = {};
};

// Thread-safe. The first call answers the request; further ones, those after the limit and those
// after the server's end do nothing.
using Respond = std::function<void(Answer)>;
// Called on the server's thread for each request of its page; returns at once, and calls Respond
// then or later from any thread.
using Page = std::function<void(Respond)>;

// TLS 1.2 or newer. Files are read again when they change, so that certificates and tokens may be
// replaced at any time.
struct ServerSecurity {
  std::string certificate_file;  // PEM, with what is between it and its authority
  std::string key_file;          // PEM
  // Each line is a token of 16 bytes at least. All pages but /livez and /readyz, which probes ask
  // without one, need `Authorization: Bearer TOKEN`, else 401.
  std::string token_file;
};

struct ServerOptions {
  std::string listen;                 // HOST:PORT, HOST an address or localhost; port 0: a free one
  std::map<std::string, Page> pages;  // by path: "/livez"
  std::optional<ServerSecurity> security = {};  // none: plaintext, and no page asks for a token
  int64_t max_connections = 64;                 // one more is closed without an answer
  size_t max_header_bytes = 8192;               // a longer one is 431
  // From a connection's start to the end of its request's header, for a page to respond (then 503),
  // and for the client to take the answer.
  std::chrono::milliseconds request_limit{5000};
  std::chrono::milliseconds page_limit{2500};
  std::chrono::milliseconds send_limit{10000};
};

struct ServerCounts {
  int64_t answered = 0;
  int64_t refused_connections = 0;  // above max_connections
};

// One thread serves all connections, one request each. Thread-safe.
class Server {
 public:
  // InvalidArgument for an address that is none, and for files of `security` that hold no
  // certificate, key or token; Unavailable when the address is in use.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  virtual ~Server() = default;  // closes all connections
  virtual int port() const = 0;
  virtual ServerCounts counts() const = 0;
};

}  // namespace ravel::http
