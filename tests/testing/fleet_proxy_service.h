#pragma once

// Stands between worker daemons and the coordinator and spoils the stream as a test says: by the
// kind of a message, in either direction.

#include <chrono>
#include <memory>
#include <string>

#include "common/status.h"

namespace ravel::testing {

// What happens to the next message of a kind. A message of a stream cannot be lost while the stream
// lives on, so kLose cuts the stream with it.
enum class Spoil { kLose, kDuplicate, kDelay };

// Kinds: up/hello, up/beat, up/exited, up/result, up/log, up/trainer.ready, up/trainer.seal, ...,
// down/welcome, down/beat_ack, down/launch, down/stop, down/trainer.run, ... Thread-safe.
class FleetProxy {
 public:
  static absl::StatusOr<std::unique_ptr<FleetProxy>> Start(const std::string& coordinator);
  virtual ~FleetProxy() = default;
  // 127.0.0.1:PORT for daemons.
  virtual std::string address() const = 0;
  // In place of what was asked before. A delayed message holds up all that follow it.
  virtual void SpoilNext(const std::string& kind,
                         Spoil spoil,
                         std::chrono::milliseconds delay = {}) = 0;
  // How many were spoilt since SpoilNext: 0 or 1.
  virtual int spoilt() const = 0;
};

}  // namespace ravel::testing
