// Quantization by rows: the scales of a row of blocks first, then its codes, in strips whose loops
// belong to the instruction set (quantize_strip.h). An activation with one scale for the tensor is
// read twice. NVFP4 along rows is transformed into the result first and quantized there in place.

#include "kernels/cpu/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/hadamard.h"

namespace ravel::kernels::cpu {
namespace {

const QuantizeLoops& Loops() {
  return *ActiveOps().quantize;
}

// The edge of blocks, or that of a block that holds `extent`.
int64_t EdgeOrAll(int64_t edge, int64_t extent) {
  return edge > 0 ? edge : std::max<int64_t>(1, extent);
}

// Scales of blocks that lie next to each other.
struct ScaleRow {
  explicit ScaleRow(int64_t blocks) : encode(Size(blocks)), decode(Size(blocks)) {}
  void Make(plan::Recipe recipe, const uint32_t* amax, float tensor, uint32_t big) {
    Loops().block_scales({.recipe = recipe,
                          .amax = amax,
                          .blocks = std::ssize(encode),
                          .tensor = tensor,
                          .big = big,
                          .encode = encode.data(),
                          .decode = decode.data()});
  }
  StripScales Of(int64_t block) const { return {encode.data(), decode.data(), block}; }

  std::vector<float> encode;
  std::vector<float> decode;
};

scalar::Scales TensorScalesOf(const WeightScales& scales) {
  const TensorView& amax =
      scales.recipe == plan::Recipe::kCurrent ? scales.amax : scales.domain_amax;
  return scalar::WeightTensorScales(scales.recipe,
                                    amax.present() ? *amax.As<uint32_t>() : 0,
                                    scales.encode.present() ? *scales.encode.As<float>() : 0.0f);
}

CodeForm WeightForm(plan::Recipe recipe) {
  return recipe == plan::Recipe::kNvFp4 ? CodeForm::kE2M1 : CodeForm::kE4M3;
}

// visit(row, scales) for the rows [first, first + rows) of a weight, each with the scales of its
// blocks.
template <typename Visit>
void ForEachWeightRow(
    const WeightScales& scales, int64_t first, int64_t rows, int64_t columns, const Visit& visit) {
  const float tensor = TensorScalesOf(scales).encode;
  const int64_t edge = plan::BlockEdge(scales.recipe);
  const int64_t block = EdgeOrAll(edge, columns);
  const int64_t grid_columns = DivCeil(columns, block);
  ScaleRow row_scales(grid_columns);
  int64_t grid_row = -1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t next = edge > 0 ? (first + row) / edge : 0;
    if (next != grid_row) {
      grid_row = next;
      // One scale for the tensor is `tensor`, whatever the amax.
      const uint32_t none = 0;
      const uint32_t* amax = edge > 0 ? scales.amax.Row<uint32_t>(grid_row) : &none;
      row_scales.Make(scales.recipe, amax, tensor, scalar::kLargestF32Bits);
    }
    visit(row, row_scales.Of(block));
  }
}

}  // namespace

void BlockAmax(const BlockAmaxArgs& args) {
  const int64_t columns = args.from.size[1];
  // Blocks of one element are for words that no other thread raises.
  const int64_t block = std::max<int64_t>(2, EdgeOrAll(args.edge, columns));
  for (int64_t row = 0; row < args.from.size[0]; ++row) {
    const int64_t grid_row = args.edge > 0 ? (args.first_row + row) / args.edge : 0;
    Loops().block_amax_f32(
        args.from.Row<float>(row), columns, block, args.amax.Row<uint32_t>(grid_row));
  }
  const int64_t rows = args.from.size[0];
  if (args.epsilon == 0 || rows == 0) {
    return;
  }
  const int64_t first = args.edge > 0 ? args.first_row / args.edge : 0;
  const int64_t end = args.edge > 0 ? DivCeil(args.first_row + rows, args.edge) : 1;
  for (int64_t grid_row = first; grid_row < end; ++grid_row) {
    auto* amax = args.amax.Row<uint32_t>(grid_row);
    for (int64_t i = 0; i < DivCeil(columns, block); ++i) {
      RaiseWord(amax[i], std::bit_cast<uint32_t>(args.epsilon));
    }
  }
}

