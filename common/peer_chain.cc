#include "common/peer_chain.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/certificate.h"
#include "common/net_address.h"

namespace ravel {
namespace {

using Clock = std::chrono::steady_clock;

// The first byte of records of TLS.
constexpr unsigned char kAlertRecord = 0x15;
constexpr unsigned char kHandshakeRecord = 0x16;

// HTTP/2, as gRPC servers demand.
constexpr unsigned char kProtocols[] = {2, 'h', '2'};

class Socket {
 public:
  explicit Socket(int file) : file_(file) {}
  ~Socket() {
    if (file_ >= 0) {
      close(file_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int file() const { return file_; }

 private:
  int file_;
};

// Waits for an event of the socket; false when the deadline passed.
bool Await(int file, short events, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd waited = {file, events, 0};
  return left > 0 && poll(&waited, 1, static_cast<int>(left)) == 1;
}

absl::StatusOr<std::unique_ptr<Socket>> Connect(const HostPort& address,
                                                Clock::time_point deadline) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int resolved =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (resolved != 0) {
    return absl::UnavailableError(absl::StrCat(address.host, ": ", gai_strerror(resolved)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, freeaddrinfo);
  int problem = 0;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    auto socket_held = std::make_unique<Socket>(
        socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int file = socket_held->file();
    if (file < 0 || (connect(file, each->ai_addr, each->ai_addrlen) != 0 && errno != EINPROGRESS)) {
      problem = errno;
      continue;
    }
    socklen_t size = sizeof problem;
    if (!Await(file, POLLOUT, deadline)) {
      problem = ETIMEDOUT;
    } else if (getsockopt(file, SOL_SOCKET, SO_ERROR, &problem, &size) == 0 && problem == 0) {
      return socket_held;
    }
  }
  return absl::UnavailableError(ErrnoStatus(problem, "connect").message());
}

std::string Expected(const std::string& but) {
  return absl::StrCat("expected a ravel-coordinator there, but ", but);
}

using Connection = std::unique_ptr<SSL, decltype(&SSL_free)>;

// The first bytes of a server that was sent the first message of TLS.
ServerView ReadAnswer(int file) {
  unsigned char bytes[9] = {};
  const ssize_t got = recv(file, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno == ECONNRESET)) {
    return {Speech::kForeign, "it closes the connection at the first message of TLS"};
  }
  if (got < 0 || bytes[0] == kHandshakeRecord || bytes[0] == kAlertRecord) {
    return {};
  }
  if (got >= 5 && std::memcmp(bytes, "HTTP/", 5) == 0) {
    return {Speech::kForeign, "it speaks HTTP without TLS"};
  }
  // A frame of SETTINGS, of stream 0.
  const unsigned char settings[] = {4, 0, 0, 0, 0, 0};
  if (got == sizeof bytes && std::memcmp(bytes + 3, settings, sizeof settings) == 0) {
    return {Speech::kPlainGrpc, "it speaks HTTP/2 without TLS, as servers with --dev-loopback do"};
  }
  return {Speech::kForeign, "it does not speak TLS"};
}

// The handshake without any judgement of the peer: the caller compares what it shows. `view`: of a
// server that does not answer by TLS.
absl::Status Handshake(SSL* connection, int file, Clock::time_point deadline, ServerView* view) {
  bool answered = false;
  while (true) {
    ERR_clear_error();
    const int result = SSL_connect(connection);
    if (result == 1) {
      return absl::OkStatus();
    }
    const int wanted = SSL_get_error(connection, result);
    if (wanted != SSL_ERROR_WANT_READ && wanted != SSL_ERROR_WANT_WRITE) {
      return absl::UnavailableError("the server does not speak TLS, or refuses it");
    }
    if (!Await(file, wanted == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline)) {
      return absl::UnavailableError("the server does not answer");
    }
    if (wanted == SSL_ERROR_WANT_READ && !std::exchange(answered, true)) {
      *view = ReadAnswer(file);
      if (view->speech != Speech::kUnknown) {
        return absl::UnavailableError(Expected(view->text));
      }
      SSL_set_rfd(connection, file);
    }
  }
}

std::string PemOf(X509* certificate) {
  BIO* const bio = BIO_new(BIO_s_mem());
  PEM_write_bio_X509(bio, certificate);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string pem(data, static_cast<size_t>(size));
  BIO_free_all(bio);
  return pem;
}

// The server's certificates, its own first, and its protocol.
struct Greeting {
  std::vector<std::string> chain;
  bool http2 = false;
};

absl::StatusOr<Greeting> Greet(const std::string& address,
                               Clock::time_point deadline,
                               ServerView* view) {
  ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(address));
  ASSIGN_OR_RETURN(const std::unique_ptr<Socket> socket, Connect(parsed, deadline));
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // the fingerprint judges
  const Connection connection(SSL_new(context.get()), SSL_free);
  SSL_set_alpn_protos(connection.get(), kProtocols, sizeof kProtocols);
  // Reads nothing before Handshake has seen the first bytes: some servers speak first.
  SSL_set0_rbio(connection.get(), BIO_new(BIO_s_mem()));
  SSL_set_wfd(connection.get(), socket->file());
  RETURN_IF_ERROR(Handshake(connection.get(), socket->file(), deadline, view));
  Greeting greeting;
  const STACK_OF(X509)* chain = SSL_get_peer_cert_chain(connection.get());
  for (int i = 0; chain != nullptr && i < sk_X509_num(chain); ++i) {
    greeting.chain.push_back(PemOf(sk_X509_value(chain, i)));
  }
  const unsigned char* protocol = nullptr;
  unsigned int size = 0;
  SSL_get0_alpn_selected(connection.get(), &protocol, &size);
  greeting.http2 = size == 2 && std::memcmp(protocol, "h2", 2) == 0;
  return greeting;
}

// A server by its certificate and its protocol. Its own certificate is believed to be no
// coordinator's, never to be one's.
ServerView ViewOf(const Greeting& greeting) {
  const absl::StatusOr<CertificateFacts> own =
      ReadCertificate(greeting.chain.empty() ? "" : greeting.chain[0]);
  const std::string uri = own.ok() ? own->uri : "";
  if (absl::EndsWith(uri, ".ravel/store")) {
    return {Speech::kForeign, absl::StrCat("a ravel-store listens (its certificate: ", uri, ")")};
  }
  if (!greeting.http2) {
    return {Speech::kForeign,
            "it speaks TLS without HTTP/2, as the port of a program's pages (--http) does"};
  }
  return {Speech::kTls, ""};
}

}  // namespace

absl::StatusOr<std::string> FetchAuthority(const std::string& address,
                                           const std::string& fingerprint,
                                           std::chrono::milliseconds limit) {
  ServerView view;
  ASSIGN_OR_RETURN(const Greeting greeting, Greet(address, Clock::now() + limit, &view));
  view = ViewOf(greeting);
  if (view.speech != Speech::kTls) {
    return absl::FailedPreconditionError(Expected(view.text));
  }
  for (const std::string& pem : greeting.chain) {
    const absl::StatusOr<CertificateFacts> facts = ReadCertificate(pem);
    if (facts.ok() && facts->fingerprint == fingerprint) {
      return pem;
    }
  }
  return absl::PermissionDeniedError(
      "the server's authority is not the one of the token: it is another cluster, or somebody in "
      "between");
}

ServerView LookAtServer(const std::string& address, std::chrono::milliseconds limit) {
  ServerView view;
  const absl::StatusOr<Greeting> greeting = Greet(address, Clock::now() + limit, &view);
  return greeting.ok() ? ViewOf(*greeting) : view;
}

}  // namespace ravel
