#pragma once

// Arguments of the kernels of quantization; a part of kernel_params.h, whose rules hold here.

#include <cstdint>

namespace ravel::kernels::cuda {

inline constexpr int kAmaxColumns = 128;      // of fp32, to a warp
inline constexpr int kAmaxRows = 32;          // of them, at most, to a warp
inline constexpr int kQuantizeColumns = 256;  // of bf16 with blocks along columns, to a warp
inline constexpr int kQuantizeWidth = 8;      // elements of an access by vectors

// Variants of the kernels of quantization: a scheme of codes, then accesses of 16 bytes or not.
enum QuantizeScheme : int32_t {
  kTensorE4M3 = 0,
  kTensorE5M2 = 1,  // activations alone
  kBlocksOf128 = 2,
  kBlocksOf32 = 3,
  kBlocksOfFp4 = 4,
  kBlocksOfFp4Stochastic = 5,  // activations alone
  kQuantizeSchemes = 6,
  // Scales of kBlocksOf128 for gemms of kBlocksOf32; blocks of codes and placed scales alone.
  kBlocksOf128AsMxFp8 = kQuantizeSchemes,
};
constexpr int32_t QuantizeVariant(int32_t scheme, bool vectors) {
  return 2 * scheme + (vectors ? 1 : 0);
}
// Variants of kActivationAmax.
inline constexpr int32_t kAmaxScalar = 0;
inline constexpr int32_t kAmaxVector = 1;
inline constexpr int32_t kAmaxTransform = 2;  // of the result of the Hadamard transform

struct BlockAmaxParams {
  const float* from;
  uint32_t* amax;
  int64_t first_row;
  int64_t rows;
  int64_t columns;
  int64_t edge;  // 0: one block
  int64_t grid_columns;
  uint32_t least;  // that an amax is set to at least
  uint32_t unused = 0;
};

// Sources of a weight's scales; null where the recipe has none.
struct WeightScaleParams {
  const uint32_t* amax;
  const float* encode;
  const uint32_t* domain_amax;
  int64_t grid_columns;
};

struct QuantizeWeightParams {
  const float* from;
  uint8_t* codes;
  const float* unless;  // null, or: where it is not 0, codes stay
  WeightScaleParams scales;
  int64_t first_row;
  int64_t rows;
  int64_t columns;
};

struct DecodeWeightParams {
  const uint8_t* codes;
  void* to;
  float* scale;
  WeightScaleParams scales;
  int64_t rows;
  int64_t columns;
};

struct ActivationAmaxParams {
  const void* from;
  void* to;  // of kAmaxTransform
  uint32_t* amax;
  int64_t from_stride;
  int64_t to_stride;
  int64_t rows;
  int64_t columns;
  uint32_t least;  // that the amax is set to at least
  uint32_t unused = 0;
};

struct QuantizeActivationParams {
  const void* from;
  void* to = nullptr;
  const uint32_t* amax;  // of the tensor; null where blocks have all there is of scales
  float* scale;
  const float* encode = nullptr;
  uint32_t* staged = nullptr;
  uint32_t* non_finite;
  int64_t from_stride;
  int64_t to_stride = 0;
  int64_t rows;
  int64_t columns;
  int64_t sequence_tokens;
  uint64_t seed;
  const int64_t* device_step;  // read in place of `step` when present
  uint32_t step;
  uint32_t site;
  uint32_t piece;
  uint32_t first_sample;
  uint32_t purpose;
  uint32_t least;  // amax of a block
};

inline constexpr int kCodesTile = 64;  // rows and columns of a block's tile

// Codes [columns, rows] of a matrix [rows, columns].
struct TransposedCodes {
  uint8_t* codes;  // null: none
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

struct TensorCodesParams {
  const void* from;
  uint8_t* codes;  // null: none
  TransposedCodes to;
  const uint32_t* amax;
  float* scale;
  const float* encode;
  uint32_t* staged;
  uint32_t* non_finite;
  int64_t from_stride;
  int64_t codes_stride;
};

// Variants of kTransposeCodes.
inline constexpr int32_t kOneToAByte = 0;
inline constexpr int32_t kTwoToAByte = 1;
struct TransposeCodesParams {
  const uint8_t* from;  // contiguous
  TransposedCodes to;   // rows and columns are those of codes, the stride is of bytes
};

inline constexpr int kBlockRows = 128;  // of a block's tile, where blocks lie along rows
inline constexpr int kBlockColumns = 64;

// Codes with a scale for each block. The variant is a scheme.
struct BlockCodesParams {
  const void* from;
  uint8_t* codes;  // [rows, columns], or along rows [columns, rows]
  void* scales;    // ScaleForm of the scheme's activations
  uint32_t* non_finite;
  int64_t from_stride;
  int64_t rows;
  int64_t columns;
  uint32_t least;  // amax of a block
  uint32_t unused = 0;
};

// The same of kNvFp4, two codes to a byte: what is cast as QuantizeActivation does. The variant is
// kBlocksOfFp4 or kBlocksOfFp4Stochastic.
struct Fp4CodesParams {
  QuantizeActivationParams cast;  // without `to`
  uint8_t* codes;                 // [rows, columns / 2], or along rows [columns, rows / 2]
  uint8_t* scales;                // ScaleForm::kBlocks16
};

// The scales of a weight of [rows, columns] whose rows begin at first_row of an operand. The
// variant is a scheme.
struct PlaceScalesParams {
  const uint32_t* amax;
  const uint32_t* domain_amax;  // of kBlocksOfFp4
  void* to;                     // ScaleForm of the scheme's weights
  int64_t grid_columns;
  int64_t rows;
  int64_t columns;
  int64_t first_row;
  int64_t all_rows;
  int64_t turned;  // not 0: the gemm sums over rows
};

inline constexpr int kSlotsOfDomain = 3;
inline constexpr int kWordsOfSlot = 3;
inline constexpr int32_t kNewestAmax = 1;  // of a history alone
inline constexpr int32_t kOnesFirst = 2;   // a scale without a history is 1

// A block per slot; the slots of a domain are those of its weight, input and gradient.
struct DelayedScalesParams {
  float* histories;
  float* scales;
  const uint32_t* weight_amax;  // null: histories stay
  uint32_t* activation_amax;
  const uint32_t* apply;
  int64_t slots;
  int64_t length;
  float room;       // 2^-margin, times the largest code
  int32_t choices;  // kNewestAmax, kOnesFirst
};

inline constexpr int kMaxWordPieces = 64;
struct LargestWordsParams {
  const uint32_t* pieces[kMaxWordPieces];
  uint32_t* out;
  int64_t words;
  int32_t count;
  int32_t accumulate;  // not 0: out is one of the pieces, too
};

}  // namespace ravel::kernels::cuda
