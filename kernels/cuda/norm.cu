// RMSNorm, one block per row. Forward reads x (and the residual) once and writes y (and the sum);
// backward reads dy and the sum once. Memory-bound. The trick: a row stays in registers between its
// sum of squares and its scaling; what does not fit is read again, from cache.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

// The sum of x and the residual of one vector, stored where the caller wants it.
template <typename T, int kWidth>
__device__ inline void LoadSum(const RmsNormForwardParams& p,
                               int64_t row,
                               int64_t column,
                               float (&value)[kWidth]) {
  Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + column, value);
  if (p.residual != nullptr) {
    float residual[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.residual) + row * p.residual_stride + column, residual);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = ToFloat(FromFloat<T>(value[i] + residual[i]));
    }
  }
}

template <typename T, int kWidth>
__device__ inline void ScaleVector(const RmsNormForwardParams& p,
                                   int64_t row,
                                   int64_t column,
                                   float rstd,
                                   const float (&value)[kWidth]) {
  float w[kWidth];
  Load<T, kWidth>(static_cast<const T*>(p.w) + column, w);
  float y[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    y[i] = value[i] * rstd * w[i];
  }
  Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + column, y);
}

template <typename T, int kWidth>
__device__ inline void NormRow(const RmsNormForwardParams& p, int64_t row, float* shared) {
  const int64_t step = int64_t{blockDim.x} * kWidth;
  const int64_t first = int64_t{threadIdx.x} * kWidth;
  T* sum = static_cast<T*>(p.sum);
  float kept[kNormVectors][kWidth];
  float squares = 0.0f;
  const auto take = [&](int64_t column, float(&value)[kWidth]) {
    LoadSum<T, kWidth>(p, row, column, value);
    if (sum != nullptr) {
      Store<T, kWidth>(sum + row * p.sum_stride + column, value);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      squares = fmaf(value[i], value[i], squares);
    }
  };
#pragma unroll
  for (int k = 0; k < kNormVectors; ++k) {
    if (first + k * step < p.columns) {
      take(first + k * step, kept[k]);
    }
  }
  for (int64_t column = first + kNormVectors * step; column < p.columns; column += step) {
    float value[kWidth];
    take(column, value);
  }
  const float mean = SumOfBlock(squares, shared) / static_cast<float>(p.columns);
  const float rstd = 1.0f / sqrtf(mean + p.epsilon);
  if (threadIdx.x == 0) {
    p.rstd[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kNormVectors; ++k) {
    if (first + k * step < p.columns) {
      ScaleVector<T, kWidth>(p, row, first + k * step, rstd, kept[k]);
    }
  }
  for (int64_t column = first + kNormVectors * step; column < p.columns; column += step) {
    float value[kWidth];
    if (p.residual != nullptr) {  // `sum` may be the memory of x or of the residual
      Load<T, kWidth>(sum + row * p.sum_stride + column, value);
    } else {
      LoadSum<T, kWidth>(p, row, column, value);
    }
    ScaleVector<T, kWidth>(p, row, column, rstd, value);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kNormMaxThreads)
    RmsNormForwardKernel(const __grid_constant__ RmsNormForwardParams p) {
  __shared__ float shared[32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    NormRow<T, kWidth>(p, row, shared);
  }
}

template <typename T, int kWidth>
struct BackwardVector {
  float dy[kWidth];
  float x[kWidth];
  float w[kWidth];

  __device__ void Read(const RmsNormBackwardParams& p, int64_t row, int64_t column) {
    Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + column, dy);
    Load<T, kWidth>(static_cast<const T*>(p.sum) + row * p.sum_stride + column, x);
    Load<T, kWidth>(static_cast<const T*>(p.w) + column, w);
  }
  __device__ float Dot(float dot) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dot = fmaf(w[i] * dy[i], x[i], dot);
    }
    return dot;
  }
  // `pull` is rstd^2 * mean(sum * w * dy).
  __device__ void Write(const RmsNormBackwardParams& p,
                        int64_t row,
                        int64_t column,
                        float rstd,
                        float pull,
                        float (&dw)[kWidth]) const {
    float dx[kWidth];
    if (p.dresidual != nullptr) {
      Load<T, kWidth>(static_cast<const T*>(p.dresidual) + row * p.dresidual_stride + column, dx);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        dx[i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dw[i] = fmaf(dy[i], x[i] * rstd, dw[i]);
      dx[i] = fmaf(fmaf(-x[i], pull, w[i] * dy[i]), rstd, dx[i]);
    }
    Store<T, kWidth>(static_cast<T*>(p.dx) + row * p.dx_stride + column, dx);
  }
};

