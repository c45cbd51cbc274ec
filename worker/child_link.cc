// Both ends of the socketpair between a daemon and a trainer. The trainer's end blocks, with a send
// time-out, because it is used by threads that have nothing else to do; the daemon's end is
// asynchronous, because one event loop serves many trainers and must never wait for a stuck one.
// Frames are bounded (64 MiB each, 128 MiB queued), and the first failure of a direction is final:
// after half a frame the stream cannot be understood any more.

#include "worker/child_link.h"

#include <array>
#include <cstring>
#include <deque>
#include <string_view>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <errno.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "common/signed_size.h"

namespace ravel {
namespace {

namespace asio = boost::asio;

constexpr int kSendTimeoutSeconds = 30;
constexpr size_t kMaxQueuedBytes = size_t{128} << 20;
constexpr size_t kPrefixBytes = 4;

absl::Status FrameTooLong(uint64_t bytes) {
  return absl::InvalidArgumentError(
      absl::StrCat("frame of ", bytes, " bytes, expected at most ", kMaxFrameBytes));
}

uint32_t ReadPrefix(const uint8_t* bytes) {
  return static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8 |
         static_cast<uint32_t>(bytes[2]) << 16 | static_cast<uint32_t>(bytes[3]) << 24;
}

// Length and message.
template <typename Frame>
absl::StatusOr<std::string> Encode(const Frame& frame) {
  const size_t bytes = frame.ByteSizeLong();
  if (bytes > kMaxFrameBytes) {
    return FrameTooLong(bytes);
  }
  std::string text;
  text.reserve(kPrefixBytes + bytes);
  for (size_t i = 0; i < kPrefixBytes; ++i) {
    text.push_back(static_cast<char>(bytes >> (8 * i) & 0xff));
  }
  if (!frame.AppendToString(&text)) {
    return absl::InternalError("frame cannot be serialized");
  }
  return text;
}

absl::Status CheckStreamSocket(int fd) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor ", fd, ": expected a connected stream socket"));
  }
  return absl::OkStatus();
}

}  // namespace

// -- the trainer's end

absl::StatusOr<std::unique_ptr<TrainerLink>> TrainerLink::Open(int fd) {
  RETURN_IF_ERROR(CheckStreamSocket(fd));
  const timeval timeout{.tv_sec = kSendTimeoutSeconds, .tv_usec = 0};
  if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return ErrnoStatus(errno, "setting the send time-out");
  }
  return std::unique_ptr<TrainerLink>(new TrainerLink(fd));
}

TrainerLink::~TrainerLink() {
  close(fd_);
}

void TrainerLink::Shutdown() {
  shutdown(fd_, SHUT_RDWR);
}

