// Host half of quantization. The amax of an activation with a scale of its own lies in the stream's
// scratch between the kernel that makes it and the one that casts.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cuda {
namespace {

using plan::Recipe;

constexpr int64_t kVectorBytes = 32;  // eight elements of fp32

void RequireWord(const TensorView& view, DType dtype) {
  CHECK_MSG(view.present() && view.dtype == dtype && view.elements() == 1,
            "one element of another type is expected");
}
void RequireWordIfPresent(const TensorView& view, DType dtype) {
  if (view.present()) {
    RequireWord(view, dtype);
  }
}

void RequireGrid(const TensorView& amax, int64_t edge, int64_t rows, int64_t columns) {
  CHECK_MSG(amax.dtype == DType::kU32, "an amax is u32");
  if (edge == 0) {
    RequireWord(amax, DType::kU32);
    return;
  }
  CHECK_MSG(amax.rank == 2 && amax.size[1] == DivCeil(columns, edge), "wrong grid of blocks");
  CHECK_MSG(amax.size[0] >= DivCeil(rows, edge), "rows outside the grid of blocks");
  CHECK_MSG(amax.present() || amax.elements() == 0, "no data");
}

WeightScaleParams ScalesOf(const WeightScales& scales, int64_t rows, int64_t columns) {
  CHECK_MSG(scales.recipe != Recipe::kNone, "a recipe is expected");
  if (scales.recipe == Recipe::kDelayed) {
    RequireWord(scales.encode, DType::kF32);
    return {.amax = nullptr,
            .encode = scales.encode.As<float>(),
            .domain_amax = nullptr,
            .grid_columns = 1};
  }
  const int64_t edge = plan::BlockEdge(scales.recipe);
  RequireGrid(scales.amax, edge, rows, columns);
  const bool two_levels = scales.recipe == Recipe::kNvFp4;
  if (two_levels) {
    RequireWord(scales.domain_amax, DType::kU32);
  }
  return {.amax = scales.amax.As<uint32_t>(),
          .encode = nullptr,
          .domain_amax = two_levels ? scales.domain_amax.As<uint32_t>() : nullptr,
          .grid_columns = edge == 0 ? 1 : scales.amax.row_stride};
}

int32_t SchemeOf(Recipe recipe) {
  switch (recipe) {
    case Recipe::kFloat8Block:
      return kBlocksOf128;
    case Recipe::kMxFp8:
      return kBlocksOf32;
    case Recipe::kNvFp4:
      return kBlocksOfFp4;
    default:
      return kTensorE4M3;
  }
}

// The variant for codes with scales for gemms.
int32_t SchemeOfBlocks(Recipe recipe, bool as_mxfp8) {
  CHECK(!as_mxfp8 || recipe == Recipe::kFloat8Block);
  return as_mxfp8 ? static_cast<int32_t>(kBlocksOf128AsMxFp8) : SchemeOf(recipe);
}

void RequireCodes(const TensorView& codes, Recipe recipe, int64_t rows, int64_t columns) {
  CHECK_MSG(columns % plan::CodesPerByte(recipe) == 0, "a row of packed codes is whole bytes");
  RequireMatrix(codes, rows, columns / plan::CodesPerByte(recipe), DType::kU8);
  CHECK_MSG(codes.contiguous(), "codes are contiguous");
}

// Whole accesses of eight elements on both sides.
bool FitsEights(const TensorView& codes, const TensorView& other, int64_t columns) {
  const auto aligned = [](const TensorView& view, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(view.data) % static_cast<uint64_t>(bytes) == 0;
  };
  return columns % kQuantizeWidth == 0 && aligned(codes, kQuantizeWidth) &&
         aligned(other, kVectorBytes);
}

// Blocks for so many warps; a kernel's loop covers what is beyond them.
std::array<uint32_t, 3> WarpGrid(const LaunchStream& on, int64_t warps) {
  return {FlatGrid(on, warps * kWarpThreads), 1, 1};
}

}  // namespace

