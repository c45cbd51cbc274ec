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

  // Connects in the background with a channel of its own; a coordinator that cannot be reached
  // shows in `closed`.
  static std::unique_ptr<FleetStream> Open(const std::string& address, Callbacks callbacks);
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

}  // namespace ravel::daemon