void QuantizeWeight(const QuantizeWeightArgs& args) {
  if (args.unless.present() && *args.unless.As<float>() != 0) {
    return;
  }
  const int64_t columns = args.from.size[1];
  const int64_t row_bytes = columns / plan::CodesPerByte(args.scales.recipe);
  ForEachWeightRow(args.scales,
                   args.first_row,
                   args.from.size[0],
                   columns,
                   [&](int64_t row, const StripScales& scales) {
                     Loops().encode({.from = args.from.As<float>() + row * columns,
                                     .codes = args.codes.As<uint8_t>() + row * row_bytes,
                                     .elements = columns,
                                     .form = WeightForm(args.scales.recipe),
                                     .scales = scales});
                   });
}

void DecodeWeight(const DecodeWeightArgs& args) {
  *args.scale.As<float>() = TensorScalesOf(args.scales).decode;
  if (!args.to.present()) {
    return;
  }
  const int64_t columns = args.to.size[1];
  const int64_t row_bytes = columns / plan::CodesPerByte(args.scales.recipe);
  ForEachWeightRow(
      args.scales, 0, args.to.size[0], columns, [&](int64_t row, const StripScales& scales) {
        Loops().decode({.codes = args.codes.As<uint8_t>() + row * row_bytes,
                        .to = args.to.As<uint16_t>() + row * columns,
                        .elements = columns,
                        .form = WeightForm(args.scales.recipe),
                        .scales = scales});
      });
}

namespace {

// An activation on its way: `from` is what is quantized.
class ActivationCast {
 public:
  explicit ActivationCast(const QuantizeActivationArgs& args)
      : args_(args),
        from_(args.from),
        tokens_(args.from.size[0]),
        columns_(args.from.size[1]),
        edge_(plan::BlockEdge(args.recipe)),
        least_(std::bit_cast<uint32_t>(args.epsilon)),
        largest_(least_) {}

  void Run() {
    const bool along_rows = args_.along == BlocksAlong::kRows && edge_ > 0;
    if (along_rows && args_.recipe == plan::Recipe::kNvFp4) {
      Transform();
    }
    const scalar::Scales tensor = TensorScale();
    if (along_rows) {
      BlocksOfRows(tensor.encode);
    } else {
      BlocksOfColumns(tensor.encode);
    }
    *args_.scale.As<float>() = tensor.decode;
    if (args_.non_finite.present() && largest_ >= scalar::kInfinityBits) {
      *args_.non_finite.As<uint32_t>() |= 1u;
    }
  }

 private:
  void Transform() {
    for (int64_t row = 0; row < tokens_; row += scalar::kHadamardSize) {
      Loops().hadamard({.from = args_.from.Row<uint16_t>(row),
                        .from_stride = args_.from.row_stride,
                        .to = args_.to.Row<uint16_t>(row),
                        .to_stride = args_.to.row_stride,
                        .columns = columns_});
    }
    from_ = args_.to;
  }

  bool gradient() const { return args_.role == ActivationRole::kGradient; }
  bool per_tensor() const { return edge_ == 0; }

  scalar::Scales TensorScale() {
    if (per_tensor() || args_.recipe == plan::Recipe::kNvFp4) {
      for (int64_t row = 0; row < tokens_; ++row) {
        Loops().block_amax_bf16(
            from_.Row<uint16_t>(row), columns_, std::max<int64_t>(2, columns_), &largest_);
      }
    }
    const bool delayed = args_.recipe == plan::Recipe::kDelayed;
    if (delayed && args_.staged.present()) {
      uint32_t& staged = *args_.staged.As<uint32_t>();
      staged = std::max(staged, largest_);
    }
    if (delayed && args_.encode.present() && *args_.encode.As<float>() != 0.0f) {
      const float encode = *args_.encode.As<float>();
      return {encode, 1.0f / encode};
    }
    return scalar::TensorScales(
        args_.recipe, largest_, gradient() ? scalar::kLargestE5M2Value : scalar::kLargestE4M3Value);
  }

  CodeForm Form() const {
    if (args_.recipe == plan::Recipe::kNvFp4) {
      return CodeForm::kE2M1;
    }
    return per_tensor() && gradient() ? CodeForm::kE5M2 : CodeForm::kE4M3;
  }