void BlockAmax(Stream& stream, const BlockAmaxArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1];
  RequireMatrix(args.from, rows, columns, DType::kF32);
  CHECK_MSG(args.from.contiguous() && args.first_row >= 0, "contiguous rows are expected");
  CHECK_MSG(args.edge == 0 || args.edge == 16 || args.edge == 32 || args.edge == 128,
            "blocks of another edge than the recipes'");
  RequireGrid(args.amax, args.edge, args.first_row + rows, columns);
  if (rows == 0 || columns == 0) {
    return;
  }
  const int64_t chunk = args.edge == 16 ? 16 : kAmaxRows;
  const int64_t warps = (DivCeil(rows, chunk) + 1) * DivCeil(columns, int64_t{kAmaxColumns});
  on.Run({.kernel = Kernel::kBlockAmax,
          .variant = FitsVectors({args.from}) ? kF32Vector : kF32Scalar,
          .grid = WarpGrid(on, warps)},
         BlockAmaxParams{.from = args.from.As<float>(),
                         .amax = args.amax.As<uint32_t>(),
                         .first_row = args.first_row,
                         .rows = rows,
                         .columns = columns,
                         .edge = args.edge,
                         .grid_columns = args.edge == 0 ? 1 : args.amax.row_stride,
                         .least = std::bit_cast<uint32_t>(args.epsilon)});
}

void QuantizeWeight(Stream& stream, const QuantizeWeightArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const Recipe recipe = args.scales.recipe;
  RequireMatrix(args.from, rows, columns, DType::kF32);
  CHECK_MSG(args.from.contiguous() && args.first_row >= 0, "contiguous rows are expected");
  const WeightScaleParams scales = ScalesOf(args.scales, args.first_row + rows, columns);
  RequireCodes(args.codes, recipe, rows, columns);
  RequireWordIfPresent(args.unless, DType::kF32);
  if (rows == 0 || columns == 0) {
    return;
  }
  const bool eights = FitsEights(args.codes, args.from, columns);
  const int64_t width = eights ? kQuantizeWidth : plan::CodesPerByte(recipe);
  on.Run({.kernel = Kernel::kQuantizeWeight,
          .variant = QuantizeVariant(SchemeOf(recipe), eights),
          .grid = {FlatGrid(on, rows * columns / width), 1, 1}},
         QuantizeWeightParams{.from = args.from.As<float>(),
                              .codes = args.codes.As<uint8_t>(),
                              .unless = args.unless.As<float>(),
                              .scales = scales,
                              .first_row = args.first_row,
                              .rows = rows,
                              .columns = columns});
}

void DecodeWeight(Stream& stream, const DecodeWeightArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const Recipe recipe = args.scales.recipe;
  const bool decodes = args.to.present();
  const int64_t edge = plan::BlockEdge(recipe);
  CHECK_MSG(decodes || edge == 0 || recipe == Recipe::kNvFp4,
            "a scale alone has a recipe with one for the whole tensor");
  const int64_t rows = decodes ? args.to.size[0] : 0;
  const int64_t columns = decodes ? args.to.size[1] : args.scales.amax.size[1] * edge;
  if (decodes) {
    RequireMatrix(args.to, rows, columns, DType::kBF16);
    CHECK_MSG(args.to.contiguous(), "contiguous rows are expected");
  }
  const WeightScaleParams scales = ScalesOf(args.scales, rows, columns);
  if (decodes) {
    RequireCodes(args.codes, recipe, rows, columns);
  }
  RequireWord(args.scale, DType::kF32);
  const bool eights = FitsEights(args.codes, args.to, columns);
  const int64_t width = eights ? kQuantizeWidth : plan::CodesPerByte(recipe);
  on.Run({.kernel = Kernel::kDecodeWeight,
          .variant = QuantizeVariant(SchemeOf(recipe), eights),
          .grid = {FlatGrid(on, rows * columns / width), 1, 1}},
         DecodeWeightParams{.codes = args.codes.As<uint8_t>(),
                            .to = args.to.data,
                            .scale = args.scale.As<float>(),
                            .scales = scales,
                            .rows = rows,
                            .columns = columns});
}

