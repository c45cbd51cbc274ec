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
#include <vector>

#include "common/gemm_scales.h"
#include "common/recipe.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// amax [ceil(R / edge), ceil(columns / edge)] u32 = max(amax, magnitudes of the blocks' elements),
// for rows [first_row, first_row + rows) of a matrix of R rows; edge 0: amax [1, 1]. None of a
// block that has rows here is less than epsilon afterwards. Rows of a grid may be strided, here and
// in WeightScales: columns of a matrix that is cut have part of its grid. Threads may raise the
// same words at once.
struct BlockAmaxArgs {
  TensorView from;  // [rows, columns] fp32, contiguous
  int64_t first_row = 0;
  int64_t edge = 0;
  TensorView amax;
  float epsilon = 0;
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
  TensorView codes;        // [rows, columns / CodesPerByte] u8, contiguous
  TensorView unless = {};  // fp32 [1]: where it is not 0, codes stay as they are
};
void QuantizeWeight(Stream& stream, const QuantizeWeightArgs& args);

// to [R, columns] bf16 = decoded codes; *scale = the tensor's decode scale. With `to` absent only
// the latter, of kDelayed, kCurrent and kNvFp4.
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
  static constexpr uint32_t kMostPieces = 1u << 11;  // of a site, told apart
  uint64_t seed = 0;
  uint32_t step = 0;
  const int64_t* device_step = nullptr;  // memory of the stream's device, read in place of `step`
  uint32_t site = 0;
  uint32_t piece = 0;  // PhiloxPosition::piece
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
// *non_finite |= 1 if an amax is not finite. Amaxes below epsilon count as that.
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
  float epsilon = 0;
};
void QuantizeActivation(Stream& stream, const QuantizeActivationArgs& args);

// Codes of an activation with one scale (kDelayed, kCurrent), for gemms of codes: those that
// QuantizeActivation decodes, as they lie, transposed, or both. encode, staged, scale, non_finite
// and epsilon are as there. Columns, and where they are transposed tokens, are multiples of 16; on
// CUDA rows begin at multiples of 8 bytes.
inline constexpr int64_t kCodesStep = 16;
struct QuantizeCodesArgs {
  plan::Recipe recipe = plan::Recipe::kNone;
  ActivationRole role = ActivationRole::kInput;
  TensorView from;             // [tokens, columns] bf16; rows may be strided
  TensorView codes = {};       // [tokens, columns] u8, contiguous
  TensorView transposed = {};  // [columns, tokens] u8, contiguous
  TensorView scale;            // fp32 [1]: out
  TensorView encode = {};      // fp32 [1]
  TensorView staged = {};      // u32 [1]
  TensorView non_finite = {};  // u32 [1]
  float epsilon = 0;
};
void QuantizeCodes(Stream& stream, const QuantizeCodesArgs& args);

// Codes of an activation with a scale for each block (kFloat8Block, kMxFp8, kNvFp4), for gemms of
// codes: those that QuantizeActivation decodes along the same index, and their scales. Along
// columns codes lie as values do; along rows they are transposed, so that blocks lie along the
// inner index of a gemm in either case. Sizes and addresses as with QuantizeCodes; scales at a
// multiple of 16 bytes. Codes of kNvFp4 lie two to a byte, element 2k in the low nibble; both sizes
// are multiples of 32, and *scale is the tensor's decode scale, which a gemm takes beside those of
// blocks.
// as_mxfp8, of kFloat8Block: a scale, which is a power of two, becomes those of four blocks of 32,
// for gemms of kMxFp8; then sizes are multiples of 32.
constexpr ScaleForm ActivationScaleForm(plan::Recipe recipe, bool as_mxfp8 = false) {
  switch (recipe) {
    case plan::Recipe::kFloat8Block:
      return as_mxfp8 ? ScaleForm::kBlocks32 : ScaleForm::kBlocks128;
    case plan::Recipe::kMxFp8:
      return ScaleForm::kBlocks32;
    case plan::Recipe::kNvFp4:
      return ScaleForm::kBlocks16;
    default:
      return ScaleForm::kTensor;
  }
}
// The multiple that sizes of codes are: rows of them are then whole 16 bytes.
constexpr int64_t CodesStep(plan::Recipe recipe) {
  return kCodesStep * plan::CodesPerByte(recipe);
}
struct QuantizeBlocksArgs {
  plan::Recipe recipe = plan::Recipe::kNone;
  ActivationRole role = ActivationRole::kInput;  // of kNvFp4: gradients are rounded stochastically
  BlocksAlong along = BlocksAlong::kColumns;
  TensorView from;             // [tokens, columns] bf16; rows may be strided
  TensorView codes;            // [tokens, columns / CodesPerByte] u8, or transposed; contiguous
  TensorView scales;           // u8 [ScaleBytes]
  TensorView scale = {};       // fp32 [1]: out, of kNvFp4 alone
  TensorView non_finite = {};  // u32 [1]
  ActivationDraws draws = {};
  float epsilon = 0;  // as QuantizeActivation's
  bool as_mxfp8 = false;
};
void QuantizeBlocks(Stream& stream, const QuantizeBlocksArgs& args);

