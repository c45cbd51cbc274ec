// Kernels that decide a step. Small: a few blocks beside the last gradients, bound by the latency
// of fp64 additions whose order is the specification.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::kernels::cuda {
namespace {

// Tokens one after another; the block fetches them, one thread adds. A token without a target adds
// +0, which changes no sum that began at +0.
__global__ void __launch_bounds__(kFlatThreads)
    SumLossKernel(const __grid_constant__ SumLossParams p) {
  __shared__ float tile[kLossTile];
  __shared__ int counts[kFlatThreads];
  double sum = *p.sum;
  int count = 0;
  for (int64_t begin = 0; begin < p.elements; begin += kLossTile) {
    const int64_t rest = p.elements - begin;
    const int tokens = rest < kLossTile ? static_cast<int>(rest) : kLossTile;
    for (int i = static_cast<int>(threadIdx.x); i < tokens; i += kFlatThreads) {
      const bool counts_it = p.targets[begin + i] >= 0;
      tile[i] = counts_it ? p.losses[begin + i] : 0.0f;
      count += counts_it ? 1 : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int i = 0; i < tokens; ++i) {
        sum += static_cast<double>(tile[i]);
      }
    }
    __syncthreads();
  }
  counts[threadIdx.x] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t all = 0;
    for (int i = 0; i < kFlatThreads; ++i) {
      all += counts[i];
    }
    *p.sum = sum;
    *p.tokens += all;
  }
}

// Rows [first, first + kNodeRows) of a node as a tree of adjacent pairs; rows beyond it are +0.
__device__ inline double SumOfRows(const float* rows, int64_t first, int64_t count) {
  double x[kNodeRows];
#pragma unroll
  for (int i = 0; i < kNodeRows; ++i) {
    x[i] = first + i < count ? static_cast<double>(rows[first + i]) : 0.0;
  }
#pragma unroll
  for (int width = 1; width < kNodeRows; width *= 2) {
#pragma unroll
    for (int i = 0; i < kNodeRows; i += 2 * width) {
      x[i] += x[i + width];
    }
  }
  return x[0];
}

constexpr int kMaxNodeLevels = 64;

// A block takes a node in chunks of whole subtrees; what waits for its right neighbour lies in
// `left` by level above the chunk.
__global__ void __launch_bounds__(kFlatThreads)
    SumRowNodesKernel(const __grid_constant__ SumRowNodesParams p) {
  __shared__ double tree[kFlatThreads];
  __shared__ double left[kMaxNodeLevels];
  const DeviceRowNode node = p.nodes[blockIdx.x];
  const int64_t rows = int64_t{1} << node.level;
  const float* row_sums = p.row_sums + node.first_row;
  int top = 0;
  int64_t chunk = 0;
  for (int64_t begin = 0; begin < rows; begin += kFlatThreads * kNodeRows, ++chunk) {
    tree[threadIdx.x] =
        SumOfRows(row_sums, begin + static_cast<int64_t>(threadIdx.x) * kNodeRows, rows);
    for (unsigned width = 1; width < kFlatThreads; width *= 2) {
      __syncthreads();
      if (threadIdx.x % (2 * width) == 0) {
        tree[threadIdx.x] += tree[threadIdx.x + width];
      }
    }
    if (threadIdx.x == 0) {
      double sum = tree[0];
      top = 0;
      for (int64_t index = chunk; (index & 1) != 0; index >>= 1) {
        sum = left[top++] + sum;
      }
      left[top] = sum;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.out[blockIdx.x] = left[top];
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    CountFlagsKernel(const __grid_constant__ CountFlagsParams p) {
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < p.count; i += step) {
    if (p.flags[i] != 0) {
      p.counts[i] += 1;
      p.flags[i] = 0;
    }
  }
}

__device__ inline double ValueOf(const DecideUpdateParams& p, int32_t operand) {
  return operand < 0 ? p.sums[-1 - static_cast<int64_t>(operand)]
                     : __longlong_as_double(p.messages[operand]);
}

__global__ void __launch_bounds__(kFlatThreads)
    DecideUpdateKernel(const __grid_constant__ DecideUpdateParams p) {
  constexpr int32_t kNone = INT32_MIN;
  __shared__ int64_t counts[kFlatThreads];
  int64_t begin = 0;
  for (int64_t level = 0; level < p.levels; ++level) {
    const int64_t end = p.level_ends[level];
    for (int64_t i = begin + threadIdx.x; i < end; i += kFlatThreads) {
      p.sums[i] = ValueOf(p, p.steps[i].a) + ValueOf(p, p.steps[i].b);
    }
    __syncthreads();
    begin = end;
  }
  int64_t non_finite = 0;
  for (int64_t rank = 0; rank < p.ranks; ++rank) {
    const int64_t* message = p.messages + rank * p.words + scalar::kStatisticsHeaderWords;
    for (int64_t i = threadIdx.x; i < p.tensors; i += kFlatThreads) {
      non_finite += message[i];
    }
  }
  counts[threadIdx.x] = non_finite;
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  scalar::StepTotals totals;
  totals.squared_norm = p.total == kNone ? 0.0 : ValueOf(p, p.total);
  for (int i = 0; i < kFlatThreads; ++i) {
    totals.non_finite += counts[i];
  }
  for (int64_t rank = 0; rank < p.ranks; ++rank) {
    totals.target_tokens += p.messages[rank * p.words];
  }
  DeviceStepOutcome outcome = *p.outcome;
  scalar::RecordOutcome(p.hyper,
                        __longlong_as_double(p.messages[scalar::kStatisticsRateWord]),
                        p.clip_norm,
                        p.loss_scale,
                        totals,
                        outcome);
  *p.outcome = outcome;
}

}  // namespace

std::vector<KernelEntry> StatisticsKernels() {
  return {EntryOf(Kernel::kSumLoss, 0, SumLossKernel),
          EntryOf(Kernel::kSumRowNodes, 0, SumRowNodesKernel),
          EntryOf(Kernel::kCountFlags, 0, CountFlagsKernel),
          EntryOf(Kernel::kDecideUpdate, 0, DecideUpdateKernel)};
}

}  // namespace ravel::kernels::cuda