  StripDraws Draws(int64_t row) const {
    if (args_.recipe != plan::Recipe::kNvFp4 || !gradient()) {
      return {};
    }
    const ActivationDraws& draws = args_.draws;
    const int64_t token = row % draws.sequence_tokens;
    const auto sample = static_cast<uint32_t>(row / draws.sequence_tokens);
    return {.present = true,
            .seed = draws.seed,
            .position = {.sample = draws.first_sample + sample,
                         .step = draws.device_step != nullptr
                                     ? static_cast<uint32_t>(*draws.device_step)
                                     : draws.step,
                         .site = draws.site,
                         .piece = draws.piece,
                         .purpose = args_.along == BlocksAlong::kColumns
                                        ? scalar::PhiloxPurpose::kGradientAlongColumns
                                        : scalar::PhiloxPurpose::kGradientAlongRows},
            .index = static_cast<uint64_t>(token * columns_)};
  }

  void CastRow(int64_t row, const StripScales& scales) const {
    Loops().round_trip({.from = from_.Row<uint16_t>(row),
                        .to = args_.to.Row<uint16_t>(row),
                        .elements = columns_,
                        .form = Form(),
                        .scales = scales,
                        .draws = Draws(row)});
  }

  void Note(const std::vector<uint32_t>& amax) {
    for (const uint32_t bits : amax) {
      largest_ = std::max(largest_, bits);
    }
  }

  void BlocksOfColumns(float tensor) {
    const int64_t block = EdgeOrAll(edge_, columns_);
    std::vector<uint32_t> amax(Size(DivCeil(columns_, block)));
    ScaleRow scales(std::ssize(amax));
    for (int64_t row = 0; row < tokens_; ++row) {
      if (!per_tensor()) {
        std::fill(amax.begin(), amax.end(), least_);
        Loops().block_amax_bf16(from_.Row<uint16_t>(row), columns_, block, amax.data());
        Note(amax);
      }
      if (row == 0 || !per_tensor()) {
        scales.Make(args_.recipe, amax.data(), tensor, scalar::kLargestBf16Bits);
      }
      CastRow(row, scales.Of(block));
    }
  }

  void BlocksOfRows(float tensor) {
    std::vector<uint32_t> amax(Size(columns_));
    ScaleRow scales(columns_);
    for (int64_t top = 0; top < tokens_; top += edge_) {
      const int64_t bottom = std::min(tokens_, top + edge_);
      std::fill(amax.begin(), amax.end(), least_);
      for (int64_t row = top; row < bottom; ++row) {
        Loops().block_amax_bf16(from_.Row<uint16_t>(row), columns_, 1, amax.data());
      }
      Note(amax);
      scales.Make(args_.recipe, amax.data(), tensor, scalar::kLargestBf16Bits);
      for (int64_t row = top; row < bottom; ++row) {
        CastRow(row, scales.Of(1));
      }
    }
  }

  const QuantizeActivationArgs& args_;
  TensorView from_;
  int64_t tokens_;
  int64_t columns_;
  int64_t edge_;
  uint32_t least_;    // amax of a block
  uint32_t largest_;  // amax of all that was seen
};

// encode of kernels/quantize.h.
float EncodeOf(const DelayedScalesArgs& args, int64_t slot, float largest) {
  const int64_t length = args.histories.size[1];
  const float* history = args.histories.As<float>() + slot * length;
  uint32_t amax = 0;
  for (int64_t i = args.newest ? length - 1 : 0; i < length; ++i) {
    amax = std::max(amax, scalar::MagnitudeBits(history[i]));
  }
  const bool usable = amax != 0 && amax < scalar::kInfinityBits;
  return usable ? scalar::ScaleOf({.largest = largest}, amax) : args.ones ? 1.0f : 0.0f;
}

}  // namespace

void QuantizeActivation(const QuantizeActivationArgs& args) {
  ActivationCast(args).Run();
}

