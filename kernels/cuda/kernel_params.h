#pragma once

// The kernels of libravel_cuda.so by name, and the one argument of each. Both sides of the C
// interface include this file, so a change here raises kCudaAbiVersion. Pointers are device
// addresses; strides and counts are in elements. No argument has padding: they are compared byte by
// byte (kernels/cuda_host/cuda_calls.h). Standard library only, but for the other files of params.

#include <cstdint>

#include "kernels/cuda/gemm_params.h"
#include "kernels/cuda/quantize_params.h"
#include "kernels/cuda/statistics_params.h"
#include "kernels/cuda/update_params.h"

namespace ravel::kernels::cuda {

// Strided kernels come as fp32, bf16 and fp16, each with 16-byte accesses or with one element at a
// time.
enum class Kernel : int32_t {
  kRmsNormForward,
  kRmsNormBackward,
  kSumPartials,
  kHeadNormForward,
  kHeadNormBackward,
  kLayerNormForward,
  kLayerNormBackward,
  kSwiGluForward,
  kSwiGluBackward,
  kGeluForward,
  kGeluBackward,
  kAddInPlace,
  kAddBias,
  kBiasGradient,
  kAddPositions,
  kPositionGradient,
  kRope,
  kRopeTable,
  kEmbeddingForward,
  kEmbeddingBackward,
  kCrossEntropyLoss,
  kCrossEntropyGradient,
  kAdamW,
  kElementUpdate,
  kGroupedUpdate,
  kWeightUpdate,
  kTreeAdd,
  kTreeSum,
  kReduceAdd,
  kSumDoubles,
  kRowSumSquares,
  kDigest,
  kInitNormal,
  kCast,
  kTranspose,
  kFill,
  kGemm,
  kAttentionForward,
  kAttentionBackwardKeys,
  kAttentionBackwardQueries,
  kSumLoss,
  kSumRowNodes,
  kDecideUpdate,
  kBlockAmax,
  kQuantizeWeight,
  kDecodeWeight,
  kActivationAmax,
  kQuantizeAlongColumns,
  kQuantizeAlongRows,
  kDelayedScales,
  kLargestWords,
  kCountFlags,
  kTensorCodes,
  kTransposeCodes,
  kBlockCodesAlongColumns,
  kBlockCodesAlongRows,
  kPlaceScales,
  kFp4CodesAlongColumns,
  kFp4CodesAlongRows,
  kGemmFactors,
  kSumParts,
  kVocabularyStatistics,
  kVocabularyLoss,
  kVocabularyGradient,
  kCount,
};
inline constexpr int32_t kKernelVariants = 16;
inline constexpr int32_t kKernelIds = static_cast<int32_t>(Kernel::kCount) * kKernelVariants;

constexpr int32_t KernelId(Kernel kernel, int32_t variant) {
  return static_cast<int32_t>(kernel) * kKernelVariants + variant;
}

// Variants of most kernels. "Mixed" reads bf16, or fp16, and writes fp32.
enum Variant : int32_t {
  kF32Scalar = 0,
  kF32Vector = 1,
  kBf16Scalar = 2,
  kBf16Vector = 3,
  kMixedScalar = 4,
  kMixedVector = 5,
  kFp16Scalar = 6,
  kFp16Vector = 7,
  kFp16MixedScalar = 8,
  kFp16MixedVector = 9,
};

inline constexpr int kWarpThreads = 32;
// Vectors of a row that a thread of a norm kernel keeps in registers.
inline constexpr int kNormVectors = 4;
inline constexpr int kNormMaxThreads = 512;
// Row r of a norm backward adds to partial r mod this; partials are then added in order.
inline constexpr int kNormPartials = 256;
inline constexpr int kHeadNormWarps = 4;  // of a block; a warp takes a head at a time
inline constexpr int kFlatThreads = 256;
inline constexpr int kReducePartials = 1024;
inline constexpr int kNodeRows = 8;  // rows of a node that a thread adds at a time
inline constexpr int kLossTile = 2048;
inline constexpr int kMaxTreePieces = 64;  // 2^6: the variant is the logarithm
inline constexpr int kTransposeTile = 32;
inline constexpr int kTransposeRows = 8;
inline constexpr int kGemmTile = 64;
inline constexpr int kGemmDepth = 16;
inline constexpr int kAttentionTile = 32;  // queries and keys of a tile
inline constexpr int kAttentionThreads = 256;
inline constexpr int kAttentionMaxHead = 256;

struct RmsNormForwardParams {
  const void* x;
  const void* residual;
  const void* w;
  void* sum;
  void* y;
  float* rstd;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t sum_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
  float epsilon;
  int32_t unused = 0;
};

struct RmsNormBackwardParams {
  const void* dy;
  const void* sum;
  const void* w;
  const float* rstd;
  const void* dresidual;
  void* dx;
  float* partials;  // [gridDim.x, columns]
  int64_t dy_stride;
  int64_t sum_stride;
  int64_t dresidual_stride;
  int64_t dx_stride;
  int64_t rows;
  int64_t columns;
};

// out[j] (=|+=) partials[0][j] + partials[1][j] + ...
struct SumPartialsParams {
  const float* partials;
  void* out;
  int64_t partial_rows;
  int64_t columns;
  int32_t accumulate;
  int32_t unused = 0;
};

// Rows are tokens, each of `heads` heads side by side.
struct HeadNormParams {
  const void* x;
  const void* w;
  void* y;          // forward
  const void* dy;   // backward
  void* dx;         // backward
  float* partials;  // backward: [gridDim.x * kHeadNormWarps, head_size]
  int64_t x_stride;
  int64_t y_stride;
  int64_t dy_stride;
  int64_t dx_stride;
  int64_t rows;
  int64_t heads;
  int64_t head_size;
  float epsilon;
  int32_t unused = 0;
};

struct LayerNormForwardParams {
  const void* x;
  const void* w;
  const void* b;
  void* copy;  // may be null
  void* y;
  float* mean;
  float* rstd;
  int64_t x_stride;
  int64_t copy_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
  float epsilon;
  int32_t unused = 0;
};

struct LayerNormBackwardParams {
  const void* dy;
  const void* x;
  const void* w;
  const float* mean;
  const float* rstd;
  const void* dresidual;
  void* dx;
  float* dw_partials;  // [gridDim.x, columns]
  float* db_partials;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dresidual_stride;
  int64_t dx_stride;
  int64_t rows;
  int64_t columns;
};

struct SwiGluForwardParams {
  const void* gate;
  const void* up;
  void* y;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
};

struct SwiGluBackwardParams {
  const void* gate;
  const void* up;
  const void* dy;
  void* dgate;
  void* dup;
  void* y;  // may be null
  int64_t gate_stride;
  int64_t up_stride;
  int64_t dy_stride;
  int64_t dgate_stride;
  int64_t dup_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
};

struct GeluParams {
  const void* x;
  const void* dy;  // backward
  void* dx;        // backward
  void* y;         // may be null in backward
  int64_t x_stride;
  int64_t dy_stride;
  int64_t dx_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
};

// x[t] (=|+=) table[t % period], where a bias is a table of one row.
struct AddRowsParams {
  const void* table;
  void* x;
  int64_t table_stride;
  int64_t x_stride;
  int64_t rows;
  int64_t columns;
  int64_t period;
  int32_t accumulate;
  int32_t unused = 0;
};

// partials[p] = the sum of rows p, p + gridDim.y, ...
struct BiasGradientParams {
  const void* dy;
  float* partials;  // [gridDim.y, columns]
  int64_t dy_stride;
  int64_t rows;
  int64_t columns;
};

// dtable[i] += dx[i] + dx[i + period] + ...
struct PositionGradientParams {
  const void* dx;
  void* dtable;
  int64_t dx_stride;
  int64_t dtable_stride;
  int64_t rows;
  int64_t columns;
  int64_t period;
};

struct AddInPlaceParams {
  const void* x;
  void* y;
  int64_t x_stride;
  int64_t y_stride;
  int64_t rows;
  int64_t columns;
};

struct RopeParams {
  void* x;
  const float* cosine;
  const float* sine;
  int64_t x_stride;
  int64_t cosine_stride;
  int64_t sine_stride;
  int64_t rows;
  int64_t heads;
  int64_t half;  // head_size / 2
  int64_t sequence_tokens;
  float sign;
  int32_t unused = 0;
};

struct RopeTableParams {
  const float* inverse_frequency;
  float* cosine;
  float* sine;
  int64_t cosine_stride;
  int64_t sine_stride;
  int64_t positions;
  int64_t half;
};

struct EmbeddingForwardParams {
  const int32_t* ids;
  const void* table;
  void* out;
  int64_t table_stride;
  int64_t out_stride;
  int64_t tokens;
  int64_t hidden;
  int64_t vocabulary;
  int64_t first;
  int64_t rows;
};

struct EmbeddingBackwardParams {
  const int32_t* ids;
  const void* dout;
  void* dtable;
  int64_t dout_stride;
  int64_t dtable_stride;
  int64_t tokens;
  int64_t hidden;
  int64_t vocabulary;
  int64_t first;
  int64_t rows;
};

struct CrossEntropyParams {
  void* logits;
  const int32_t* targets;
  float* loss;
  int64_t logits_stride;
  int64_t tokens;
  int64_t vocabulary;
  const float* device_loss_scale;  // read in place of `loss_scale` when present
  float loss_scale;                // of gradients
  int32_t unused = 0;
};

// A block of the vocabulary; `statistics` are its three rows.
struct VocabularyBlockParams {
  void* logits;
  const int32_t* targets;
  float* statistics;
  int64_t logits_stride;
  int64_t statistics_stride;
  int64_t tokens;
  int64_t columns;
  int64_t first_id;
  const float* device_loss_scale;  // read in place of `loss_scale` when present
  float loss_scale;                // of gradients
  int32_t unused = 0;
};

struct VocabularyLossParams {
  float* statistics;  // of 2^blocks_log blocks
  const int32_t* targets;
  float* loss;
  int64_t statistics_stride;
  int64_t tokens;
  int64_t vocabulary;
  int64_t blocks_log;
};

inline constexpr int kMaxPartPieces = 16;
struct SumPartsParams {
  const float* pieces[kMaxPartPieces];  // 2^pieces_log of them
  const void* residual;                 // or null
  const void* bias;                     // or null
  void* out;
  int64_t piece_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t rows;
  int64_t columns;
  int64_t pieces_log;
};

struct TreeAddParams {
  const float* a;
  const float* b;
  float* out;
  int64_t elements;
};

// Argument of kTreeSum and kReduceAdd. Variants: the logarithm of the number of pieces; and that
// with kBf16Sums, where pieces are bf16.
inline constexpr int32_t kBf16Sums = 8;
struct ReduceAddParams {
  const void* pieces[kMaxTreePieces];  // fp32 or bf16
  float* out;
  double* partials;     // [gridDim.x], or null
  int64_t* non_finite;  // += count, or null
  int64_t elements;
  int32_t accumulate;
  int32_t aligned;  // every piece and out lie on 16 bytes
};

struct SumDoublesParams {
  const double* values;
  double* out;
  int64_t count;
};

struct RowSumSquaresParams {
  const float* x;
  float* sums;
  int64_t* non_finite;  // may be null
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

struct DigestParams {
  const void* data;
  uint64_t* sum;  // starts at zero
  int64_t elements;
  uint64_t first_index;
  int32_t element_bytes;
  int32_t unused = 0;
};

struct InitNormalParams {
  float* out;
  int64_t elements;
  uint64_t seed;
  uint64_t first_index;
  uint32_t site;
  float standard_deviation;
};

struct CastParams {
  const void* from;
  void* to;
  int64_t elements;
  int32_t half_away;  // fp32 -> bf16, not fp16: ties away from zero, not to even
  int32_t unused = 0;
};

struct TransposeParams {
  const void* from;
  void* to;
  int64_t from_stride;
  int64_t to_stride;
  int64_t rows;  // of `from`
  int64_t columns;
};

struct FillParams {
  void* to;
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

struct AttentionParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* log_sum_exp;
  const void* dout;
  void* dq;
  void* dk;
  void* dv;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t out_stride;
  int64_t dout_stride;
  int64_t dq_stride;
  int64_t dk_stride;
  int64_t dv_stride;
  int64_t sequence_tokens;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_size;
  float scale;
};

// Dynamic shared memory of an attention kernel compiled for heads of at most `head_limit`: tiles of
// rows one float longer than a head, square tiles of weights, two floats per query.
constexpr uint32_t AttentionSharedBytes(Kernel kernel, int32_t head_limit) {
  const bool forward = kernel == Kernel::kAttentionForward;
  const bool keys = kernel == Kernel::kAttentionBackwardKeys;
  const int32_t tiles = forward ? 3 : 4;
  const int32_t squares = keys ? 2 : 1;
  const int32_t floats = tiles * kAttentionTile * (head_limit + 1) +
                         squares * kAttentionTile * (kAttentionTile + 1) +
                         (forward ? 0 : 2 * kAttentionTile);
  return static_cast<uint32_t>(floats) * static_cast<uint32_t>(sizeof(float));
}

}  // namespace ravel::kernels::cuda
