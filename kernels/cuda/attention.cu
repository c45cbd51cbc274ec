// Causal grouped-query attention with online softmax, without tensor cores: the fallback where no
// cuDNN plan fits, and what such plans are compared with. 32 x 32 tiles of fp32 in shared memory,
// eight threads per row; bound by fp32 arithmetic and shared memory. Backward runs twice over the
// scores, once by keys (dk, dv) and once by queries (dq), so every sum has one owner and a fixed
// order: deterministic without atomics or workspace.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kTile = kAttentionTile;
constexpr int kRowThreads = kAttentionThreads / kTile;
constexpr int kScores = kTile / kRowThreads;  // of a row, per thread
constexpr float kLowest = -1e30f;             // a masked score; finite, so differences are numbers

// Rows of a tile lie one float apart modulo the banks.
template <int kHead>
struct Tile {
  float rows[kTile][kHead + 1];
};
struct Weights {
  float rows[kTile][kTile + 1];
};

// This thread's row of the tile, and its place among the threads of that row.
struct Place {
  int row = static_cast<int>(threadIdx.x) / kRowThreads;
  int lane = static_cast<int>(threadIdx.x) % kRowThreads;
};

// Statistics lie as [sequences][heads][tokens]; `first_token` is that of the query's sequence.
__device__ inline int64_t StatisticAt(const AttentionParams& p,
                                      int64_t first_token,
                                      int head,
                                      int64_t query) {
  return first_token * p.query_heads + head * p.sequence_tokens + query;
}

// Tokens [begin, begin + kTile) of one head; zeros beyond the sequence and beyond the head size.
template <typename T, int kHead>
__device__ inline void LoadTile(const AttentionParams& p,
                                const void* from,
                                int64_t stride,
                                int64_t first_token,
                                int64_t begin,
                                int head,
                                Tile<kHead>& tile) {
  const T* base = static_cast<const T*>(from) + int64_t{head} * p.head_size;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kHead; i += kAttentionThreads) {
    const int row = i / kHead;
    const int d = i % kHead;
    const bool inside = begin + row < p.sequence_tokens && d < p.head_size;
    tile.rows[row][d] = inside ? ToFloat(base[(first_token + begin + row) * stride + d]) : 0.0f;
  }
}

// dots[i] = a[row] . b[lane + i * kRowThreads].
template <int kHead>
__device__ inline void DotRows(const Tile<kHead>& a,
                               const Tile<kHead>& b,
                               const Place& place,
                               float (&dots)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    dots[i] = 0.0f;
  }
#pragma unroll 4
  for (int d = 0; d < kHead; ++d) {
    const float x = a.rows[place.row][d];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      dots[i] = fmaf(x, b.rows[place.lane + i * kRowThreads][d], dots[i]);
    }
  }
}

// sums[j] += weights[row][:] . tile[:][lane + j * kRowThreads], in the order of the tile's rows.
template <int kHead>
__device__ inline void AddWeighted(const Weights& weights,
                                   const Tile<kHead>& tile,
                                   const Place& place,
                                   float (&sums)[kHead / kRowThreads]) {
#pragma unroll 2
  for (int c = 0; c < kTile; ++c) {
    const float w = weights.rows[place.row][c];
#pragma unroll
    for (int j = 0; j < kHead / kRowThreads; ++j) {
      sums[j] = fmaf(w, tile.rows[c][place.lane + j * kRowThreads], sums[j]);
    }
  }
}

template <typename T, int kHead>
__device__ inline void StoreRow(const AttentionParams& p,
                                void* to,
                                int64_t stride,
                                int64_t token,
                                int head,
                                int lane,
                                float scale,
                                const float (&sums)[kHead / kRowThreads]) {
  T* row = static_cast<T*>(to) + token * stride + int64_t{head} * p.head_size;
#pragma unroll
  for (int j = 0; j < kHead / kRowThreads; ++j) {
    const int d = lane + j * kRowThreads;
    if (d < p.head_size) {
      row[d] = FromFloat<T>(sums[j] * scale);
    }
  }
}

