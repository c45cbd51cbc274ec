#pragma once

// Quantization of weights and activations by the five recipes (common/recipe.h). An amax is
// the bits of a magnitude as a uint32, so that NaN beats infinity beats finite, and a maximum of
// integers is exact in any order. Codes are made from high precision alone.
//
// A decoded operand is bf16 and exact: codes times their block scale (a power of two, or for NVFP4
// an E4M3). Only where a block's amax is below 448 * 2^-124 are low bits rounded, and what a code
// above 2^128 stands for is infinite. What one fp32 scale of the whole tensor contributes is kept
// apart, at `scale`: the operand is decoded * *scale, and GemmArgs::scale_a and scale_b take it (1
// where the recipe has none).

#include <cstdint>

#include "common/recipe.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// amax [ceil(R / edge), ceil(columns / edge)] u32 = max(amax, magnitudes of the blocks' elements),
// for rows [first_row, first_row + rows) of a matrix of R rows; edge 0: amax [1, 1].
struct BlockAmaxArgs {
  TensorView from;  // [rows, columns] fp32, contiguous
  int64_t first_row = 0;
  int64_t edge = 0;
  TensorView amax;
};
void BlockAmax(Stream& stream, const BlockAmaxArgs& args);

// The scales of a quantized weight. `amax` is the grid of BlockAmax, over the whole matrix.
struct WeightScales {
  plan::Recipe recipe = plan::Recipe::kNone;
  TensorView amax = {};
  // kDelayed: the scale (fp32, [1]) by which codes are multiplied; amax is not read. 0, which a
  // history of zeros gives, counts as 1.
  TensorView encode = {};
  // kNvFp4: amax of the domain (u32, [1]) that the tensor shares with its bundle.
  TensorView domain_amax = {};
};

// codes = the codes of rows [first_row, first_row + rows). E4M3, or packed E2M1: element 2k in the
// low nibble of byte k of a row; columns are even then.
struct QuantizeWeightArgs {
  TensorView from;  // [rows, columns] fp32, contiguous
  int64_t first_row = 0;
  WeightScales scales;
  TensorView codes;  // [rows, columns / CodesPerByte] u8, contiguous
};
void QuantizeWeight(Stream& stream, const QuantizeWeightArgs& args);

// to [R, columns] bf16 = decoded codes; *scale = the tensor's decode scale.
struct DecodeWeightArgs {
  TensorView codes;  // [R, columns / CodesPerByte] u8, contiguous
  WeightScales scales;
  TensorView to;     // bf16, contiguous
  TensorView scale;  // fp32 [1]
};
void DecodeWeight(Stream& stream, const DecodeWeightArgs& args);

// Along which index the blocks of an activation lie: kColumns for gemms whose inner index counts
// columns (forward, input gradient), kRows for those that sum over rows (weight gradient).
enum class BlocksAlong : uint8_t { kColumns, kRows };
enum class ActivationRole : uint8_t { kInput, kGradient };

// Keys of the random bits that round gradients of NVFP4 (precision: purpose 3 for kColumns, 4 for
// kRows). Rows of the matrix are tokens: row r is token r % sequence_tokens of sample
// first_sample + r / sequence_tokens of the global batch.
struct ActivationDraws {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t site = 0;
  uint32_t first_sample = 0;
  int64_t sequence_tokens = 1;
};

// to = decoded codes of `from`, as QuantizeWeight and DecodeWeight would make them one after the
// other; from and to may be the same memory.
//   kDelayed, kCurrent: inputs E4M3, gradients E5M2, one scale. kDelayed multiplies by *encode
//     where that is present and not 0, else as kCurrent; and *staged = max(*staged, amax) where
//     present.
//   kFloat8Block 128, kMxFp8 32, kNvFp4 16 elements along one index share a scale; the last block
//     of kFloat8Block may be shorter.
//   kNvFp4: kRows first multiplies each 16 rows of a column by the Hadamard matrix with signs and
//     rounds to bf16; gradients are rounded stochastically, inputs to nearest. The amax of the
//     tensor is that of what is quantized.
// *non_finite |= 1 if an amax is not finite.
struct QuantizeActivationArgs {
  plan::Recipe recipe = plan::Recipe::kNone;
  ActivationRole role = ActivationRole::kInput;
  BlocksAlong along = BlocksAlong::kColumns;
  TensorView from;             // [tokens, columns] bf16; rows may be strided
  TensorView to;               // [tokens, columns] bf16; rows may be strided
  TensorView scale;            // fp32 [1]: out
  TensorView encode = {};      // fp32 [1]
  TensorView staged = {};      // u32 [1]
  TensorView non_finite = {};  // u32 [1]
  ActivationDraws draws = {};
};
void QuantizeActivation(Stream& stream, const QuantizeActivationArgs& args);

// The scale of the next cast of one tensor by its history (kDelayed): history [length] fp32, oldest
// first, zeros where there are fewer. encode = div(largest, amax of the history), FLT_MAX where
// that is infinite, 0 where the history is all zero or not finite. Then, where `apply` (u32 or i32
// [1]; absent: yes) is not 0 and *amax is not 0, the oldest entry is dropped and *amax appended,
// and encode is of the new history.
struct DelayedScaleArgs {
  TensorView history;
  TensorView amax;    // u32 [1]
  TensorView encode;  // fp32 [1]
  TensorView apply = {};
  float largest = 448;  // 57344 for gradients
};
void UpdateDelayedScale(Stream& stream, const DelayedScaleArgs& args);

}  // namespace ravel::kernels
