#pragma once

// What the host must know of a step that a device computes: row sums of the gradients and token
// losses, read back together.

#include <cstdint>
#include <memory>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_device.h"
#include "worker/optim/norm_tree.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Used only from the thread that issues the rank's work.
class DeviceStatistics {
 public:
  // All outlive it. ResourceExhausted where the device has no room.
  struct Args {
    shard::DeviceStreams& streams;
    const plan::ShardingPlan& plan;
    std::vector<shard::ParameterGroup>& groups;
  };
  static absl::StatusOr<std::unique_ptr<DeviceStatistics>> Create(const Args& args);

  // Device memory beside the arena.
  int64_t device_bytes() const { return device_.bytes(); }

  // Losses of a micro-batch, on the device, are copied where the stream reaches this point.
  // `targets` are on the host and stay as they are until Finish. At most one per program of a step.
  struct MicroBatch {
    int64_t turn = 0;
    TensorView losses;
    TensorView targets;
  };
  void AddMicroBatch(kernels::Stream& stream, const MicroBatch& micro_batch);
  // Of what the groups measure.
  void MeasureGradients(kernels::Stream& stream);
  // Waits for both.
  absl::Status Finish(kernels::Stream& stream);

  // After Finish: the micro-batches since the last call of Forget, with losses on the host, ...
  const std::vector<MicroBatch>& micro_batches() const { return micro_batches_; }
  void Forget() { micro_batches_.clear(); }
  // ... sums of a rank's rows in the order of groups and their measured pieces, and elements that
  // are not finite by tensor.
  const float* row_sums() const { return static_cast<const float*>(rows_.data()); }
  const int64_t* non_finite() const;

 private:
  explicit DeviceStatistics(const Args& args) : args_(args) {}

  const Args args_;
  int64_t rows_bytes_ = 0;  // where the counts begin
  kernels::CudaMemory device_;
  kernels::CudaMemory rows_;  // pinned, as device_
  kernels::CudaMemory losses_;
  int64_t most_micro_batches_ = 0;
  int64_t loss_bytes_ = 0;  // of one
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace ravel::optim