template <int kHead>
struct ForwardMemory {
  Tile<kHead> q;
  Tile<kHead> k;
  Tile<kHead> v;
  Weights weights;
};

// One key tile: the scores of this thread's row become weights, and the running maximum and sum
// follow. Returns by what earlier results shrink.
template <int kHead>
__device__ inline float SoftmaxTile(const AttentionParams& p,
                                    ForwardMemory<kHead>& memory,
                                    const Place& place,
                                    int64_t query,
                                    int64_t key_begin,
                                    float& max,
                                    float& sum) {
  float scores[kScores];
  DotRows(memory.q, memory.k, place, scores);
  float largest = max;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const bool seen = key_begin + place.lane + i * kRowThreads <= query;
    scores[i] = seen ? scores[i] * p.scale : kLowest;
    largest = fmaxf(largest, scores[i]);
  }
  largest = MaxOfLanes<kRowThreads>(largest);
  float added = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const float weight = scores[i] == kLowest ? 0.0f : expf(scores[i] - largest);
    memory.weights.rows[place.row][place.lane + i * kRowThreads] = weight;
    added += weight;
  }
  const float shrink = expf(max - largest);
  sum = sum * shrink + SumOfLanes<kRowThreads>(added);
  max = largest;
  __syncwarp();  // a row's weights are written and read by one warp
  return shrink;
}

template <typename T, int kHead>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    AttentionForwardKernel(const __grid_constant__ AttentionParams p) {
  float* shared = DynamicShared();
  ForwardMemory<kHead>& memory = *reinterpret_cast<ForwardMemory<kHead>*>(shared);
  const Place place;
  // The longest rows first: they take longest.
  const int64_t begin = int64_t{gridDim.x - 1 - blockIdx.x} * kTile;
  const int head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (p.query_heads / p.kv_heads);
  const int64_t first_token = int64_t{blockIdx.z} * p.sequence_tokens;
  const int64_t query = begin + place.row;
  LoadTile<T>(p, p.q, p.q_stride, first_token, begin, head, memory.q);
  float sums[kHead / kRowThreads] = {};
  float max = kLowest;
  float sum = 0.0f;
  for (int64_t key = 0; key <= begin; key += kTile) {
    __syncthreads();
    LoadTile<T>(p, p.k, p.k_stride, first_token, key, kv_head, memory.k);
    LoadTile<T>(p, p.v, p.v_stride, first_token, key, kv_head, memory.v);
    __syncthreads();
    const float shrink = SoftmaxTile(p, memory, place, query, key, max, sum);
#pragma unroll
    for (int j = 0; j < kHead / kRowThreads; ++j) {
      sums[j] *= shrink;
    }
    AddWeighted(memory.weights, memory.v, place, sums);
  }
  if (query < p.sequence_tokens) {
    const int64_t token = first_token + query;
    StoreRow<T, kHead>(p, p.out, p.out_stride, token, head, place.lane, 1.0f / sum, sums);
    if (place.lane == 0) {
      p.log_sum_exp[StatisticAt(p, first_token, head, query)] = max + logf(sum);
    }
  }
}

// Values of a tile of queries that their gradients need besides q and dout.
struct QueryRows {
  float log_sum_exp[kTile];
  float delta[kTile];  // dout . out
};

template <typename T, int kHead>
__device__ inline void LoadQueryRows(const AttentionParams& p,
                                     int64_t first_token,
                                     int64_t begin,
                                     int head,
                                     const Tile<kHead>& dout,
                                     const Place& place,
                                     QueryRows& rows) {
  const int64_t query = begin + place.row;
  const bool inside = query < p.sequence_tokens;
  const int64_t token = first_token + query;
  float delta = 0.0f;
  if (inside) {
    const T* out =
        static_cast<const T*>(p.out) + token * p.out_stride + int64_t{head} * p.head_size;
    for (int d = place.lane; d < p.head_size; d += kRowThreads) {
      delta = fmaf(dout.rows[place.row][d], ToFloat(out[d]), delta);
    }
  }
  delta = SumOfLanes<kRowThreads>(delta);
  if (place.lane == 0) {
    rows.delta[place.row] = delta;
    rows.log_sum_exp[place.row] =
        inside ? p.log_sum_exp[StatisticAt(p, first_token, head, query)] : 0.0f;
  }
}