absl::Status TrainerLink::Send(const v1::TrainerUp& frame) {
  ASSIGN_OR_RETURN(const std::string text, Encode(frame));
  MutexLock lock(send_mutex_);
  RETURN_IF_ERROR(send_failure_);
  size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t count = send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += Size(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      send_failure_ = absl::DeadlineExceededError(
          absl::StrCat("the daemon has not read for ", kSendTimeoutSeconds, " s"));
      return send_failure_;
    } else if (errno != EINTR) {
      send_failure_ = absl::UnavailableError(
          absl::StrCat("the daemon is gone: ", std::string(strerror(errno))));
      return send_failure_;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::TrainerDown> TrainerLink::Receive() {
  const auto read_all = [this](void* data, size_t bytes) -> absl::Status {
    size_t done = 0;
    while (done < bytes) {
      const ssize_t count = recv(fd_, static_cast<char*>(data) + done, bytes - done, 0);
      if (count > 0) {
        done += Size(count);
      } else if (count == 0) {
        return absl::UnavailableError("the daemon closed the link");
      } else if (errno != EINTR) {
        return absl::UnavailableError(
            absl::StrCat("the daemon is gone: ", std::string(strerror(errno))));
      }
    }
    return absl::OkStatus();
  };
  std::array<uint8_t, kPrefixBytes> prefix = {};
  RETURN_IF_ERROR(read_all(prefix.data(), prefix.size()));
  const uint32_t bytes = ReadPrefix(prefix.data());
  if (bytes > kMaxFrameBytes) {
    return FrameTooLong(bytes);
  }
  std::string text(bytes, '\0');
  RETURN_IF_ERROR(read_all(text.data(), text.size()));
  v1::TrainerDown frame;
  if (!frame.ParseFromString(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame of ", bytes, " bytes: expected a TrainerDown message"));
  }
  return frame;
}

// -- the daemon's end

class DaemonLink::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::io_context& context, Callbacks callbacks)
      : socket_(context), callbacks_(std::move(callbacks)) {}

  absl::Status Start(int fd) {
    boost::system::error_code error;
    socket_.assign(asio::local::stream_protocol(), fd, error);
    if (error) {
      return absl::InvalidArgumentError(absl::StrCat("descriptor ", fd, ": ", error.message()));
    }
    ReadPrefixNext();
    return absl::OkStatus();
  }

  void Close() {
    callbacks_ = {};
    open_ = false;
    boost::system::error_code ignored;
    socket_.close(ignored);
  }

  absl::Status Send(const v1::TrainerDown& frame) {
    ASSIGN_OR_RETURN(std::string text, Encode(frame));
    if (!open_ || !writable_) {
      return absl::UnavailableError("the trainer is gone");
    }
    if (queued_bytes_ + text.size() > kMaxQueuedBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the trainer has left ", queued_bytes_, " bytes unread"));
    }
    queued_bytes_ += text.size();
    queue_.push_back(std::move(text));
    if (queue_.size() == 1) {
      WriteNext();
    }
    return absl::OkStatus();
  }

 private:
  void WriteNext() {
    asio::async_write(socket_,
                      asio::buffer(queue_.front()),
                      [self = shared_from_this()](boost::system::error_code error, size_t) {
                        if (error) {
                          // It reads no more, but what it said last may still be unread here:
                          // reading ends the connection.
                          self->writable_ = false;
                          self->queue_.clear();
                          return;
                        }
                        self->queued_bytes_ -= self->queue_.front().size();
                        self->queue_.pop_front();
                        if (!self->queue_.empty()) {
                          self->WriteNext();
                        }
                      });
  }

  void ReadPrefixNext() {
    asio::async_read(socket_,
                     asio::buffer(prefix_),
                     [self = shared_from_this()](boost::system::error_code error, size_t count) {
                       if (error) {
                         const bool clean = error == asio::error::eof && count == 0;
                         self->Stop(clean ? absl::OkStatus() : self->StatusOf(error));
                         return;
                       }
                       self->ReadBodyNext();
                     });
  }

  void ReadBodyNext() {
    const uint32_t bytes = ReadPrefix(prefix_.data());
    if (bytes > kMaxFrameBytes) {
      Stop(FrameTooLong(bytes));
      return;
    }
    body_.resize(bytes);
    asio::async_read(socket_,
                     asio::buffer(body_),
                     [self = shared_from_this()](boost::system::error_code error, size_t) {
                       if (error) {
                         self->Stop(self->StatusOf(error));
                         return;
                       }
                       self->Deliver();
                     });
  }

  void Deliver() {
    v1::TrainerUp frame;
    if (!frame.ParseFromString(body_)) {
      Stop(absl::InvalidArgumentError(
          absl::StrCat("frame of ", body_.size(), " bytes: expected a TrainerUp message")));
      return;
    }
    if (const auto deliver = callbacks_.frame) {  // a copy: the callback may close the link
      deliver(std::move(frame));
    }
    if (open_) {
      ReadPrefixNext();
    }
  }

  void Stop(absl::Status status) {
    if (!open_) {
      return;
    }
    open_ = false;
    boost::system::error_code ignored;
    socket_.close(ignored);
    if (callbacks_.closed) {
      const auto closed = std::move(callbacks_.closed);
      closed(std::move(status));
    }
  }

  static absl::Status StatusOf(boost::system::error_code error) {
    return absl::UnavailableError(absl::StrCat("the trainer's link broke: ", error.message()));
  }

  asio::local::stream_protocol::socket socket_;
  Callbacks callbacks_;
  bool open_ = true;
  bool writable_ = true;
  std::array<uint8_t, kPrefixBytes> prefix_ = {};
  std::string body_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
};

absl::StatusOr<std::unique_ptr<DaemonLink>> DaemonLink::Open(asio::io_context& context,
                                                             int fd,
                                                             Callbacks callbacks) {
  RETURN_IF_ERROR(CheckStreamSocket(fd));
  auto connection = std::make_shared<Connection>(context, std::move(callbacks));
  RETURN_IF_ERROR(connection->Start(fd));
  return std::unique_ptr<DaemonLink>(new DaemonLink(std::move(connection)));
}

DaemonLink::DaemonLink(std::shared_ptr<Connection> connection)
    : connection_(std::move(connection)) {}

DaemonLink::~DaemonLink() {
  connection_->Close();
}

absl::Status DaemonLink::Send(const v1::TrainerDown& frame) {
  return connection_->Send(frame);
}

}  // namespace ravel