namespace {

void RequireActivation(const QuantizeActivationArgs& args) {
  CHECK_MSG(args.recipe != Recipe::kNone, "a recipe is expected");
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  RequireMatrix(args.from, tokens, columns, DType::kBF16);
  RequireMatrix(args.to, tokens, columns, DType::kBF16);
  const bool whole_blocks = args.recipe == Recipe::kMxFp8 || args.recipe == Recipe::kNvFp4;
  const int64_t extent = args.along == BlocksAlong::kColumns ? columns : tokens;
  CHECK_MSG(!whole_blocks || extent % plan::BlockEdge(args.recipe) == 0,
            "mxfp8 and nvfp4 take whole blocks");
  CHECK_MSG(args.draws.sequence_tokens > 0, "a sequence has tokens");
  RequireWord(args.scale, DType::kF32);
  RequireWordIfPresent(args.encode, DType::kF32);
  RequireWordIfPresent(args.staged, DType::kU32);
  RequireWordIfPresent(args.non_finite, DType::kU32);
}

int32_t SchemeOf(const QuantizeActivationArgs& args) {
  const bool gradient = args.role == ActivationRole::kGradient;
  const int32_t scheme = SchemeOf(args.recipe);
  if (scheme == kBlocksOfFp4 && gradient) {
    return kBlocksOfFp4Stochastic;
  }
  return scheme == kTensorE4M3 && gradient ? int32_t{kTensorE5M2} : scheme;
}

uint32_t PurposeOf(bool along_rows) {
  return static_cast<uint32_t>(along_rows ? scalar::PhiloxPurpose::kGradientAlongRows
                                          : scalar::PhiloxPurpose::kGradientAlongColumns);
}

bool TransformsFirst(const QuantizeActivationArgs& args) {
  return args.recipe == Recipe::kNvFp4 && args.along == BlocksAlong::kRows;
}

// The amax of what is quantized, on the device; with kRows of NVFP4 `to` is the transform then.
const uint32_t* TensorAmax(LaunchStream& on, const QuantizeActivationArgs& args) {
  auto* amax = static_cast<uint32_t*>(on.Scratch(sizeof(uint32_t)));
  on.FillZero(amax, sizeof(uint32_t));
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  if (tokens == 0 || columns == 0) {
    return amax;
  }
  const bool transforms = TransformsFirst(args);
  const int64_t accesses = transforms ? tokens / plan::BlockEdge(args.recipe) * columns
                                      : tokens * DivCeil(columns, int64_t{kQuantizeWidth});
  const int32_t plain = FitsVectors({args.from}) ? kAmaxVector : kAmaxScalar;
  on.Run({.kernel = Kernel::kActivationAmax,
          .variant = transforms ? kAmaxTransform : plain,
          .grid = {FlatGrid(on, accesses), 1, 1}},
         ActivationAmaxParams{.from = args.from.data,
                              .to = transforms ? args.to.data : nullptr,
                              .amax = amax,
                              .from_stride = args.from.row_stride,
                              .to_stride = transforms ? args.to.row_stride : 0,
                              .rows = tokens,
                              .columns = columns,
                              .least = std::bit_cast<uint32_t>(args.epsilon)});
  return amax;
}

}  // namespace

