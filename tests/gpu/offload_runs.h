#pragma once

// Runs whose optimizer's state is, all or in part, in memory of the device's host.

#include <cstdint>
#include <vector>

#include "kernels/cuda_host/cuda_device.h"
#include "tests/testing/device_runs.h"
#include "worker/optim/host_updater.h"

namespace ravel::trainer {

// As few as blocks have: several chunks of the larger groups.
inline constexpr int64_t kChunkElements = 4096;

// A run with the label slow has every case with every form; others each case with some form.
bool EveryCase();

// Per step, on one rank, and the run.
struct CountedRun {
  std::vector<optim::HostUpdateCounts> counts;
  Recording recording;
  int64_t chunks = 0;
};
CountedRun RunCounted(kernels::CudaGpu& gpu, const RecordArgs& args);

// Three steps, one that is skipped, and one after it; with the state of the host before and after
// the skipped one.
Recording WithASkippedStep(kernels::CudaGpu& gpu, const RecordArgs& args);

}  // namespace ravel::trainer
