#pragma once

// Token ids on their way to a device.

#include <cstdint>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/trainer/engine_backend.h"

namespace ravel::trainer {

// Pinned memory for ids and targets of each micro-batch that a rank runs in a step, twice, so that
// one step is filled while the uploads of the one before wait for the device. Used only from the
// thread that issues the rank's work.
class DeviceBatches {
 public:
  // `device`: where each micro-batch goes, one after another.
  static absl::StatusOr<DeviceBatches> Create(kernels::CudaGpu& gpu,
                                              int64_t micro_batches,
                                              const BatchViews& device);
  DeviceBatches() = default;

  // Before a step's micro-batches, which take the place of those of the step before the last: their
  // uploads are done.
  void BeginStep() { ++steps_; }
  // On the host, of this step.
  BatchViews host(int64_t micro_batch) const;
  void Upload(kernels::CudaStream& stream, int64_t micro_batch) const;

 private:
  kernels::CudaMemory pinned_;
  BatchViews device_;
  int64_t part_bytes_ = 0;  // of ids, and of targets
  int64_t micro_batches_ = 0;
  int64_t steps_ = 0;
};

}  // namespace ravel::trainer