void QuantizeActivation(Stream& stream, const QuantizeActivationArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  RequireActivation(args);
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const int64_t edge = plan::BlockEdge(args.recipe);
  const bool delayed = args.recipe == Recipe::kDelayed;
  const uint32_t* amax =
      edge == 0 || args.recipe == Recipe::kNvFp4 ? TensorAmax(on, args) : nullptr;
  const TensorView& from = TransformsFirst(args) ? args.to : args.from;
  const bool along_rows = args.along == BlocksAlong::kRows && edge > 0;
  const int64_t warps = along_rows ? DivCeil(tokens, edge) * DivCeil(columns, int64_t{kWarpThreads})
                                   : tokens * DivCeil(columns, int64_t{kQuantizeColumns});
  const uint32_t purpose = PurposeOf(along_rows);
  on.Run({.kernel = along_rows ? Kernel::kQuantizeAlongRows : Kernel::kQuantizeAlongColumns,
          .variant = QuantizeVariant(SchemeOf(args), !along_rows && FitsVectors({from, args.to})),
          .grid = WarpGrid(on, warps)},
         QuantizeActivationParams{.from = from.data,
                                  .to = args.to.data,
                                  .amax = amax,
                                  .scale = args.scale.As<float>(),
                                  .encode = delayed ? args.encode.As<float>() : nullptr,
                                  .staged = delayed ? args.staged.As<uint32_t>() : nullptr,
                                  .non_finite = args.non_finite.As<uint32_t>(),
                                  .from_stride = from.row_stride,
                                  .to_stride = args.to.row_stride,
                                  .rows = tokens,
                                  .columns = columns,
                                  .sequence_tokens = args.draws.sequence_tokens,
                                  .seed = args.draws.seed,
                                  .device_step = args.draws.device_step,
                                  .step = args.draws.step,
                                  .site = args.draws.site,
                                  .piece = args.draws.piece,
                                  .first_sample = args.draws.first_sample,
                                  .purpose = purpose,
                                  .least = std::bit_cast<uint32_t>(args.epsilon)});
}

namespace {

// Codes of one byte, in a matrix of this size, read and written by words.
void RequireWholeCodes(const TensorView& codes, int64_t rows, int64_t columns) {
  RequireMatrix(codes, rows, columns, DType::kU8);
  CHECK_MSG(codes.contiguous() && reinterpret_cast<uintptr_t>(codes.data) % 4 == 0,
            "codes are contiguous words");
}

// Blocks for the tiles of a matrix.
std::array<uint32_t, 3> TileGrid(const LaunchStream& on, int64_t rows, int64_t columns) {
  const int64_t tiles = DivCeil(rows, int64_t{kCodesTile}) * DivCeil(columns, int64_t{kCodesTile});
  return {FlatGrid(on, tiles * kFlatThreads), 1, 1};
}

}  // namespace

void QuantizeCodes(Stream& stream, const QuantizeCodesArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const bool delayed = args.recipe == Recipe::kDelayed;
  CHECK_MSG(delayed || args.recipe == Recipe::kCurrent, "codes of one scale are expected");
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  RequireMatrix(args.from, tokens, columns, DType::kBF16);
  CHECK_MSG(columns % kCodesStep == 0 && reinterpret_cast<uintptr_t>(args.from.data) % 8 == 0 &&
                (args.from.row_stride % 4 == 0 || tokens <= 1),
            "activations are read by 8 bytes");
  if (args.codes.present()) {
    RequireWholeCodes(args.codes, tokens, columns);
  }
  if (args.transposed.present()) {
    RequireWholeCodes(args.transposed, columns, tokens);
    CHECK_EQ(tokens % kCodesStep, 0);
  }
  RequireWord(args.scale, DType::kF32);
  RequireWordIfPresent(args.encode, DType::kF32);
  RequireWordIfPresent(args.staged, DType::kU32);
  RequireWordIfPresent(args.non_finite, DType::kU32);
  const uint32_t* amax = TensorAmax(on,
                                    {.recipe = args.recipe,
                                     .role = args.role,
                                     .along = BlocksAlong::kColumns,
                                     .from = args.from,
                                     .to = args.from,
                                     .scale = args.scale,
                                     .epsilon = args.epsilon});
  const bool gradient = args.role == ActivationRole::kGradient;
  on.Run({.kernel = Kernel::kTensorCodes,
          .variant = gradient ? kTensorE5M2 : kTensorE4M3,
          .grid = TileGrid(on, tokens, columns)},
         TensorCodesParams{.from = args.from.data,
                           .codes = args.codes.As<uint8_t>(),
                           .to = {.codes = args.transposed.As<uint8_t>(),
                                  .stride = tokens,
                                  .rows = tokens,
                                  .columns = columns},
                           .amax = amax,
                           .scale = args.scale.As<float>(),
                           .encode = delayed ? args.encode.As<float>() : nullptr,
                           .staged = delayed ? args.staged.As<uint32_t>() : nullptr,
                           .non_finite = args.non_finite.As<uint32_t>(),
                           .from_stride = args.from.row_stride,
                           .codes_stride = columns});
}

