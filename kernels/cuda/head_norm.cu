// RMSNorm of every head by itself, a warp per head: x is read twice, the second time from cache.
// Memory-bound. Each warp keeps its part of the weight's gradient in registers until it has seen
// all its heads, so partial sums are few and their order is fixed.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

constexpr int kThreads = kHeadNormWarps * kWarpThreads;
constexpr int kPerLane = kAttentionMaxHead / kWarpThreads;

// body(token, column of the head's first element) for this warp's heads, in order.
template <typename Body>
__device__ inline void ForEachHead(const HeadNormParams& p, Body body) {
  const int64_t step = int64_t{gridDim.x} * kHeadNormWarps;
  int64_t i = int64_t{blockIdx.x} * kHeadNormWarps + threadIdx.x / kWarpThreads;
  for (; i < p.rows * p.heads; i += step) {
    const int64_t token = i / p.heads;
    body(token, (i - token * p.heads) * p.head_size);
  }
}

template <typename T>
__device__ inline float RootOf(const HeadNormParams& p, const T* x, int lane) {
  float squares = 0.0f;
  for (int64_t j = lane; j < p.head_size; j += kWarpThreads) {
    const float value = ToFloat(x[j]);
    squares = fmaf(value, value, squares);
  }
  return 1.0f / sqrtf(SumOfWarp(squares) / static_cast<float>(p.head_size) + p.epsilon);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    HeadNormForwardKernel(const __grid_constant__ HeadNormParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* w = static_cast<const T*>(p.w);
  ForEachHead(p, [&](int64_t token, int64_t column) {
    const T* x = static_cast<const T*>(p.x) + token * p.x_stride + column;
    T* y = static_cast<T*>(p.y) + token * p.y_stride + column;
    const float rstd = RootOf(p, x, lane);
    for (int64_t j = lane; j < p.head_size; j += kWarpThreads) {
      y[j] = FromFloat<T>(ToFloat(x[j]) * rstd * ToFloat(w[j]));
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    HeadNormBackwardKernel(const __grid_constant__ HeadNormParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* w = static_cast<const T*>(p.w);
  float dw[kPerLane] = {};
  ForEachHead(p, [&](int64_t token, int64_t column) {
    const T* x = static_cast<const T*>(p.x) + token * p.x_stride + column;
    const T* dy = static_cast<const T*>(p.dy) + token * p.dy_stride + column;
    T* dx = static_cast<T*>(p.dx) + token * p.dx_stride + column;
    const float rstd = RootOf(p, x, lane);
    float dot = 0.0f;
    for (int64_t j = lane; j < p.head_size; j += kWarpThreads) {
      dot = fmaf(ToFloat(w[j]) * ToFloat(dy[j]), ToFloat(x[j]), dot);
    }
    const float pull = rstd * rstd * (SumOfWarp(dot) / static_cast<float>(p.head_size));
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int64_t j = lane + k * kWarpThreads;
      if (j < p.head_size) {
        const float value = ToFloat(x[j]);
        const float gradient = ToFloat(dy[j]);
        dw[k] = fmaf(gradient, value * rstd, dw[k]);
        dx[j] = FromFloat<T>(fmaf(-value, pull, ToFloat(w[j]) * gradient) * rstd);
      }
    }
  });
  const int64_t warp = int64_t{blockIdx.x} * kHeadNormWarps + threadIdx.x / kWarpThreads;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int64_t j = lane + k * kWarpThreads;
    if (j < p.head_size) {
      p.partials[warp * p.head_size + j] = dw[k];
    }
  }
}

template <typename T>
void AddNorms(std::vector<KernelEntry>& entries) {
  constexpr int32_t kVariant = VariantsOf<T>::kScalar;
  entries.push_back(EntryOf(Kernel::kHeadNormForward, kVariant, HeadNormForwardKernel<T>));
  entries.push_back(EntryOf(Kernel::kHeadNormBackward, kVariant, HeadNormBackwardKernel<T>));
}

}  // namespace

std::vector<KernelEntry> HeadNormKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddNorms<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
