#include "tests/testing/emulated_nccl/socket_mesh.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr int kLookMs = 2;  // how often an abort is looked for

sockaddr_un AddressOf(const std::string& name, socklen_t* length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// True when the descriptor is ready.
bool Ready(int fd, short events) {
  pollfd one = {.fd = fd, .events = events, .revents = 0};
  return poll(&one, 1, kLookMs) > 0;
}

struct Header {
  uint64_t sequence;
  uint64_t bytes;
  bool operator==(const Header&) const = default;
};

// One message on its way: the header, then the bytes.
struct Flight {
  SocketMesh::Message message;
  Header expected = {};
  Header header = {};
  size_t done = 0;
  bool strange = false;  // what comes is something else

  size_t total() const { return sizeof(Header) + message.bytes; }
  bool over() const { return done == total(); }
  // The rest of the header or of the bytes.
  void* at() {
    return done < sizeof(Header) ? reinterpret_cast<std::byte*>(&header) + done
                                 : message.data + (done - sizeof(Header));
  }
  size_t left() const { return done < sizeof(Header) ? sizeof(Header) - done : total() - done; }
};

// False where the peer is gone.
bool Step(int fd, Flight& flight) {
  while (!flight.over() && !flight.strange) {
    const ssize_t count = flight.message.outgoing
                              ? send(fd, flight.at(), flight.left(), MSG_NOSIGNAL | MSG_DONTWAIT)
                              : recv(fd, flight.at(), flight.left(), MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return true;
    }
    if (count <= 0) {
      return false;
    }
    flight.done += static_cast<size_t>(count);
    flight.strange = !flight.message.outgoing && flight.done == sizeof(Header) &&
                     !(flight.header == flight.expected);
  }
  return true;
}

}  // namespace

Listener::Listener() : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  static std::atomic<int> count = 0;
  name_ = "ravel-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++count);
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(name_, &length);
  if (bind(fd_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(fd_, 256) != 0) {
    name_.clear();
  }
}

Listener::~Listener() {
  close(fd_);
}

int Listener::Accept(const std::atomic<bool>& abort) const {
  while (!abort) {
    if (Ready(fd_, POLLIN)) {
      const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) {
        return fd;
      }
    }
  }
  return -1;
}

int ConnectTo(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(name, &length);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

MeshResult WriteAll(int fd, const void* data, size_t bytes, const std::atomic<bool>& abort) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    if (abort) {
      return MeshResult::kAborted;
    }
    const ssize_t count = send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      Ready(fd, POLLOUT);
    } else if (count <= 0) {
      return MeshResult::kPeerGone;
    } else {
      at += count;
      bytes -= static_cast<size_t>(count);
    }
  }
  return MeshResult::kDone;
}

MeshResult ReadAll(int fd, void* data, size_t bytes, const std::atomic<bool>& abort) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    if (abort) {
      return MeshResult::kAborted;
    }
    const ssize_t count = recv(fd, at, bytes, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      Ready(fd, POLLIN);
    } else if (count <= 0) {
      return MeshResult::kPeerGone;
    } else {
      at += count;
      bytes -= static_cast<size_t>(count);
    }
  }
  return MeshResult::kDone;
}

SocketMesh::~SocketMesh() {
  for (const int fd : sockets_) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

MeshResult SocketMesh::Connect(int rank,
                               const std::vector<std::string>& names,
                               const Listener& own,
                               const std::atomic<bool>& abort) {
  rank_ = rank;
  std::vector<int> sockets(names.size(), -1);
  MeshResult result = MeshResult::kDone;
  for (int peer = 0; peer < rank && result == MeshResult::kDone; ++peer) {
    const int fd = ConnectTo(names[static_cast<size_t>(peer)]);
    sockets[static_cast<size_t>(peer)] = fd;
    result = fd < 0 ? MeshResult::kPeerGone : WriteAll(fd, &rank, sizeof(rank), abort);
  }
  for (size_t come = static_cast<size_t>(rank) + 1;
       come < names.size() && result == MeshResult::kDone;
       ++come) {
    const int fd = own.Accept(abort);
    int peer = -1;
    result = fd < 0 ? MeshResult::kAborted : ReadAll(fd, &peer, sizeof(peer), abort);
    if (result == MeshResult::kDone) {
      sockets[static_cast<size_t>(peer)] = fd;
    }
  }
  sockets_ = std::move(sockets);
  return result;
}

void SocketMesh::Close() {
  for (const int fd : sockets_) {
    if (fd >= 0) {
      shutdown(fd, SHUT_RDWR);
    }
  }
}

MeshResult SocketMesh::Move(uint64_t sequence,
                            const std::vector<Message>& messages,
                            const std::atomic<bool>& abort,
                            int* gone) {
  std::vector<Flight> flights;
  for (const Message& message : messages) {
    const Header header = {sequence, message.bytes};
    flights.push_back({.message = message, .expected = header});
    if (message.outgoing) {
      flights.back().header = header;
    }
  }
  for (;;) {
    std::vector<pollfd> waits;
    std::vector<bool> in(sockets_.size()), out(sockets_.size());
    for (Flight& flight : flights) {
      // Only the first of those that share a direction of a socket moves.
      auto busy = (flight.message.outgoing ? out : in)[static_cast<size_t>(flight.message.peer)];
      if (flight.over() || busy) {
        continue;
      }
      const int fd = sockets_[static_cast<size_t>(flight.message.peer)];
      if (!Step(fd, flight)) {
        *gone = flight.message.peer;
        return MeshResult::kPeerGone;
      }
      if (!flight.over()) {
        busy = true;
        const short events = flight.message.outgoing ? POLLOUT : POLLIN;
        waits.push_back({.fd = flight.strange ? -1 : fd, .events = events, .revents = 0});
      }
    }
    if (waits.empty()) {
      return MeshResult::kDone;
    }
    poll(waits.data(), waits.size(), kLookMs);
    if (abort) {
      return MeshResult::kAborted;
    }
  }
}

MeshResult SocketMesh::Gather(uint64_t sequence,
                              const std::byte* mine,
                              std::byte* all,
                              size_t bytes,
                              const std::atomic<bool>& abort,
                              int* gone) {
  std::vector<Message> messages;
  const size_t own = static_cast<size_t>(rank_) * bytes;
  if (mine != all + own) {
    std::memcpy(all + own, mine, bytes);
  }
  for (int peer = 0; peer < static_cast<int>(sockets_.size()); ++peer) {
    if (peer != rank_) {
      messages.push_back({peer, all + own, bytes, true});
      messages.push_back({peer, all + static_cast<size_t>(peer) * bytes, bytes, false});
    }
  }
  return Move(sequence, messages, abort, gone);
}

}  // namespace ravel::kernels::cuda::emulated