void TransposeCodes(Stream& stream, const TransposeCodesArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t per_byte = args.codes_per_byte;
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1] * per_byte;
  CHECK(per_byte == 1 || per_byte == 2);
  RequireWholeCodes(args.from, rows, columns / per_byte);
  RequireWholeCodes(args.to, columns, rows / per_byte);
  const int64_t step = kCodesStep * per_byte;
  CHECK(rows % step == 0 && columns % step == 0);
  if (rows == 0 || columns == 0) {
    return;
  }
  on.Run({.kernel = Kernel::kTransposeCodes,
          .variant = per_byte == 2 ? kTwoToAByte : kOneToAByte,
          .grid = TileGrid(on, rows, columns)},
         TransposeCodesParams{.from = args.from.As<uint8_t>(),
                              .to = {.codes = args.to.As<uint8_t>(),
                                     .stride = rows / per_byte,
                                     .rows = rows,
                                     .columns = columns}});
}

namespace {

void RequireScales(const TensorView& scales, ScaleForm form, int64_t outer, int64_t inner) {
  CHECK_MSG(form != ScaleForm::kTensor, "a recipe whose blocks of codes have scales is expected");
  RequireFlat(scales, ScaleBytes(form, outer, inner), DType::kU8);
  CHECK_MSG(reinterpret_cast<uintptr_t>(scales.data) % 16 == 0,
            "scales begin at a multiple of 16 bytes");
}

// Scales of tiles and columns that stand for no codes; a gemm may read them.
void ZeroPadding(LaunchStream& on, const TensorView& scales, int64_t bytes_of_blocks) {
  if (scales.elements() != bytes_of_blocks) {
    on.FillZero(scales.data, scales.elements());
  }
}

int64_t BytesOfScale(ScaleForm form) {
  return form == ScaleForm::kBlocks16 || form == ScaleForm::kBlocks32 ? 1 : DTypeBytes(DType::kF32);
}

void RequireBlocks(const QuantizeBlocksArgs& args) {
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const bool turned = args.along == BlocksAlong::kRows;
  const int64_t outer = turned ? columns : tokens;
  const int64_t inner = turned ? tokens : columns;
  const int64_t step = CodesStep(args.recipe);
  RequireMatrix(args.from, tokens, columns, DType::kBF16);
  CHECK_MSG(columns % step == 0 && tokens % step == 0 &&
                reinterpret_cast<uintptr_t>(args.from.data) % 8 == 0 &&
                (args.from.row_stride % 4 == 0 || tokens <= 1),
            "activations are read by 8 bytes");
  const ScaleForm form = ActivationScaleForm(args.recipe, args.as_mxfp8);
  CHECK_MSG(form != ScaleForm::kBlocks32 || inner % CodesOfScale(form) == 0,
            "mxfp8 takes whole blocks");
  RequireWholeCodes(args.codes, outer, inner / plan::CodesPerByte(args.recipe));
  CHECK_EQ(reinterpret_cast<uintptr_t>(args.codes.data) % kQuantizeWidth, 0u);
  RequireScales(args.scales, form, outer, inner);
  RequireWordIfPresent(args.non_finite, DType::kU32);
}

// The amax of the tensor comes first; along rows, that of the transform, which is made twice and
// stored nowhere.
void QuantizeFp4Blocks(LaunchStream& on, const QuantizeBlocksArgs& args) {
  RequireWord(args.scale, DType::kF32);
  CHECK_MSG(args.draws.sequence_tokens > 0, "a sequence has tokens");
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const bool turned = args.along == BlocksAlong::kRows;
  const uint32_t* amax = TensorAmax(on,
                                    {.recipe = args.recipe,
                                     .role = args.role,
                                     .along = args.along,
                                     .from = args.from,
                                     .to = {},
                                     .scale = args.scale});
  const uint32_t purpose = PurposeOf(turned);
  const int64_t tiles =
      DivCeil(tokens, int64_t{kBlockRows}) * DivCeil(columns, int64_t{kBlockColumns});
  on.Run({.kernel = turned ? Kernel::kFp4CodesAlongRows : Kernel::kFp4CodesAlongColumns,
          .variant = args.role == ActivationRole::kInput ? kBlocksOfFp4 : kBlocksOfFp4Stochastic,
          .grid = turned ? std::array<uint32_t, 3>{FlatGrid(on, tiles * kFlatThreads), 1, 1}
                         : WarpGrid(on, tokens * DivCeil(columns, int64_t{kQuantizeColumns}))},
         Fp4CodesParams{.cast = {.from = args.from.data,
                                 .amax = amax,
                                 .scale = args.scale.As<float>(),
                                 .non_finite = args.non_finite.As<uint32_t>(),
                                 .from_stride = args.from.row_stride,
                                 .rows = tokens,
                                 .columns = columns,
                                 .sequence_tokens = args.draws.sequence_tokens,
                                 .seed = args.draws.seed,
                                 .device_step = args.draws.device_step,
                                 .step = args.draws.step,
                                 .site = args.draws.site,
                                 .piece = args.draws.piece,
                                 .first_sample = args.draws.first_sample,
                                 .purpose = purpose,
                                 .least = 0},
                        .codes = args.codes.As<uint8_t>(),
                        .scales = args.scales.As<uint8_t>()});
}

}  // namespace