// For comparison with devices: one element after another.
void QuantizeCodes(const QuantizeCodesArgs& args) {
  const bool gradient = args.role == ActivationRole::kGradient;
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1];
  auto amax = std::bit_cast<uint32_t>(args.epsilon);
  const auto value = [&](int64_t row, int64_t column) {
    return std::bit_cast<float>(uint32_t{args.from.Row<uint16_t>(row)[column]} << 16);
  };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      amax = std::max(amax, scalar::MagnitudeBits(value(row, column)));
    }
  }
  const float given = args.encode.present() ? *args.encode.As<float>() : 0.0f;
  const scalar::Scales scales =
      given != 0
          ? scalar::Scales{given, 1.0f / given}
          : scalar::TensorScales(args.recipe,
                                 amax,
                                 gradient ? scalar::kLargestE5M2Value : scalar::kLargestE4M3Value);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float x = value(row, column) * scales.encode;
      const auto code = static_cast<uint8_t>(gradient ? scalar::E5M2::NearestCode(x)
                                                      : scalar::E4M3::NearestCode(x));
      if (args.codes.present()) {
        args.codes.Row<uint8_t>(row)[column] = code;
      }
      if (args.transposed.present()) {
        args.transposed.Row<uint8_t>(column)[row] = code;
      }
    }
  }
  *args.scale.As<float>() = scales.decode;
  if (args.staged.present()) {
    *args.staged.As<uint32_t>() = std::max(*args.staged.As<uint32_t>(), amax);
  }
  if (args.non_finite.present() && amax >= scalar::kInfinityBits) {
    *args.non_finite.As<uint32_t>() |= 1;
  }
}

void TransposeCodes(const TransposeCodesArgs& args) {
  const int64_t per_byte = args.codes_per_byte;
  const int64_t bits = 8 / per_byte;
  const uint32_t mask = (1u << bits) - 1;
  std::memset(args.to.data, 0, Size(args.to.elements()));
  for (int64_t row = 0; row < args.from.size[0]; ++row) {
    for (int64_t column = 0; column < args.from.size[1] * per_byte; ++column) {
      const uint32_t byte = args.from.Row<uint8_t>(row)[column / per_byte];
      const uint32_t code = byte >> (column % per_byte * bits) & mask;
      args.to.Row<uint8_t>(column)[row / per_byte] |=
          static_cast<uint8_t>(code << (row % per_byte * bits));
    }
  }
}

namespace {

// A block of 128 codes of an operand of [outer, inner].
struct BlockOfCodes {
  int64_t row = 0;
  int64_t block = 0;
  int64_t outer = 0;
  int64_t inner = 0;
};

// A scale of kFloat8Block, or four of kMxFp8, fewer at the end of a row.
void PlaceFloat8Scale(float decode, ScaleForm form, const BlockOfCodes& of, const TensorView& to) {
  const int64_t blocks = ScaleBlocks(form, of.inner);
  if (form != ScaleForm::kBlocks32) {
    to.As<float>()[ScaleIndex(form, of.row, of.block, of.outer, blocks)] = decode;
    return;
  }
  constexpr int64_t kFour = 4;
  for (int64_t i = of.block * kFour; i < std::min(blocks, (of.block + 1) * kFour); ++i) {
    to.As<uint8_t>()[ScaleIndex(form, of.row, i, of.outer, blocks)] =
        scalar::E8M0OfPowerOfTwo(decode);
  }
}

}  // namespace

// For comparison with devices, like QuantizeCodes.
void QuantizeBlocks(const QuantizeBlocksArgs& args) {
  if (args.recipe == plan::Recipe::kNvFp4) {
    QuantizeFp4Blocks(args);
    return;
  }
  const bool turned = args.along == BlocksAlong::kRows;
  const int64_t outer = args.from.size[turned ? 1 : 0];
  const int64_t inner = args.from.size[turned ? 0 : 1];
  const ScaleForm form = ActivationScaleForm(args.recipe, args.as_mxfp8);
  const int64_t edge = plan::BlockEdge(args.recipe);
  const int64_t blocks = DivCeil(inner, edge);
  std::memset(args.scales.data, 0, Size(args.scales.elements()));
  const auto value = [&](int64_t row, int64_t at) {
    const auto* line = args.from.Row<uint16_t>(turned ? at : row);
    return std::bit_cast<float>(uint32_t{line[turned ? row : at]} << 16);
  };
  for (int64_t row = 0; row < outer; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t end = std::min(inner, (block + 1) * edge);
      auto amax = std::bit_cast<uint32_t>(args.epsilon);
      for (int64_t at = block * edge; at < end; ++at) {
        amax = std::max(amax, scalar::MagnitudeBits(value(row, at)));
      }
      float encode = 0;
      if (args.recipe == plan::Recipe::kMxFp8) {
        const int64_t index = ScaleIndex(form, row, block, outer, blocks);
        const uint8_t code = scalar::MxFp8BlockCode(amax);
        args.scales.As<uint8_t>()[index] = code;
        encode = scalar::E8M0Multiplier(code);
      } else {
        const scalar::Scales scales =
            scalar::BlockScales<plan::Recipe::kFloat8Block>(amax, 1.0f, scalar::kLargestBf16Bits);
        PlaceFloat8Scale(scales.decode, form, {row, block, outer, inner}, args.scales);
        encode = scales.encode;
      }
      for (int64_t at = block * edge; at < end; ++at) {
        args.codes.Row<uint8_t>(row)[at] =
            static_cast<uint8_t>(scalar::E4M3::NearestCode(value(row, at) * encode));
      }
      if (args.non_finite.present() && amax >= scalar::kInfinityBits) {
        *args.non_finite.As<uint32_t>() |= 1;
      }
    }
  }
}

