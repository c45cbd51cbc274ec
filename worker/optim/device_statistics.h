#pragma once

// A step's statistics on a device; the host reads them when the device has got there, one step
// later or when it likes.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/optim/step_statistics.h"
#include "worker/shard/device_streams.h"

namespace ravel::optim {

class DeviceStatistics final : public StepStatistics {
 public:
  // Steps that may be begun and not read.
  static constexpr int64_t kUnread = 2;

  // `streams` outlives it. ResourceExhausted where the device has no room.
  static absl::StatusOr<std::unique_ptr<DeviceStatistics>> Create(const Args& args,
                                                                  shard::DeviceStreams& streams);

  // Device memory beside the arena.
  int64_t device_bytes() const { return device_.bytes(); }

  void BeginStep(kernels::Stream& stream, const Beginning& beginning) override;
  void EndStep(kernels::Stream& stream) override;
  bool known_at_once() const override { return false; }
  int64_t unread() const override { return ended_ - read_; }
  // Waits for the device.
  absl::StatusOr<Record> Read() override;
  void BeginEvaluation(kernels::Stream& stream) override;

 private:
  struct Slot {
    kernels::CudaMemory begins;   // pinned: a message, then the step and the count of updates
    kernels::CudaMemory records;  // pinned: messages of all ranks, then the outcome
    kernels::CudaEvent recorded;
  };
  DeviceStatistics(const Args& args, shard::DeviceStreams& streams)
      : StepStatistics(args), streams_(streams) {}
  absl::Status Allocate();
  absl::Status CopyTables();

  shard::DeviceStreams& streams_;
  kernels::CudaMemory device_;
  // Host memory from which tables were copied. It is not freed before the end: freeing waits for
  // all work of the device, also of ranks beside this one that wait for it in an exchange.
  std::vector<kernels::CudaMemory> copied_;
  std::array<Slot, kUnread> slots_;
  int64_t begun_ = 0;
  int64_t ended_ = 0;
  int64_t read_ = 0;
};

}  // namespace ravel::optim
