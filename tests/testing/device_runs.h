#pragma once

// Runs of the engine on a CUDA device, emulated or real, with ranks as threads of this process: the
// cases, and what is expected of them whatever computes.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {

inline constexpr int64_t kDeviceSteps = 3;

// Device 0 of the library that RAVEL_CUDA_LIBRARY names, or that lies beside the program.
absl::StatusOr<std::unique_ptr<kernels::CudaGpu>> OpenDevice();

// Of every strategy: widths 1, 2 and 4, and what else changes a plan.
std::vector<StrategyCase> DeviceCases();

// kDeviceSteps steps of a case, with an evaluation after each; `model` as for CaseJob. Each tensor
// of the default lies on one rank; those of "bundled_rope_scaling" are cut between ranks.
RecordArgs DeviceSteps(const StrategyCase& tested, const std::string& model = "odd_tied");
// The same on the device, where fresh staging memory holds NaN.
Recording RecordOn(kernels::CudaGpu& gpu, RecordArgs args);

// Recorded once in this process, by this name.
const Recording& RecordedOnce(kernels::CudaGpu& gpu,
                              const std::string& name,
                              const RecordArgs& args);
// `later` began with the state that `earlier` ended with: makes them one run.
void PutBefore(const Recording& earlier, Recording& later);

using RankBody = std::function<absl::Status(RankEngine& engine, int rank)>;
// What the case's ranks do, in place of its steps; the first error.
absl::Status RunOn(kernels::CudaGpu& gpu, const RecordArgs& args, RankBody body);
// Of two ranks, one with a NaN among its weights: the step is skipped, and Localise says why.
void ExpectANanIsSkippedAndExplained(kernels::CudaGpu& gpu, const RecordArgs& args);

// Of kDeviceSteps steps: equal bits of losses, norms, evaluations, weights and moments.
void ExpectEqualRuns(const Recording& expected, const Recording& run, const std::string& name);

// Of all elements of all tensors: the norm of the difference over the norm of `a`.
double RelativeDifference(const std::map<std::string, std::vector<float>>& a,
                          const std::map<std::string, std::vector<float>>& b);

}  // namespace ravel::trainer