void PlaceScales(const PlaceScalesArgs& args) {
  const ScaleForm form = WeightScaleForm(args.scales.recipe, args.as_mxfp8);
  const bool turned = args.inner == BlocksAlong::kRows;
  const int64_t edge = plan::BlockEdge(args.scales.recipe);
  const int64_t outer = turned ? args.columns : args.all_rows;
  const int64_t inner = turned ? args.all_rows : args.columns;
  const int64_t blocks = ScaleBlocks(form, inner);
  if (args.first_row == 0) {
    std::memset(args.to.data, 0, Size(args.to.elements()));
  }
  const float tensor = TensorScalesOf(args.scales).encode;
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t column = 0; column < args.columns; ++column) {
      const int64_t of_all = args.first_row + row;
      const int64_t outer_row = turned ? column : of_all;
      const int64_t block = (turned ? of_all : column) / edge;
      const int64_t index = ScaleIndex(form, outer_row, block, outer, blocks);
      const uint32_t amax = args.scales.amax.Row<uint32_t>(row / edge)[column / edge];
      if (args.scales.recipe == plan::Recipe::kMxFp8) {
        args.to.As<uint8_t>()[index] = scalar::MxFp8BlockCode(amax);
      } else if (args.scales.recipe == plan::Recipe::kNvFp4) {
        args.to.As<uint8_t>()[index] = static_cast<uint8_t>(scalar::NvFp4BlockCode(amax, tensor));
      } else {
        PlaceFloat8Scale(scalar::WeightBlockScales(args.scales.recipe, amax, 1.0f).decode,
                         form,
                         {outer_row, block, outer, inner},
                         args.to);
      }
    }
  }
}

void UpdateDelayedScales(const DelayedScalesArgs& args) {
  const int64_t length = args.histories.size[1];
  const bool append =
      args.weight_amax.present() && (!args.apply.present() || *args.apply.As<uint32_t>() != 0);
  for (int64_t slot = 0; slot < args.histories.size[0]; ++slot) {
    const int64_t domain = slot / kDelayedSlots;
    const int64_t of = slot % kDelayedSlots;
    auto* history = args.histories.As<float>() + slot * length;
    auto* scales = args.scales.As<float>() + kDelayedWords * slot;
    uint32_t amax = 0;
    if (args.weight_amax.present() && of == 0) {
      amax = args.weight_amax.As<uint32_t>()[domain];
    } else if (args.weight_amax.present()) {
      amax = std::exchange(args.activation_amax.As<uint32_t>()[2 * domain + of - 1], 0u);
    }
    scales[2] = of == 0 && (!append || scales[1] != 0) ? 1.0f : 0.0f;
    if (append && of == 0) {
      const float first =
          args.ones ? 1.0f : scalar::ScaleOf({.largest = scalar::kLargestE4M3Value}, amax);
      scales[0] = scales[1] != 0 ? scales[1] : first;
    }
    if (append && amax != 0) {
      std::copy(history + 1, history + length, history);
      history[length - 1] = std::bit_cast<float>(amax);
    }
    const float code = of == 2 ? scalar::kLargestE5M2Value : scalar::kLargestE4M3Value;
    scales[1] = EncodeOf(args, slot, std::ldexp(code, -static_cast<int>(args.margin)));
  }
}

void LargestWords(const LargestWordsArgs& args) {
  auto* out = args.out.As<uint32_t>();
  const int64_t words = args.out.elements();
  if (!args.accumulates) {
    std::fill_n(out, words, 0u);
  }
  for (const uint32_t* piece : args.pieces) {
    for (int64_t i = 0; i < words; ++i) {
      out[i] = std::max(out[i], piece[i]);
    }
  }
}

}  // namespace ravel::kernels::cpu
