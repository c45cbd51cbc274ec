// LayerNorm, one block per row: mean, variance and result each read the row, from cache after the
// first time. Memory-bound.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

template <typename T, int kWidth>
__device__ inline void NormRow(const LayerNormForwardParams& p, int64_t row, float* shared) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const int64_t step = int64_t{blockDim.x} * kWidth;
  const int64_t first = int64_t{threadIdx.x} * kWidth;
  const float count = static_cast<float>(p.columns);
  float value[kWidth];
  float sum = 0.0f;
  for (int64_t j = first; j < p.columns; j += step) {
    Load<T, kWidth>(x + j, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum += value[i];
    }
  }
  const float mean = SumOfBlock(sum, shared) / count;
  float squares = 0.0f;
  for (int64_t j = first; j < p.columns; j += step) {
    Load<T, kWidth>(x + j, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      squares = fmaf(value[i] - mean, value[i] - mean, squares);
    }
  }
  const float rstd = 1.0f / sqrtf(SumOfBlock(squares, shared) / count + p.epsilon);
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  for (int64_t j = first; j < p.columns; j += step) {
    float w[kWidth];
    float b[kWidth];
    Load<T, kWidth>(x + j, value);
    Load<T, kWidth>(static_cast<const T*>(p.w) + j, w);
    Load<T, kWidth>(static_cast<const T*>(p.b) + j, b);
    if (p.copy != nullptr) {
      Store<T, kWidth>(static_cast<T*>(p.copy) + row * p.copy_stride + j, value);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = fmaf((value[i] - mean) * rstd, w[i], b[i]);
    }
    Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + j, value);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kNormMaxThreads)
    LayerNormForwardKernel(const __grid_constant__ LayerNormForwardParams p) {
  __shared__ float shared[32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    NormRow<T, kWidth>(p, row, shared);
  }
}

// Means over a row that the gradient of each of its elements needs.
struct RowMeans {
  float mean;
  float rstd;
  float of_gradient;  // mean(w * dy)
  float of_product;   // mean(w * dy * n)
};

template <typename T, int kWidth>
__device__ inline RowMeans MeansOf(const LayerNormBackwardParams& p, int64_t row, float* shared) {
  RowMeans means = {p.mean[row], p.rstd[row], 0.0f, 0.0f};
  for (int64_t j = int64_t{threadIdx.x} * kWidth; j < p.columns; j += blockDim.x * kWidth) {
    float dy[kWidth];
    float x[kWidth];
    float w[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + j, dy);
    Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + j, x);
    Load<T, kWidth>(static_cast<const T*>(p.w) + j, w);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float wdy = w[i] * dy[i];
      means.of_gradient += wdy;
      means.of_product = fmaf(wdy, (x[i] - means.mean) * means.rstd, means.of_product);
    }
  }
  const float count = static_cast<float>(p.columns);
  means.of_gradient = SumOfBlock(means.of_gradient, shared) / count;
  means.of_product = SumOfBlock(means.of_product, shared) / count;
  return means;
}

// dx of one vector; its shares of dw and db are added.
template <typename T, int kWidth>
__device__ inline void BackwardVector(const LayerNormBackwardParams& p,
                                      int64_t row,
                                      int64_t column,
                                      const RowMeans& means,
                                      float (&dw)[kWidth],
                                      float (&db)[kWidth]) {
  float dy[kWidth];
  float x[kWidth];
  float w[kWidth];
  float dx[kWidth] = {};
  Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + column, dy);
  Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + column, x);
  Load<T, kWidth>(static_cast<const T*>(p.w) + column, w);
  if (p.dresidual != nullptr) {
    Load<T, kWidth>(static_cast<const T*>(p.dresidual) + row * p.dresidual_stride + column, dx);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float n = (x[i] - means.mean) * means.rstd;
    dw[i] = fmaf(dy[i], n, dw[i]);
    db[i] += dy[i];
    const float inner = fmaf(-n, means.of_product, w[i] * dy[i] - means.of_gradient);
    dx[i] = fmaf(inner, means.rstd, dx[i]);
  }
  Store<T, kWidth>(static_cast<T*>(p.dx) + row * p.dx_stride + column, dx);
}

// The columns beyond those that a thread keeps in registers: sums lie in their place in memory,
// which one thread alone touches.
template <typename T, int kWidth>
__device__ inline void BackwardRest(const LayerNormBackwardParams& p,
                                    int64_t row,
                                    int64_t begin,
                                    const RowMeans& means) {
  const int64_t partial = int64_t{blockIdx.x} * p.columns;
  for (int64_t j = begin; j < p.columns; j += blockDim.x * kWidth) {
    float dw[kWidth];
    float db[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dw[i] = row == blockIdx.x ? 0.0f : p.dw_partials[partial + j + i];
      db[i] = row == blockIdx.x ? 0.0f : p.db_partials[partial + j + i];
    }
    BackwardVector<T, kWidth>(p, row, j, means, dw, db);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      p.dw_partials[partial + j + i] = dw[i];
      p.db_partials[partial + j + i] = db[i];
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kNormMaxThreads)
    LayerNormBackwardKernel(const __grid_constant__ LayerNormBackwardParams p) {
  __shared__ float shared[32];
  constexpr int kKept = kNormVectors / 2;
  const int64_t step = int64_t{blockDim.x} * kWidth;
  const int64_t first = int64_t{threadIdx.x} * kWidth;
  float dw[kKept][kWidth] = {};
  float db[kKept][kWidth] = {};
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowMeans means = MeansOf<T, kWidth>(p, row, shared);
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (first + k * step < p.columns) {
        BackwardVector<T, kWidth>(p, row, first + k * step, means, dw[k], db[k]);
      }
    }
    BackwardRest<T, kWidth>(p, row, first + kKept * step, means);
  }
  const int64_t partial = int64_t{blockIdx.x} * p.columns;
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (first + k * step < p.columns) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        p.dw_partials[partial + first + k * step + i] = dw[k][i];
        p.db_partials[partial + first + k * step + i] = db[k][i];
      }
    }
  }
}

template <typename T>
void AddNorms(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kLayerNormForward,
             LayerNormForwardKernel<T, 1>,
             LayerNormForwardKernel<T, kVectorOf<T>>,
             entries);
  AddPair<T>(Kernel::kLayerNormBackward,
             LayerNormBackwardKernel<T, 1>,
             LayerNormBackwardKernel<T, kVectorOf<T>>,
             entries);
}

}  // namespace

std::vector<KernelEntry> LayerNormKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddNorms<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
