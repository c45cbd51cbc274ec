#pragma once

// The host's way to an arena on a device: through pinned memory, piece by piece.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/host_access.h"

namespace ravel::shard {

class DeviceAccess final : public HostAccess {
 public:
  // The streams outlive it.
  static absl::StatusOr<std::unique_ptr<DeviceAccess>> Create(DeviceStreams& streams);

  bool in_place() const override { return false; }
  absl::Status Read(const void* from, std::span<std::byte> to) override;
  absl::Status Write(std::span<const std::byte> from, void* to) override;

 private:
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;
  explicit DeviceAccess(DeviceStreams& streams) : streams_(streams) {}

  DeviceStreams& streams_;
  std::array<kernels::CudaMemory, 2> pinned_;  // in turns, so that copies of both kinds overlap
  std::array<kernels::CudaEvent, 2> done_;
};

}  // namespace ravel::shard