// The softmax weight of a query for a key, and the gradient of its score.
struct ScoreGradient {
  float weight;
  float gradient;
};
__device__ inline ScoreGradient GradientOf(const AttentionParams& p,
                                           float dot,
                                           float dout_dot_v,
                                           float log_sum_exp,
                                           float delta,
                                           int64_t query,
                                           int64_t key) {
  const bool seen = key <= query && query < p.sequence_tokens;
  const float weight = seen ? expf(dot * p.scale - log_sum_exp) : 0.0f;
  return {weight, weight * (dout_dot_v - delta) * p.scale};
}

template <int kHead>
struct KeysMemory {
  Tile<kHead> q;
  Tile<kHead> dout;
  Tile<kHead> k;
  Tile<kHead> v;
  Weights weights;    // [key][query]
  Weights gradients;  // of the scores
  QueryRows queries;
};

template <typename T, int kHead>
__device__ inline void AddQueryTile(const AttentionParams& p,
                                    int64_t first_token,
                                    int64_t query_begin,
                                    int64_t key_begin,
                                    int head,
                                    KeysMemory<kHead>& memory,
                                    float (&dk)[kHead / kRowThreads],
                                    float (&dv)[kHead / kRowThreads]) {
  const Place place;
  __syncthreads();
  LoadTile<T>(p, p.q, p.q_stride, first_token, query_begin, head, memory.q);
  LoadTile<T>(p, p.dout, p.dout_stride, first_token, query_begin, head, memory.dout);
  __syncthreads();
  LoadQueryRows<T>(p, first_token, query_begin, head, memory.dout, place, memory.queries);
  __syncthreads();
  float dots[kScores];
  float dout_dots[kScores];
  DotRows(memory.k, memory.q, place, dots);
  DotRows(memory.v, memory.dout, place, dout_dots);
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int row = place.lane + i * kRowThreads;
    const ScoreGradient score = GradientOf(p,
                                           dots[i],
                                           dout_dots[i],
                                           memory.queries.log_sum_exp[row],
                                           memory.queries.delta[row],
                                           query_begin + row,
                                           key_begin + place.row);
    memory.weights.rows[place.row][row] = score.weight;
    memory.gradients.rows[place.row][row] = score.gradient;
  }
  __syncwarp();
  AddWeighted(memory.weights, memory.dout, place, dv);
  AddWeighted(memory.gradients, memory.q, place, dk);
}

// dk and dv of one key tile of one key head: over the group's query heads, then the queries, in
// order.
template <typename T, int kHead>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    AttentionBackwardKeysKernel(const __grid_constant__ AttentionParams p) {
  float* shared = DynamicShared();
  KeysMemory<kHead>& memory = *reinterpret_cast<KeysMemory<kHead>*>(shared);
  const Place place;
  const int64_t begin = int64_t{blockIdx.x} * kTile;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int group = p.query_heads / p.kv_heads;
  const int64_t first_token = int64_t{blockIdx.z} * p.sequence_tokens;
  LoadTile<T>(p, p.k, p.k_stride, first_token, begin, kv_head, memory.k);
  LoadTile<T>(p, p.v, p.v_stride, first_token, begin, kv_head, memory.v);
  float dk[kHead / kRowThreads] = {};
  float dv[kHead / kRowThreads] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t query = begin; query < p.sequence_tokens; query += kTile) {
      AddQueryTile<T, kHead>(p, first_token, query, begin, head, memory, dk, dv);
    }
  }
  if (begin + place.row < p.sequence_tokens) {
    const int64_t token = first_token + begin + place.row;
    StoreRow<T, kHead>(p, p.dk, p.dk_stride, token, kv_head, place.lane, 1.0f, dk);
    StoreRow<T, kHead>(p, p.dv, p.dv_stride, token, kv_head, place.lane, 1.0f, dv);
  }
}

template <int kHead>
struct QueriesMemory {
  Tile<kHead> q;
  Tile<kHead> dout;
  Tile<kHead> k;
  Tile<kHead> v;
  Weights gradients;  // [query][key]
  QueryRows queries;
};

