// SwiGLU, GELU and sums of activations: elementwise over rows that may have gaps. One read and one
// write of every operand, memory-bound; rows over y, 16-byte accesses along x.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

// body(row, column) for every vector of the matrix.
template <int kWidth, typename Body>
__device__ inline void ForEachVector(int64_t rows, int64_t columns, Body body) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t column = first; column < columns; column += step) {
      body(row, column);
    }
  }
}

__device__ inline float Sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    SwiGluForwardKernel(const __grid_constant__ SwiGluForwardParams p) {
  ForEachVector<kWidth>(p.rows, p.columns, [&](int64_t row, int64_t column) {
    float gate[kWidth];
    float up[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.gate) + row * p.gate_stride + column, gate);
    Load<T, kWidth>(static_cast<const T*>(p.up) + row * p.up_stride + column, up);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      up[i] *= gate[i] * Sigmoid(gate[i]);
    }
    Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + column, up);
  });
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    SwiGluBackwardKernel(const __grid_constant__ SwiGluBackwardParams p) {
  ForEachVector<kWidth>(p.rows, p.columns, [&](int64_t row, int64_t column) {
    float gate[kWidth];
    float up[kWidth];
    float dy[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.gate) + row * p.gate_stride + column, gate);
    Load<T, kWidth>(static_cast<const T*>(p.up) + row * p.up_stride + column, up);
    Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + column, dy);
    float y[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float sigmoid = Sigmoid(gate[i]);
      const float silu = gate[i] * sigmoid;
      const float slope = fmaf(silu, 1.0f - sigmoid, sigmoid);
      y[i] = silu * up[i];
      gate[i] = dy[i] * up[i] * slope;
      up[i] = dy[i] * silu;
    }
    Store<T, kWidth>(static_cast<T*>(p.dgate) + row * p.dgate_stride + column, gate);
    Store<T, kWidth>(static_cast<T*>(p.dup) + row * p.dup_stride + column, up);
    if (p.y != nullptr) {
      Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + column, y);
    }
  });
}

// The tanh form of GELU at x, and its slope.
struct GeluAt {
  float value;
  float slope;
};
__device__ inline GeluAt GeluOf(float x) {
  constexpr float kScale = 0.7978845608028654f;  // sqrt(2 / pi)
  constexpr float kCubic = 0.044715f;
  const float squared = x * x;
  const float t = tanhf(kScale * fmaf(kCubic * squared, x, x));
  const float half = 0.5f * (1.0f + t);
  const float inner = kScale * fmaf(3.0f * kCubic, squared, 1.0f);
  return {x * half, fmaf(0.5f * x * (1.0f - t * t), inner, half)};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    GeluForwardKernel(const __grid_constant__ GeluParams p) {
  ForEachVector<kWidth>(p.rows, p.columns, [&](int64_t row, int64_t column) {
    float x[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + column, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = GeluOf(x[i]).value;
    }
    Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + column, x);
  });
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    GeluBackwardKernel(const __grid_constant__ GeluParams p) {
  ForEachVector<kWidth>(p.rows, p.columns, [&](int64_t row, int64_t column) {
    float x[kWidth];
    float dy[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + column, x);
    Load<T, kWidth>(static_cast<const T*>(p.dy) + row * p.dy_stride + column, dy);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const GeluAt gelu = GeluOf(x[i]);
      x[i] = gelu.value;
      dy[i] *= gelu.slope;
    }
    Store<T, kWidth>(static_cast<T*>(p.dx) + row * p.dx_stride + column, dy);
    if (p.y != nullptr) {
      Store<T, kWidth>(static_cast<T*>(p.y) + row * p.y_stride + column, x);
    }
  });
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    AddInPlaceKernel(const __grid_constant__ AddInPlaceParams p) {
  ForEachVector<kWidth>(p.rows, p.columns, [&](int64_t row, int64_t column) {
    T* to = static_cast<T*>(p.y) + row * p.y_stride + column;
    float x[kWidth];
    float y[kWidth];
    Load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + column, x);
    Load<T, kWidth>(to, y);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      y[i] += x[i];
    }
    Store<T, kWidth>(to, y);
  });
}

template <typename T>
void AddGelu(std::vector<KernelEntry>& entries) {
  AddPair<T>(
      Kernel::kGeluForward, GeluForwardKernel<T, 1>, GeluForwardKernel<T, kVectorOf<T>>, entries);
  AddPair<T>(Kernel::kGeluBackward,
             GeluBackwardKernel<T, 1>,
             GeluBackwardKernel<T, kVectorOf<T>>,
             entries);
}

template <typename T>
void AddActivations(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kSwiGluForward,
             SwiGluForwardKernel<T, 1>,
             SwiGluForwardKernel<T, kVectorOf<T>>,
             entries);
  AddPair<T>(Kernel::kSwiGluBackward,
             SwiGluBackwardKernel<T, 1>,
             SwiGluBackwardKernel<T, kVectorOf<T>>,
             entries);
  AddPair<T>(
      Kernel::kAddInPlace, AddInPlaceKernel<T, 1>, AddInPlaceKernel<T, kVectorOf<T>>, entries);
}

}  // namespace

std::vector<KernelEntry> GeluKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddGelu<decltype(type)>(entries); });
  return entries;
}

std::vector<KernelEntry> ActivationKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddActivations<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
