// One io_context on one thread. A connection is a chain of handlers that hold it alive: read the
// header, ask the page, send, close. A timer bounds each link of the chain. Pages answer from other
// threads: their answer is posted to the server's thread, and reaches a connection only while that
// still waits for it. Nothing of a request but its method and path is looked at, and its body is
// never read into memory.

#include "common/http/http_server.h"

#include <array>
#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <pthread.h>

#include "common/file_writer.h"
#include "common/http/page_access.h"
#include "common/net_address.h"

namespace ravel::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr milliseconds kAcceptPause{100};     // after a failed accept: no descriptor is free
constexpr milliseconds kCloseLimit{1000};     // for the client to close after it was answered
constexpr size_t kMostAfterAnswer = 1 << 20;  // bytes of a body that nobody asked for

using TlsStream = asio::ssl::stream<tcp::socket>;

constexpr int64_t kMaxPemBytes = 256 << 10;

// The certificate that new connections get. One thread's.
class Tls {
 public:
  explicit Tls(ServerSecurity security) : security_(std::move(security)) {}

  // Reads the files if they have changed. After an error the certificate of before is shown on:
  // while it is replaced, it is for a moment that of another key.
  absl::Status Renew() {
    const auto times = std::pair(TimeOf(security_.certificate_file), TimeOf(security_.key_file));
    if (context_ != nullptr && times == times_) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::string certificate,
                     ReadWholeFile(security_.certificate_file, kMaxPemBytes));
    ASSIGN_OR_RETURN(const std::string key, ReadWholeFile(security_.key_file, kMaxPemBytes));
    auto context = std::make_shared<asio::ssl::context>(asio::ssl::context::tls_server);
    error_code error;
    context->set_options(asio::ssl::context::no_sslv3 | asio::ssl::context::no_tlsv1 |
                             asio::ssl::context::no_tlsv1_1,
                         error);
    if (!error) {
      context->use_certificate_chain(asio::buffer(certificate), error);
    }
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrCat(security_.certificate_file, ": ", error.message()));
    }
    context->use_private_key(asio::buffer(key), asio::ssl::context::pem, error);
    if (error) {
      return absl::InvalidArgumentError(absl::StrCat(
          security_.key_file, ": ", error.message(), "; is it that of the certificate?"));
    }
    context_ = std::move(context);
    times_ = times;
    return absl::OkStatus();
  }
  // Null before the first Renew that succeeded.
  const std::shared_ptr<asio::ssl::context>& context() const { return context_; }

 private:
  static std::filesystem::file_time_type TimeOf(const std::string& path) {
    std::error_code error;
    return std::filesystem::last_write_time(path, error);
  }

  const ServerSecurity security_;
  std::shared_ptr<asio::ssl::context> context_;
  std::pair<std::filesystem::file_time_type, std::filesystem::file_time_type> times_;
};

// The server's own, and for a moment a page's that answers while the server ends.
struct Shared {
  ServerOptions options;
  std::atomic<int64_t> connections = 0;
  std::atomic<int64_t> answered = 0;
  std::atomic<int64_t> refused = 0;
  asio::io_context context{1};  // goes first, and with it the handlers that hold connections
};

