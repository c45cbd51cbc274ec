// Rotary embedding in place: one read and one write of x, the table comes from cache. Memory-bound.
// Rows over y, pairs of a row along x.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads) RopeKernel(const __grid_constant__ RopeParams p) {
  const int64_t vectors = p.half / kWidth;  // of one half of a head
  const int64_t count = p.heads * vectors;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const int64_t position = row % p.sequence_tokens;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
      const int64_t head = i / vectors;
      const int64_t j = (i - head * vectors) * kWidth;
      T* low = static_cast<T*>(p.x) + row * p.x_stride + head * 2 * p.half + j;
      float a[kWidth];
      float b[kWidth];
      Load<T, kWidth>(low, a);
      Load<T, kWidth>(low + p.half, b);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float c = p.cosine[position * p.cosine_stride + j + k];
        const float s = p.sine[position * p.sine_stride + j + k] * p.sign;
        const float rotated = fmaf(-b[k], s, a[k] * c);
        b[k] = fmaf(a[k], s, b[k] * c);
        a[k] = rotated;
      }
      Store<T, kWidth>(low, a);
      Store<T, kWidth>(low + p.half, b);
    }
  }
}

template <typename T>
void AddRope(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kRope, RopeKernel<T, 1>, RopeKernel<T, kVectorOf<T>>, entries);
}

}  // namespace

std::vector<KernelEntry> RopeKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddRope<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
