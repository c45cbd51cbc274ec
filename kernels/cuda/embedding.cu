// Rows of a table by id, and the gradient of the table, of all rows or of those that a rank has.
// Forward: one read and one write of every row, memory-bound; a row that the table lacks is -0.
// Backward: the block of a token that has its id first finds the later ones and
// adds their rows in token order, so equal inputs give equal bits without atomics or a sort; the
// search reads the ids once per block, from cache: tokens^2 * 4 bytes in all.

#include "kernels/cuda/float_variants.cuh"

namespace ravel::kernels::cuda {
namespace {

// Elements [j, j + kWidth) of a row; bits stay where the type does.
template <typename T, typename O, int kWidth>
__device__ inline void CopyRow(const T* from, O* to) {
  if constexpr (sizeof(T) == sizeof(O)) {
    *reinterpret_cast<Pack<O, kWidth>*>(to) = *reinterpret_cast<const Pack<T, kWidth>*>(from);
  } else {
    float values[kWidth];
    Load<T, kWidth>(from, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      to[i] = FromFloat<O>(values[i]);
    }
  }
}

// T: of the table; O: of what is made of it, T or fp32.
template <typename T, typename O, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    EmbeddingForwardKernel(const __grid_constant__ EmbeddingForwardParams p) {
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int32_t id = p.ids[token];
    if (id < 0 || id >= p.vocabulary) {
      __trap();  // ends the trainer, like a CHECK
    }
    const int64_t row = id - p.first;
    const bool here = row >= 0 && row < p.rows;  // the same for the whole block
    const T* from = static_cast<const T*>(p.table) + (here ? row : 0) * p.table_stride;
    O* to = static_cast<O*>(p.out) + token * p.out_stride;
    for (int64_t j = int64_t{threadIdx.x} * kWidth; j < p.hidden; j += blockDim.x * kWidth) {
      if (here) {
        CopyRow<T, O, kWidth>(from + j, to + j);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        to[j + i] = FromFloat<O>(-0.0f);
      }
    }
  }
}

// Returns true if an earlier token has the id of `token`.
__device__ inline bool SeenBefore(const int32_t* ids, int64_t token, int32_t id) {
  for (int64_t begin = 0; begin < token; begin += blockDim.x) {
    const int64_t other = begin + threadIdx.x;
    if (__syncthreads_or(other < token && ids[other] == id)) {
      return true;
    }
  }
  return false;
}

// Tokens of [begin, begin + kFlatThreads) with the id, in order: their count, and their offsets in
// `matches`.
__device__ inline int FindMatches(
    const int32_t* ids, int64_t begin, int64_t tokens, int32_t id, int* matches, int* warp_counts) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool match = begin + thread < tokens && ids[begin + thread] == id;
  const uint32_t votes = __ballot_sync(0xFFFFFFFFu, match);
  if (thread % 32 == 0) {
    warp_counts[thread / 32] = __popc(votes);
  }
  __syncthreads();  // and the last round's matches have been read
  int before = 0;
  int count = 0;
#pragma unroll
  for (int warp = 0; warp < kFlatThreads / 32; ++warp) {
    before += warp < thread / 32 ? warp_counts[warp] : 0;
    count += warp_counts[warp];
  }
  if (match) {
    matches[before + __popc(votes & ((1u << (thread % 32)) - 1u))] = thread;
  }
  __syncthreads();
  return count;
}

// T: of the activations; G: of the table's gradient. Columns of a row are cut over blockIdx.y.
template <typename T, typename G, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    EmbeddingBackwardKernel(const __grid_constant__ EmbeddingBackwardParams p) {
  __shared__ int matches[kFlatThreads];
  __shared__ int warp_counts[kFlatThreads / 32];
  const int64_t token = blockIdx.x;
  const int32_t id = p.ids[token];
  if (id < 0 || id >= p.vocabulary) {
    __trap();
  }
  const int64_t table_row = id - p.first;
  if (table_row < 0 || table_row >= p.rows || SeenBefore(p.ids, token, id)) {
    return;
  }
  const int64_t column = (int64_t{blockIdx.y} * kFlatThreads + threadIdx.x) * kWidth;
  const bool active = column < p.hidden;
  G* to = static_cast<G*>(p.dtable) + table_row * p.dtable_stride + column;
  float sum[kWidth] = {};
  if (active) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum[i] = ToFloat(to[i]);
    }
  }
  for (int64_t begin = token; begin < p.tokens; begin += kFlatThreads) {
    const int count = FindMatches(p.ids, begin, p.tokens, id, matches, warp_counts);
    for (int match = 0; active && match < count; ++match) {
      float dout[kWidth];
      const int64_t row = begin + matches[match];
      Load<T, kWidth>(static_cast<const T*>(p.dout) + row * p.dout_stride + column, dout);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sum[i] += dout[i];
      }
    }
  }
  if (active) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      to[i] = FromFloat<G>(sum[i]);
    }
  }
}

template <typename T>
void AddForward(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kEmbeddingForward,
             EmbeddingForwardKernel<T, T, 1>,
             EmbeddingForwardKernel<T, T, kVectorOf<T>>,
             entries);
}

template <typename T>
void AddBackward(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kEmbeddingBackward,
             EmbeddingBackwardKernel<T, T, 1>,
             EmbeddingBackwardKernel<T, T, kVectorOf<T>>,
             entries);
}

template <typename T>
void AddWide(std::vector<KernelEntry>& entries) {
  AddWidePair<T>(Kernel::kEmbeddingForward,
                 EmbeddingForwardKernel<T, float, 1>,
                 EmbeddingForwardKernel<T, float, kVectorOf<T>>,
                 entries);
  AddWidePair<T>(Kernel::kEmbeddingBackward,
                 EmbeddingBackwardKernel<T, float, 1>,
                 EmbeddingBackwardKernel<T, float, kVectorOf<T>>,
                 entries);
}

}  // namespace

std::vector<KernelEntry> EmbeddingKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddForward<decltype(type)>(entries); });
  AddBackward<float>(entries);
  AddBackward<Bf16>(entries);
  AddWide<Bf16>(entries);
  AddWide<Fp16>(entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