// Stream: tcp::socket or TlsStream.
template <typename Stream>
class Connection : public std::enable_shared_from_this<Connection<Stream>> {
 public:
  // `tls`: outlives the stream; null for plaintext.
  Connection(Stream stream,
             std::shared_ptr<asio::ssl::context> tls,
             const std::shared_ptr<Shared>& shared)
      : shared_(shared.get()),
        weak_shared_(shared),
        tls_(std::move(tls)),
        socket_(std::move(stream)),
        timer_(shared_->context),
        buffer_(shared_->options.max_header_bytes) {
    ++shared_->connections;
    parser_.header_limit(static_cast<std::uint32_t>(shared_->options.max_header_bytes));
  }
  ~Connection() { --shared_->connections; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Run() {
    CloseAfter(shared_->options.request_limit);
    if constexpr (std::is_same_v<Stream, TlsStream>) {
      socket_.async_handshake(asio::ssl::stream_base::server,
                              [self = this->shared_from_this()](error_code error) {
                                error ? self->Close() : self->ReadHeader();
                              });
    } else {
      ReadHeader();
    }
  }

 private:
  void ReadHeader() {
    beast::http::async_read_header(
        socket_, buffer_, parser_, [self = this->shared_from_this()](error_code error, size_t) {
          self->OnHeader(error);
        });
  }
  // Bounds what comes next: the socket is closed, and its handlers see an error.
  void CloseAfter(milliseconds limit) {
    timer_.expires_after(limit);
    timer_.async_wait([self = this->shared_from_this()](error_code error) {
      if (!error) {
        self->Close();
      }
    });
  }
  void Close() {
    error_code ignored;
    socket_.lowest_layer().close(ignored);
    timer_.cancel();
  }

  void OnHeader(error_code error) {
    namespace http = beast::http;
    if (error == http::error::header_limit || error == http::error::buffer_overflow) {
      Send({431, "the request's header is too long\n"});
    } else if (error &&
               error.category() == http::make_error_code(http::error::bad_method).category() &&
               error != http::error::end_of_stream && error != http::error::partial_message) {
      Send({400, "this is no HTTP/1.1 request\n"});
    } else if (error) {
      Close();  // gone, or too slow
    } else {
      Ask();
    }
  }

  void Ask() {
    const auto& request = parser_.get();
    head_ = request.method() == beast::http::verb::head;
    if (!head_ && request.method() != beast::http::verb::get) {
      Send({405, "only GET and HEAD: nothing is changed over HTTP\n"});
      return;
    }
    const std::string target(request.target());
    const auto page = shared_->options.pages.find(target);
    if (page == shared_->options.pages.end()) {
      std::string known;
      for (const auto& [path, unused] : shared_->options.pages) {
        absl::StrAppend(&known, " ", path);
      }
      Send({404, absl::StrCat("no such page; there are:", known, "\n")});
      return;
    }
    if (shared_->options.security && target != "/livez" && target != "/readyz") {
      const auto shown = request[beast::http::field::authorization];
      const absl::Status allowed = CheckToken(std::string_view(shown.data(), shown.size()),
                                              shared_->options.security->token_file);
      if (!allowed.ok()) {
        Send({absl::IsUnavailable(allowed) ? 503 : 401, absl::StrCat(allowed.message(), "\n")});
        return;
      }
    }
    timer_.expires_after(shared_->options.page_limit);
    timer_.async_wait([self = this->shared_from_this()](error_code stopped) {
      if (!stopped) {
        self->Send({503, "no answer in time\n"});
      }
    });
    // Weak on both: an answer may come when connection and server are gone.
    page->second([weak = this->weak_from_this(), weak_shared = weak_shared_](Answer answer) {
      if (const std::shared_ptr<Shared> server = weak_shared.lock()) {
        asio::post(server->context, [weak, answer = std::move(answer)]() mutable {
          if (const std::shared_ptr<Connection> self = weak.lock()) {
            self->Send(std::move(answer));
          }
        });
      }
    });
  }

  void Send(Answer answer) {
    if (sending_ || !socket_.lowest_layer().is_open()) {
      return;
    }
    sending_ = true;
    if (answer.make_body) {
      answer.body = answer.make_body();
    }
    ++shared_->answered;
    response_.version(11);
    response_.keep_alive(false);
    response_.result(static_cast<unsigned>(answer.status));
    response_.set(beast::http::field::content_type, answer.content_type);
    response_.set(beast::http::field::cache_control, "no-store");
    response_.set("X-Content-Type-Options", "nosniff");
    if (answer.status == 401) {
      response_.set(beast::http::field::www_authenticate, "Bearer");
    }
    if (answer.status == 405) {
      response_.set(beast::http::field::allow, "GET, HEAD");
    }
    response_.content_length(answer.body.size());
    if (!head_) {
      response_.body() = std::move(answer.body);
    }
    CloseAfter(shared_->options.send_limit);
    serializer_.emplace(response_);
    const auto sent = [self = this->shared_from_this()](error_code error, size_t) {
      self->OnSent(error);
    };
    if (head_) {
      beast::http::async_write_header(socket_, *serializer_, sent);
    } else {
      beast::http::async_write(socket_, *serializer_, sent);
    }
  }

  // A socket that is closed with unread bytes resets the connection, and the answer may be lost:
  // the client closes first, within a limit.
  void OnSent(error_code error) {
    if (error) {
      Close();
      return;
    }
    CloseAfter(kCloseLimit);
    if constexpr (std::is_same_v<Stream, TlsStream>) {
      // Sends the end of the stream, then waits for that of the client.
      socket_.async_shutdown(
          [self = this->shared_from_this()](error_code /*ended*/) { self->Close(); });
    } else {
      socket_.shutdown(tcp::socket::shutdown_send, error);
      Discard();
    }
  }
  void Discard() {
    socket_.async_read_some(asio::buffer(discarded_),
                            [self = this->shared_from_this()](error_code error, size_t bytes) {
                              self->discarded_bytes_ += bytes;
                              if (error || self->discarded_bytes_ > kMostAfterAnswer) {
                                self->Close();
                              } else {
                                self->Discard();
                              }
                            });
  }

  Shared* const shared_;  // holds the io_context, and with it this connection
  const std::weak_ptr<Shared> weak_shared_;
  const std::shared_ptr<asio::ssl::context> tls_;
  Stream socket_;
  asio::steady_timer timer_;
  beast::flat_buffer buffer_;
  beast::http::request_parser<beast::http::empty_body> parser_;
  beast::http::response<beast::http::string_body> response_;
  std::optional<beast::http::response_serializer<beast::http::string_body>> serializer_;
  bool head_ = false;
  bool sending_ = false;
  std::array<char, 4096> discarded_;
  size_t discarded_bytes_ = 0;
};

class BeastServer : public Server {
 public:
  explicit BeastServer(ServerOptions options)
      : shared_(std::make_shared<Shared>()), acceptor_(shared_->context), pause_(shared_->context) {
    shared_->options = std::move(options);
    if (shared_->options.security) {
      tls_.emplace(*shared_->options.security);
    }
  }
  ~BeastServer() override {
    shared_->context.stop();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  absl::Status Listen() {
    if (tls_) {
      RETURN_IF_ERROR(tls_->Renew());
    }
    const std::string& listen = shared_->options.listen;
    ASSIGN_OR_RETURN(const HostPort place, ParseHostPort(listen));
    error_code error;
    const asio::ip::address address =
        asio::ip::make_address(place.host == "localhost" ? "127.0.0.1" : place.host, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrCat(listen, ": expected an IPv4 or IPv6 address or localhost"));
    }
    const tcp::endpoint endpoint(address, static_cast<unsigned short>(place.port));
    acceptor_.open(endpoint.protocol(), error);
    if (!error) {
      acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    }
    if (!error) {
      acceptor_.bind(endpoint, error);
    }
    if (!error) {
      acceptor_.listen(asio::socket_base::max_listen_connections, error);
    }
    if (error) {
      return absl::UnavailableError(absl::StrCat(listen, ": ", error.message()));
    }
    port_ = acceptor_.local_endpoint(error).port();
    Accept();
    thread_ = std::thread([this] { shared_->context.run(); });
    pthread_setname_np(thread_.native_handle(), "http");
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  ServerCounts counts() const override {
    return {.answered = shared_->answered, .refused_connections = shared_->refused};
  }

 private:
  void Accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (error) {
        pause_.expires_after(kAcceptPause);
        pause_.async_wait([this](error_code stopped) {
          if (!stopped) {
            Accept();
          }
        });
        return;
      }
      if (shared_->connections >= shared_->options.max_connections) {
        ++shared_->refused;  // the socket closes as it goes
      } else {
        Serve(std::move(socket));
      }
      Accept();
    });
  }

  void Serve(tcp::socket socket) {
    if (!tls_) {
      std::make_shared<Connection<tcp::socket>>(std::move(socket), nullptr, shared_)->Run();
      return;
    }
    tls_->Renew().IgnoreError();
    const std::shared_ptr<asio::ssl::context> context = tls_->context();
    std::make_shared<Connection<TlsStream>>(
        TlsStream(std::move(socket), *context), context, shared_)
        ->Run();
  }

  std::optional<Tls> tls_;                // of the thread, once that runs
  const std::shared_ptr<Shared> shared_;  // goes last: the others use its io_context
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  std::thread thread_;
  int port_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  auto server = std::make_unique<BeastServer>(std::move(options));
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace ravel::http