void QuantizeBlocks(Stream& stream, const QuantizeBlocksArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const bool turned = args.along == BlocksAlong::kRows;
  const int64_t outer = turned ? columns : tokens;
  const int64_t inner = turned ? tokens : columns;
  const ScaleForm form = ActivationScaleForm(args.recipe, args.as_mxfp8);
  RequireBlocks(args);
  if (tokens == 0 || columns == 0) {
    return;
  }
  ZeroPadding(on, args.scales, outer * ScaleBlocks(form, inner) * BytesOfScale(form));
  if (args.recipe == Recipe::kNvFp4) {
    QuantizeFp4Blocks(on, args);
    return;
  }
  const BlockCodesParams params = {.from = args.from.data,
                                   .codes = args.codes.As<uint8_t>(),
                                   .scales = args.scales.data,
                                   .non_finite = args.non_finite.As<uint32_t>(),
                                   .from_stride = args.from.row_stride,
                                   .rows = tokens,
                                   .columns = columns,
                                   .least = std::bit_cast<uint32_t>(args.epsilon)};
  const int64_t tiles =
      DivCeil(tokens, int64_t{kBlockRows}) * DivCeil(columns, int64_t{kBlockColumns});
  on.Run({.kernel = turned ? Kernel::kBlockCodesAlongRows : Kernel::kBlockCodesAlongColumns,
          .variant = SchemeOfBlocks(args.recipe, args.as_mxfp8),
          .grid = turned ? std::array<uint32_t, 3>{FlatGrid(on, tiles * kFlatThreads), 1, 1}
                         : WarpGrid(on, tokens * DivCeil(columns, int64_t{kQuantizeColumns}))},
         params);
}

