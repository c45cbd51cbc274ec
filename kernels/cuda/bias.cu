// Rows added to every row of a matrix (a bias, learned positions), and the gradients of those.
// Memory-bound: one read, and where x changes one write, of x.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    AddRowsKernel(const __grid_constant__ AddRowsParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* from = static_cast<const T*>(p.table) + row % p.period * p.table_stride;
    T* to = static_cast<T*>(p.x) + row * p.x_stride;
    for (int64_t column = first; column < p.columns; column += step) {
      float sum[kWidth];
      Load<T, kWidth>(from + column, sum);
      if (p.accumulate != 0) {
        float x[kWidth];
        Load<T, kWidth>(to + column, x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          sum[i] = x[i] + sum[i];
        }
      }
      Store<T, kWidth>(to + column, sum);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    BiasGradientKernel(const __grid_constant__ BiasGradientParams p) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  if (column >= p.columns) {
    return;
  }
  float sum[kWidth] = {};
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float dy[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + column, dy);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum[i] += dy[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    p.partials[int64_t{blockIdx.y} * p.columns + column + i] = sum[i];
  }
}

// T: of dx; G: of the table's gradient.
template <typename T, typename G, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    PositionGradientKernel(const __grid_constant__ PositionGradientParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  for (int64_t position = blockIdx.y; position < p.period && position < p.rows;
       position += gridDim.y) {
    G* to = static_cast<G*>(p.dtable) + position * p.dtable_stride;
    for (int64_t column = first; column < p.columns; column += step) {
      float sum[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sum[i] = ToFloat(to[column + i]);
      }
      for (int64_t row = position; row < p.rows; row += p.period) {
        float dx[kWidth];
        Load<T, kWidth>(static_cast<const T*>(p.dx) + row * p.dx_stride + column, dx);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          sum[i] += dx[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        to[column + i] = FromFloat<G>(sum[i]);
      }
    }
  }
}

template <typename T>
void AddBiases(std::vector<KernelEntry>& entries) {
  constexpr int kWidth = kVectorOf<T>;
  AddPair<T>(Kernel::kAddBias, AddRowsKernel<T, 1>, AddRowsKernel<T, kWidth>, entries);
  AddPair<T>(Kernel::kAddPositions, AddRowsKernel<T, 1>, AddRowsKernel<T, kWidth>, entries);
  AddPair<T>(
      Kernel::kBiasGradient, BiasGradientKernel<T, 1>, BiasGradientKernel<T, kWidth>, entries);
}

template <typename T>
void AddPositionGradients(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kPositionGradient,
             PositionGradientKernel<T, T, 1>,
             PositionGradientKernel<T, T, kVectorOf<T>>,
             entries);
}

template <typename T>
void AddWidePositionGradients(std::vector<KernelEntry>& entries) {
  AddWidePair<T>(Kernel::kPositionGradient,
                 PositionGradientKernel<T, float, 1>,
                 PositionGradientKernel<T, float, kVectorOf<T>>,
                 entries);
}

}  // namespace

std::vector<KernelEntry> BiasKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddBiases<decltype(type)>(entries); });
  AddPositionGradients<float>(entries);
  AddPositionGradients<Bf16>(entries);
  AddWidePositionGradients<Bf16>(entries);
  AddWidePositionGradients<Fp16>(entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
