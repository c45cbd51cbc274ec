#include "tests/testing/emulated_cuda/emulated_kernels.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tests/testing/device_code/device_code.h"
#include "tests/testing/emulated_cuda/emulated_attention.h"

namespace ravel::kernels::cuda::emulated {
namespace {

// Limits of a device of compute capability 9.0.
constexpr uint32_t kMaxBlock = 1024;
constexpr uint32_t kMaxGridX = 0x7FFFFFFF;
constexpr uint32_t kMaxGridYZ = 65535;
constexpr uint32_t kMaxSharedBytes = 227 * 1024;

using OperandsTable = std::array<KernelOperands, static_cast<size_t>(Kernel::kCount)>;

OperandsTable MakeTable() {
  OperandsTable table = {};
  for (const auto& part :
       {RowKernels(), FlatKernels(), MatrixKernels(), QuantizeKernelOperands()}) {
    for (const KernelOperands& entry : part) {
      table[static_cast<size_t>(entry.kernel)] = entry;
    }
  }
  return table;
}

// Null where the device has no such code, or its operands are not declared.
const KernelOperands* FindKernel(int32_t kernel, uint64_t param_bytes) {
  static const OperandsTable table = MakeTable();
  if (!simt::HasKernel(kernel, param_bytes)) {
    return nullptr;
  }
  const KernelOperands& entry = table[static_cast<size_t>(kernel / kKernelVariants)];
  return entry.param_bytes == param_bytes ? &entry : nullptr;
}

bool FitsDevice(const RavelCudaLaunch& launch) {
  const auto within = [](uint32_t value, uint32_t most) { return value >= 1 && value <= most; };
  return within(launch.grid[0], kMaxGridX) && within(launch.grid[1], kMaxGridYZ) &&
         within(launch.grid[2], kMaxGridYZ) && within(launch.block, kMaxBlock) &&
         launch.block % kWarpThreads == 0 && launch.shared_bytes <= kMaxSharedBytes;
}

bool AttentionByCpu() {
  static const bool by_cpu = [] {
    const char* value = std::getenv("RAVEL_EMULATED_ATTENTION");
    return value == nullptr || std::string_view(value) != "device_code";
  }();
  return by_cpu;
}

void RunAttentionByCpu(const RavelCudaLaunch& launch) {
  AttentionParams params;
  std::memcpy(static_cast<void*>(&params), launch.params, sizeof(params));
  RunOwnAttention(static_cast<Kernel>(launch.kernel / kKernelVariants),
                  AttentionType(launch.kernel % kKernelVariants),
                  launch.grid[2],
                  params);
}

bool IsAttention(Kernel kernel) {
  return kernel == Kernel::kAttentionForward || kernel == Kernel::kAttentionBackwardKeys ||
         kernel == Kernel::kAttentionBackwardQueries;
}

}  // namespace

bool HasKernel(int32_t kernel, uint64_t param_bytes) {
  return FindKernel(kernel, param_bytes) != nullptr;
}

PlannedLaunch PlanLaunch(const RavelCudaLaunch& launch) {
  const KernelOperands* entry = FindKernel(launch.kernel, launch.param_bytes);
  if (entry == nullptr) {
    return {.problem = "no kernel " + std::to_string(launch.kernel) + " with an argument of " +
                       std::to_string(launch.param_bytes) + " bytes",
            .work = {}};
  }
  const int32_t variant = launch.kernel % kKernelVariants;
  const KernelLaunch described = {
      .name = std::string("kernel ") + entry->name + " (variant " + std::to_string(variant) + ")",
      .variant = variant,
      .grid = {launch.grid[0], launch.grid[1], launch.grid[2]},
      .block = launch.block,
      .shared_bytes = launch.shared_bytes};
  if (!FitsDevice(launch)) {
    return {.problem = described.name + ": grid, block or shared memory beyond the device's limits",
            .work = {}};
  }
  Operands operands(described);
  entry->declare(launch.params, operands);
  const std::string problem = simt::LaunchProblem(launch);
  operands.Require(problem.empty(), problem);
  const auto* bytes = static_cast<const uint8_t*>(launch.params);
  const bool by_cpu = AttentionByCpu() && IsAttention(entry->kernel);
  return operands.Plan(
      [launch, by_cpu, params = std::vector<uint8_t>(bytes, bytes + launch.param_bytes)] {
        RavelCudaLaunch own = launch;
        own.params = params.data();
        by_cpu ? RunAttentionByCpu(own) : simt::RunLaunch(own);
      });
}

}  // namespace ravel::kernels::cuda::emulated
