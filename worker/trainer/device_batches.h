#pragma once

// Token ids on their way to a device.

#include <cstdint>

#include "common/status.h"
#include "common/tensor_view.h"
#include "kernels/cuda_device.h"

namespace ravel::trainer {

// Pinned memory for ids and targets of each micro-batch that a rank runs in a step. Used only from
// the thread that issues the rank's work.
class DeviceBatches {
 public:
  // Ids and targets of one micro-batch.
  struct Batch {
    TensorView ids;
    TensorView targets;
  };
  // `device`: where each micro-batch goes, one after another.
  static absl::StatusOr<DeviceBatches> Create(kernels::CudaGpu& gpu,
                                              int64_t micro_batches,
                                              const Batch& device);
  DeviceBatches() = default;

  // On the host. Filled anew only when its last upload is done.
  Batch host(int64_t micro_batch) const;
  void Upload(kernels::CudaStream& stream, int64_t micro_batch) const;

 private:
  kernels::CudaMemory pinned_;
  Batch device_;
  int64_t part_bytes_ = 0;  // of ids, and of targets
};

}  // namespace ravel::trainer