// Scales of a weight's codes, for gemms of codes that sum over its columns (`inner` kColumns) or,
// of transposed codes, over its rows. A gemm's operand may be of several weights, one below the
// other: this one's rows begin at first_row of all_rows. The first one's scales are made first.
// Sizes of the weight are multiples of the edge of its blocks.
constexpr ScaleForm WeightScaleForm(plan::Recipe recipe, bool as_mxfp8 = false) {
  return recipe == plan::Recipe::kFloat8Block && !as_mxfp8 ? ScaleForm::kSquares128
                                                           : ActivationScaleForm(recipe, as_mxfp8);
}
struct PlaceScalesArgs {
  WeightScales scales;
  BlocksAlong inner = BlocksAlong::kColumns;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t first_row = 0;
  int64_t all_rows = 0;
  TensorView to;  // u8 [ScaleBytes] of the whole operand
  bool as_mxfp8 = false;
};
void PlaceScales(Stream& stream, const PlaceScalesArgs& args);

// to [columns, rows] u8 = the transposed codes, one or, as those of kNvFp4, two to a byte. Both are
// contiguous; both sizes are multiples of 16, or of 32.
struct TransposeCodesArgs {
  TensorView from;  // [rows, columns / codes_per_byte] u8
  TensorView to;    // [columns, rows / codes_per_byte] u8
  int64_t codes_per_byte = 1;
};
void TransposeCodes(Stream& stream, const TransposeCodesArgs& args);

// Delayed scales of any number of domains (kDelayed). A domain has three slots: weight, input and
// gradient (E5M2). encode(history) = div(largest code * 2^-margin, amax of the history), FLT_MAX
// where that is infinite, 0 where the history is all zero or not finite.
//
// Where `apply` (u32 or i32 [1]; absent: yes) is not 0: the scale of a weight's codes becomes its
// next one, or, where that is 0, follows from its amax; of each slot of which the amax is not 0 the
// history drops its oldest entry and takes the amax; and the next scale is encode(history). Else
// nothing changes. Amaxes of inputs and gradients are 0 afterwards in either case. With absent
// amaxes (both) only the next scales follow from the histories. The third word of a weight's slot
// says whether codes that the update before has cast by the next scale, if there was one, are those
// of the scale now: 1, or 0 where there was none. That of other slots is 0. A block per slot.
inline constexpr int64_t kDelayedSlots = 3;
inline constexpr int64_t kDelayedWords = 3;
struct DelayedScalesArgs {
  TensorView weight_amax = {};      // u32 [domains]
  TensorView activation_amax = {};  // u32 [domains, 2]
  TensorView scales;                // fp32 [3 * domains, 3]: of the codes, the next, the third
  TensorView histories;             // fp32 [3 * domains, length], oldest first
  TensorView apply = {};
  int64_t margin = 0;   // binades, at most 8
  bool newest = false;  // encode follows from the newest entry alone
  bool ones = false;    // 1 takes the place of a next scale of 0, and of a weight's first one
};
void UpdateDelayedScales(Stream& stream, const DelayedScalesArgs& args);

// out [n] u32 = the largest of the pieces' words, and, if it `accumulates`, of its own. Memory of
// the stream's device; out is none of the pieces.
struct LargestWordsArgs {
  std::vector<const uint32_t*> pieces;
  TensorView out;
  bool accumulates = false;
};
void LargestWords(Stream& stream, const LargestWordsArgs& args);

}  // namespace ravel::kernels