// Beyond what registers hold, a partial sum of dw lives in its place in memory, which one thread
// alone touches.
template <typename T, int kWidth>
__device__ inline void BackwardRest(const RmsNormBackwardParams& p,
                                    int64_t row,
                                    int64_t begin,
                                    int64_t step,
                                    float rstd,
                                    float pull) {
  float* partial = p.partials + int64_t{blockIdx.x} * p.columns;
  for (int64_t column = begin; column < p.columns; column += step) {
    BackwardVector<T, kWidth> value;
    value.Read(p, row, column);
    float dw[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dw[i] = row == blockIdx.x ? 0.0f : partial[column + i];
    }
    value.Write(p, row, column, rstd, pull, dw);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      partial[column + i] = dw[i];
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kNormMaxThreads)
    RmsNormBackwardKernel(const __grid_constant__ RmsNormBackwardParams p) {
  __shared__ float shared[32];
  const int64_t step = int64_t{blockDim.x} * kWidth;
  const int64_t first = int64_t{threadIdx.x} * kWidth;
  // Two vectors of 8 keep everything in registers; the third and fourth are read twice.
  constexpr int kKept = kNormVectors / 2;
  float dw[kKept][kWidth] = {};
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    BackwardVector<T, kWidth> kept[kKept];
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (first + k * step < p.columns) {
        kept[k].Read(p, row, first + k * step);
        dot = kept[k].Dot(dot);
      }
    }
    for (int64_t column = first + kKept * step; column < p.columns; column += step) {
      BackwardVector<T, kWidth> value;
      value.Read(p, row, column);
      dot = value.Dot(dot);
    }
    const float mean = SumOfBlock(dot, shared) / static_cast<float>(p.columns);
    const float rstd = p.rstd[row];
    const float pull = rstd * rstd * mean;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (first + k * step < p.columns) {
        kept[k].Write(p, row, first + k * step, rstd, pull, dw[k]);
      }
    }
    BackwardRest<T, kWidth>(p, row, first + kKept * step, step, rstd, pull);
  }
  float* partial = p.partials + int64_t{blockIdx.x} * p.columns;
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (first + k * step < p.columns) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        partial[first + k * step + i] = dw[k][i];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kFlatThreads)
    SumPartialsKernel(const __grid_constant__ SumPartialsParams p) {
  T* out = static_cast<T*>(p.out);
  for (int64_t j = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < p.columns;
       j += int64_t{gridDim.x} * blockDim.x) {
    float sum = p.accumulate != 0 ? ToFloat(out[j]) : 0.0f;
#pragma unroll 8
    for (int64_t row = 0; row < p.partial_rows; ++row) {
      sum += p.partials[row * p.columns + j];
    }
    out[j] = FromFloat<T>(sum);
  }
}

template <typename T>
void AddNorms(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kRmsNormForward,
             RmsNormForwardKernel<T, 1>,
             RmsNormForwardKernel<T, kVectorOf<T>>,
             entries);
  AddPair<T>(Kernel::kRmsNormBackward,
             RmsNormBackwardKernel<T, 1>,
             RmsNormBackwardKernel<T, kVectorOf<T>>,
             entries);
}

}  // namespace

std::vector<KernelEntry> NormKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kSumPartials, kF32Scalar, SumPartialsKernel<float>),
      EntryOf(Kernel::kSumPartials, kBf16Scalar, SumPartialsKernel<Bf16>)};
  ForEachFloat([&](auto type) { AddNorms<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
