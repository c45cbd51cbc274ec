#include "tests/testing/emulated_cuda/emulated_kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tests/testing/device_code/device_code.h"

namespace ravel::kernels::cuda::emulated {
namespace {

// Limits of a device of compute capability 9.0.
constexpr uint32_t kMaxBlock = 1024;
constexpr uint32_t kMaxGridX = 0x7FFFFFFF;
constexpr uint32_t kMaxGridYZ = 65535;
constexpr uint32_t kMaxSharedBytes = 227 * 1024;

const EmulatedKernel* FindKernel(int32_t kernel, uint64_t param_bytes) {
  const std::vector<EmulatedKernel>& all = AllKernels();
  const auto found = std::find_if(all.begin(), all.end(), [&](const EmulatedKernel& entry) {
    return KernelId(entry.kernel, entry.variant) == kernel && entry.param_bytes == param_bytes;
  });
  return found == all.end() ? nullptr : &*found;
}

bool FitsDevice(const RavelCudaLaunch& launch) {
  const auto within = [](uint32_t value, uint32_t most) { return value >= 1 && value <= most; };
  return within(launch.grid[0], kMaxGridX) && within(launch.grid[1], kMaxGridYZ) &&
         within(launch.grid[2], kMaxGridYZ) && within(launch.block, kMaxBlock) &&
         launch.block % kWarpThreads == 0 && launch.shared_bytes <= kMaxSharedBytes;
}

bool RunsDeviceCode() {
  static const bool device_code = [] {
    const char* value = std::getenv("RAVEL_EMULATED_KERNELS");
    return value != nullptr && std::string_view(value) == "device_code";
  }();
  return device_code;
}

// The device's own code in place of the CPU's op.
void UseDeviceCode(const RavelCudaLaunch& launch, PlannedLaunch& planned) {
  if (planned.problem.empty()) {
    planned.problem = simt::LaunchProblem(launch);
  }
  const auto* bytes = static_cast<const uint8_t*>(launch.params);
  const std::vector<uint8_t> params(bytes, bytes + launch.param_bytes);
  planned.work.run = [launch, params] {
    RavelCudaLaunch own = launch;
    own.params = params.data();
    simt::RunLaunch(own);
  };
}

}  // namespace

const std::vector<EmulatedKernel>& AllKernels() {
  static const std::vector<EmulatedKernel> all = [] {
    std::vector<EmulatedKernel> joined;
    for (const auto& part :
         {RowKernels(), NormKernels(), FlatKernels(), MatrixKernels(), StatisticsKernels()}) {
      joined.insert(joined.end(), part.begin(), part.end());
    }
    return joined;
  }();
  return all;
}

bool HasKernel(int32_t kernel, uint64_t param_bytes) {
  return FindKernel(kernel, param_bytes) != nullptr;
}

PlannedLaunch PlanLaunch(const RavelCudaLaunch& launch) {
  const EmulatedKernel* entry = FindKernel(launch.kernel, launch.param_bytes);
  if (entry == nullptr) {
    return {.problem = "no kernel " + std::to_string(launch.kernel) + " with an argument of " +
                       std::to_string(launch.param_bytes) + " bytes",
            .work = {}};
  }
  const KernelLaunch described = {.name = std::string("kernel ") + entry->name + " (variant " +
                                          std::to_string(entry->variant) + ")",
                                  .variant = entry->variant,
                                  .grid = {launch.grid[0], launch.grid[1], launch.grid[2]},
                                  .block = launch.block,
                                  .shared_bytes = launch.shared_bytes};
  if (!FitsDevice(launch)) {
    return {.problem = described.name + ": grid, block or shared memory beyond the device's limits",
            .work = {}};
  }
  PlannedLaunch planned = entry->plan(described, launch.params);
  if (RunsDeviceCode()) {
    UseDeviceCode(launch, planned);
  }
  return planned;
}

}  // namespace ravel::kernels::cuda::emulated
