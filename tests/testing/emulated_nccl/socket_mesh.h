#pragma once

// Sockets between the ranks of a group on one host, and messages of all at once.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ravel::kernels::cuda::emulated {

enum class MeshResult { kDone, kAborted, kPeerGone };

// A bound socket that others connect to by its name; closed with the object.
class Listener {
 public:
  Listener();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  const std::string& name() const { return name_; }
  // -1 where `abort` was set.
  int Accept(const std::atomic<bool>& abort) const;

 private:
  int fd_ = -1;
  std::string name_;
};

// -1 where nobody listens there.
int ConnectTo(const std::string& name);

// Full mesh. Close may come from another thread than the rest, which come one at a time.
class SocketMesh {
 public:
  SocketMesh() = default;
  ~SocketMesh();
  SocketMesh(const SocketMesh&) = delete;
  SocketMesh& operator=(const SocketMesh&) = delete;

  // `names` are the listeners of all ranks.
  MeshResult Connect(int rank,
                     const std::vector<std::string>& names,
                     const Listener& own,
                     const std::atomic<bool>& abort);
  // Peers see that this rank is gone.
  void Close();

  // Messages to one peer arrive in their order.
  struct Message {
    int peer = 0;
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool outgoing = false;
  };
  // Moves all, whatever their order. A peer that sends other sizes is waited for until the abort:
  // it means something else.
  MeshResult Move(uint64_t sequence,
                  const std::vector<Message>& messages,
                  const std::atomic<bool>& abort,
                  int* gone);

  // Every rank's bytes, in rank order.
  MeshResult Gather(uint64_t sequence,
                    const std::byte* mine,
                    std::byte* all,
                    size_t bytes,
                    const std::atomic<bool>& abort,
                    int* gone);

 private:
  int rank_ = 0;
  std::vector<int> sockets_;  // by rank; -1: this one
};

// All of `bytes`, with looks at `abort`.
MeshResult WriteAll(int fd, const void* data, size_t bytes, const std::atomic<bool>& abort);
MeshResult ReadAll(int fd, void* data, size_t bytes, const std::atomic<bool>& abort);

}  // namespace ravel::kernels::cuda::emulated
