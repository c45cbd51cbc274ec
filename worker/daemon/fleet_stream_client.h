#pragma once

// One call of Fleet.Connect, and Fleet.FetchPlan: the gRPC side of the daemon, without any policy.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "common/status.h"
#include "proto/fleet.pb.h"

namespace ravel::daemon {

// A connection to the coordinator. Thread-safe. Callbacks run on threads of gRPC, one at a time.
class FleetStream {
 public:
  struct Callbacks {
    std::function<void(v1::Down)> received;
    // Once, as the last callback: why the stream ended.
    std::function<void(absl::Status)> closed;
  };

  // Cancels; no callback starts afterwards.
  virtual ~FleetStream() = default;

  // Queues a message. Logs are dropped, and false is returned, while more than 4 MiB of messages
  // wait.
  enum class Kind { kControl, kLog };
  virtual bool Send(const v1::Up& message, Kind kind) = 0;

  // Fetches the plan of a job epoch and checks its SHA-256, on the same channel.
  using PlanCallback = std::function<void(absl::StatusOr<std::string>)>;
  virtual void FetchPlan(const v1::FetchPlanRequest& request, PlanCallback done) = 0;
};

// The one gRPC channel of a daemon: it outlives every stream and reconnects by itself. (A channel
// per stream, destroyed while it was connecting, ends gRPC 1.51 now and then on an assertion of its
// own.)
class FleetChannel {
 public:
  static std::unique_ptr<FleetChannel> Create(const std::string& address);
  virtual ~FleetChannel() = default;

  // A new call; a coordinator that cannot be reached shows in `closed`. The stream may outlive the
  // channel object.
  virtual std::unique_ptr<FleetStream> Open(FleetStream::Callbacks callbacks) = 0;
};

}  // namespace ravel::daemon
