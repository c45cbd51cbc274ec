// Kernels that run once per job, in double precision: initial weights and the table of angles. Sine
// and cosine of large arguments keep an array in local memory, which no other kernel may
// (CMakeLists.txt).

#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kFlatThreads)
    RopeTableKernel(const __grid_constant__ RopeTableParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t count = p.positions * p.half;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t position = i / p.half;
    const int64_t j = i - position * p.half;
    const double angle =
        static_cast<double>(position) * static_cast<double>(p.inverse_frequency[j]);
    p.cosine[position * p.cosine_stride + j] = static_cast<float>(cos(angle));
    p.sine[position * p.sine_stride + j] = static_cast<float>(sin(angle));
  }
}

// Box and Muller in double precision, as kernels/cpu/reference_ops.cc.
__device__ inline void NormalPair(uint32_t radius_bits, uint32_t angle_bits, double (&normal)[2]) {
  constexpr double kStep = 0x1p-32;
  constexpr double kPi = 3.141592653589793;
  const double radius = sqrt(-2.0 * log((static_cast<double>(radius_bits) + 0.5) * kStep));
  const double angle = 2.0 * kPi * static_cast<double>(angle_bits) * kStep;
  normal[0] = radius * cos(angle);
  normal[1] = radius * sin(angle);
}

__global__ void __launch_bounds__(kFlatThreads)
    InitNormalKernel(const __grid_constant__ InitNormalParams p) {
  const int64_t before = static_cast<int64_t>(p.first_index % 4);
  const int64_t groups = (before + p.elements + 3) / 4;
  const double deviation = static_cast<double>(p.standard_deviation);
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < groups;
       k += int64_t{gridDim.x} * blockDim.x) {
    const scalar::PhiloxWords words = scalar::Philox4x32(
        p.seed,
        scalar::PhiloxCounter(
            {.block = p.first_index / 4 + static_cast<uint64_t>(k), .site = p.site}));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      double normal[2];
      NormalPair(words[2 * pair], words[2 * pair + 1], normal);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t i = 4 * k - before + 2 * pair + j;
        if (i >= 0 && i < p.elements) {
          p.out[i] = static_cast<float>(normal[j] * deviation);
        }
      }
    }
  }
}

}  // namespace

std::vector<KernelEntry> StartKernels() {
  return {EntryOf(Kernel::kRopeTable, kF32Scalar, RopeTableKernel),
          EntryOf(Kernel::kInitNormal, 0, InitNormalKernel)};
}

}  // namespace ravel::kernels::cuda
