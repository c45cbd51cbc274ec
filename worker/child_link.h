#pragma once

// Frames between a daemon and its trainers over a socketpair: u32 little-endian length, then one
// protobuf message of at most 64 MiB. The trainer's end blocks and is used from threads; the
// daemon's end belongs to an event loop.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/mutex.h"
#include "common/status.h"
#include "proto/trainer.pb.h"

namespace boost::asio {
class io_context;
}

namespace ravel {

inline constexpr uint32_t kMaxFrameBytes = 64u << 20;
// The descriptor that a trainer inherits; its command line says --socket-fd=3.
inline constexpr int kTrainerSocketFd = 3;

// The trainer's end. Send and Shutdown are thread-safe; Receive belongs to one thread.
class TrainerLink {
 public:
  // Takes over a connected stream socket. InvalidArgument if `fd` is not one.
  static absl::StatusOr<std::unique_ptr<TrainerLink>> Open(int fd);
  ~TrainerLink();
  TrainerLink(const TrainerLink&) = delete;
  TrainerLink& operator=(const TrainerLink&) = delete;

  // Writes the whole frame. Unavailable when the daemon is gone, DeadlineExceeded when it has not
  // read for 30 s; either is final. InvalidArgument for a frame that is too long, which sends
  // nothing.
  absl::Status Send(const v1::TrainerUp& frame);
  // Waits for the next frame. Unavailable when the daemon closed its end (or after Shutdown);
  // InvalidArgument for a frame that is too long or cannot be parsed.
  absl::StatusOr<v1::TrainerDown> Receive();
  // Ends a blocked Receive and all later calls.
  void Shutdown();

 private:
  explicit TrainerLink(int fd) : fd_(fd) {}

  const int fd_;
  Mutex send_mutex_;
  absl::Status send_failure_ ABSL_GUARDED_BY(send_mutex_);
};

// The daemon's end. Used only from the thread that runs its io_context.
class DaemonLink {
 public:
  // No callback runs after the link was destroyed. `closed` runs once: OK when the trainer closed
  // its end between two frames, else what was wrong.
  struct Callbacks {
    std::function<void(v1::TrainerUp)> frame;
    std::function<void(absl::Status)> closed;
  };
  // Takes over `fd`, and starts to read.
  static absl::StatusOr<std::unique_ptr<DaemonLink>> Open(boost::asio::io_context& context,
                                                          int fd,
                                                          Callbacks callbacks);
  ~DaemonLink();

  // Queues a frame. ResourceExhausted when the trainer has let 128 MiB pile up; InvalidArgument for
  // a frame that is too long; Unavailable when it is gone.
  absl::Status Send(const v1::TrainerDown& frame);

 private:
  class Connection;
  explicit DaemonLink(std::shared_ptr<Connection> connection);
  // Shared with the handlers in flight, which may outlive this object by a turn of the loop.
  std::shared_ptr<Connection> connection_;
};

}  // namespace ravel
