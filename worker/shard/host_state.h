#pragma once

// State of the optimizer in memory of a device's host.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/status.h"
#include "worker/comm/shared_segment.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/host_access.h"
#include "worker/shard/numa_node.h"

namespace ravel::shard {

// The job field to which errors of that memory belong.
inline constexpr char kOffloadFractionField[] = "training.optimizer.offload.fraction";

// Thread-compatible.
class HostState {
 public:
  // `bytes` of zeros, in huge pages where the host allows them, of the node if that has room.
  // ResourceExhausted, by the field's name, where the host has less available.
  static absl::StatusOr<std::unique_ptr<HostState>> Create(int64_t bytes, const NumaNode& node);

  std::span<std::byte> all() const { return {memory_.data(), bytes_}; }
  bool Holds(const void* address) const;

 private:
  HostState(comm::PrivateMapping memory, size_t bytes)
      : memory_(std::move(memory)), bytes_(bytes) {}

  const comm::PrivateMapping memory_;
  const size_t bytes_;
};

// The way to an arena on a device, a part of which is such memory: that is reached when all work of
// the streams is done.
class HostStateAccess final : public HostAccess {
 public:
  // All outlive it.
  HostStateAccess(HostAccess& device, DeviceStreams& streams, const HostState& state)
      : device_(device), streams_(streams), state_(state) {}

  bool in_place() const override { return false; }
  bool Reaches(const void* address) const override { return !state_.Holds(address); }
  absl::Status Read(const void* from, std::span<std::byte> to) override;
  absl::Status Write(std::span<const std::byte> from, void* to) override;

 private:
  HostAccess& device_;
  DeviceStreams& streams_;
  const HostState& state_;
};

}  // namespace ravel::shard