void PlaceScales(Stream& stream, const PlaceScalesArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const Recipe recipe = args.scales.recipe;
  const ScaleForm form = WeightScaleForm(recipe, args.as_mxfp8);
  const int64_t edge = plan::BlockEdge(recipe);
  const bool turned = args.inner == BlocksAlong::kRows;
  const int64_t outer = turned ? args.columns : args.all_rows;
  const int64_t inner = turned ? args.all_rows : args.columns;
  RequireScales(args.to, form, outer, inner);
  CHECK(args.rows % edge == 0 && args.columns % edge == 0 && args.first_row % edge == 0);
  CHECK(args.first_row >= 0 && args.first_row + args.rows <= args.all_rows);
  RequireGrid(args.scales.amax, edge, args.rows, args.columns);
  const bool two_levels = recipe == Recipe::kNvFp4;
  if (two_levels) {
    RequireWord(args.scales.domain_amax, DType::kU32);
  }
  if (args.rows == 0 || args.columns == 0) {
    return;
  }
  const int64_t rows_of_scale = form == ScaleForm::kSquares128 ? edge : 1;
  if (args.first_row == 0) {
    ZeroPadding(
        on, args.to, DivCeil(outer, rows_of_scale) * ScaleBlocks(form, inner) * BytesOfScale(form));
  }
  on.Run({.kernel = Kernel::kPlaceScales,
          .variant = SchemeOfBlocks(recipe, args.as_mxfp8),
          .grid = {FlatGrid(on, args.rows / rows_of_scale * args.columns / edge), 1, 1}},
         PlaceScalesParams{
             .amax = args.scales.amax.As<uint32_t>(),
             .domain_amax = two_levels ? args.scales.domain_amax.As<uint32_t>() : nullptr,
             .to = args.to.data,
             .grid_columns = args.scales.amax.row_stride,
             .rows = args.rows,
             .columns = args.columns,
             .first_row = args.first_row,
             .all_rows = args.all_rows,
             .turned = turned ? 1 : 0});
}

static_assert(kSlotsOfDomain == kDelayedSlots && kWordsOfSlot == kDelayedWords);

void UpdateDelayedScales(Stream& stream, const DelayedScalesArgs& args) {
  const int64_t slots = args.histories.size[0];
  const int64_t length = args.histories.size[1];
  CHECK_MSG(length > 0 && slots % kDelayedSlots == 0, "a history has a length");
  RequireMatrix(args.histories, slots, length, DType::kF32);
  RequireMatrix(args.scales, slots, kDelayedWords, DType::kF32);
  CHECK(args.histories.contiguous() && args.scales.contiguous());
  CHECK_EQ(args.weight_amax.present(), args.activation_amax.present());
  if (args.weight_amax.present()) {
    RequireFlat(args.weight_amax, slots / kDelayedSlots, DType::kU32);
    CHECK(args.activation_amax.dtype == DType::kU32);
    CHECK_EQ(args.activation_amax.elements() * kDelayedSlots, 2 * slots);
  }
  if (args.apply.present()) {
    RequireWord(args.apply, args.apply.dtype == DType::kI32 ? DType::kI32 : DType::kU32);
  }
  constexpr int64_t kMostMargin = 8;
  CHECK(args.margin >= 0 && args.margin <= kMostMargin);
  if (slots == 0) {
    return;
  }
  LaunchStreamOf(stream).Run(
      {.kernel = Kernel::kDelayedScales, .grid = {static_cast<uint32_t>(slots), 1, 1}},
      DelayedScalesParams{
          .histories = args.histories.As<float>(),
          .scales = args.scales.As<float>(),
          .weight_amax = args.weight_amax.As<uint32_t>(),
          .activation_amax = args.activation_amax.As<uint32_t>(),
          .apply = args.apply.As<uint32_t>(),
          .slots = slots,
          .length = length,
          .room = std::ldexp(1.0f, -static_cast<int>(args.margin)),
          .choices = (args.newest ? kNewestAmax : 0) | (args.ones ? kOnesFirst : 0)});
}

// More pieces than a launch takes go on top of what the launches before have found.
void LargestWords(Stream& stream, const LargestWordsArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t words = args.out.elements();
  RequireFlat(args.out, words, DType::kU32);
  CHECK_MSG(!args.pieces.empty(), "no pieces");
  if (words == 0) {
    return;
  }
  for (size_t first = 0; first < args.pieces.size(); first += kMaxWordPieces) {
    LargestWordsParams params = {};
    params.out = args.out.As<uint32_t>();
    params.words = words;
    params.accumulate = first > 0 || args.accumulates ? 1 : 0;
    params.count =
        static_cast<int32_t>(std::min<size_t>(args.pieces.size() - first, size_t{kMaxWordPieces}));
    std::copy_n(
        args.pieces.begin() + static_cast<std::ptrdiff_t>(first), params.count, params.pieces);
    on.Run({.kernel = Kernel::kLargestWords, .grid = {FlatGrid(on, words), 1, 1}}, params);
  }
}

}  // namespace ravel::kernels::cuda