template <typename T, int kHead>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    AttentionBackwardQueriesKernel(const __grid_constant__ AttentionParams p) {
  float* shared = DynamicShared();
  QueriesMemory<kHead>& memory = *reinterpret_cast<QueriesMemory<kHead>*>(shared);
  const Place place;
  const int64_t begin = int64_t{gridDim.x - 1 - blockIdx.x} * kTile;
  const int head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (p.query_heads / p.kv_heads);
  const int64_t first_token = int64_t{blockIdx.z} * p.sequence_tokens;
  const int64_t query = begin + place.row;
  LoadTile<T>(p, p.q, p.q_stride, first_token, begin, head, memory.q);
  LoadTile<T>(p, p.dout, p.dout_stride, first_token, begin, head, memory.dout);
  __syncthreads();
  LoadQueryRows<T>(p, first_token, begin, head, memory.dout, place, memory.queries);
  float dq[kHead / kRowThreads] = {};
  for (int64_t key = 0; key <= begin; key += kTile) {
    __syncthreads();
    LoadTile<T>(p, p.k, p.k_stride, first_token, key, kv_head, memory.k);
    LoadTile<T>(p, p.v, p.v_stride, first_token, key, kv_head, memory.v);
    __syncthreads();
    float dots[kScores];
    float dout_dots[kScores];
    DotRows(memory.q, memory.k, place, dots);
    DotRows(memory.dout, memory.v, place, dout_dots);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = place.lane + i * kRowThreads;
      memory.gradients.rows[place.row][column] = GradientOf(p,
                                                            dots[i],
                                                            dout_dots[i],
                                                            memory.queries.log_sum_exp[place.row],
                                                            memory.queries.delta[place.row],
                                                            query,
                                                            key + column)
                                                     .gradient;
    }
    __syncwarp();
    AddWeighted(memory.gradients, memory.k, place, dq);
  }
  if (query < p.sequence_tokens) {
    StoreRow<T, kHead>(p, p.dq, p.dq_stride, first_token + query, head, place.lane, 1.0f, dq);
  }
}

template <typename Memory, Kernel kKernel, int kHead, typename Params>
KernelEntry WithMemory(int32_t variant, void (*function)(Params)) {
  static_assert(sizeof(Memory) == AttentionSharedBytes(kKernel, kHead));
  KernelEntry entry = EntryOf(kKernel, variant, function);
  entry.dynamic_shared_bytes = static_cast<int32_t>(sizeof(Memory));
  return entry;
}

template <typename T, int kHead>
void AddKernels(int32_t variant, std::vector<KernelEntry>& entries) {
  entries.push_back(WithMemory<ForwardMemory<kHead>, Kernel::kAttentionForward, kHead>(
      variant, AttentionForwardKernel<T, kHead>));
  entries.push_back(WithMemory<KeysMemory<kHead>, Kernel::kAttentionBackwardKeys, kHead>(
      variant, AttentionBackwardKeysKernel<T, kHead>));
  entries.push_back(WithMemory<QueriesMemory<kHead>, Kernel::kAttentionBackwardQueries, kHead>(
      variant, AttentionBackwardQueriesKernel<T, kHead>));
}

}  // namespace

// Variants: 4 for bf16 and 8 for fp16, plus the logarithm of the largest head size over 32.
std::vector<KernelEntry> AttentionKernels() {
  std::vector<KernelEntry> entries;
  AddKernels<float, 32>(0, entries);
  AddKernels<float, 64>(1, entries);
  AddKernels<float, 128>(2, entries);
  AddKernels<float, 256>(3, entries);
  AddKernels<Bf16, 32>(4, entries);
  AddKernels<Bf16, 64>(5, entries);
  AddKernels<Bf16, 128>(6, entries);
  AddKernels<Bf16, 256>(7, entries);
  AddKernels<Fp16, 32>(8, entries);
  AddKernels<Fp16, 64>(9, entries);
  AddKernels<Fp16, 128>(10, entries);
  AddKernels<Fp16, 256>(11, entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
