// The ops of quantization: on the CPU shapes and types are checked here, on a CUDA stream in
// cuda_host/.

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cpu/quantize.h"
#include "kernels/cpu/weight_update.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/operand_checks.h"
#include "kernels/quantize.h"
#include "kernels/weight_update.h"

namespace ravel::kernels {
namespace {

using plan::Recipe;

void CheckWord(const TensorView& view, DType dtype) {
  CHECK_MSG(view.present() && view.dtype == dtype && view.elements() == 1,
            "one element of another type is expected");
}
void CheckWordIfPresent(const TensorView& view, DType dtype) {
  if (view.present()) {
    CheckWord(view, dtype);
  }
}

// A grid over blocks of `edge`; it reaches rows [.., rows) at least.
void CheckGrid(const TensorView& amax, int64_t edge, int64_t rows, int64_t columns) {
  CHECK_MSG(amax.dtype == DType::kU32, "an amax is u32");
  if (edge == 0) {
    CheckWord(amax, DType::kU32);
    return;
  }
  CHECK_MSG(amax.rank == 2 && amax.size[1] == DivCeil(columns, edge), "wrong grid of blocks");
  CHECK_MSG(amax.size[0] >= DivCeil(rows, edge), "rows outside the grid of blocks");
  CHECK_MSG(amax.present() || amax.elements() == 0, "no data");
}

void CheckScales(const WeightScales& scales, int64_t rows, int64_t columns) {
  CHECK_MSG(scales.recipe != Recipe::kNone, "a recipe is expected");
  if (scales.recipe == Recipe::kDelayed) {
    CheckWord(scales.encode, DType::kF32);
    return;
  }
  CheckGrid(scales.amax, plan::BlockEdge(scales.recipe), rows, columns);
  if (scales.recipe == Recipe::kNvFp4) {
    CheckWord(scales.domain_amax, DType::kU32);
  }
}

void CheckCodes(const TensorView& codes, Recipe recipe, int64_t rows, int64_t columns) {
  CHECK_MSG(columns % plan::CodesPerByte(recipe) == 0, "a row of packed codes is whole bytes");
  CheckRank2(codes);
  CheckMatrix(codes, rows, columns / plan::CodesPerByte(recipe), DType::kU8);
  CHECK_MSG(codes.contiguous(), "codes are contiguous");
}

}  // namespace

void BlockAmax(Stream& stream, const BlockAmaxArgs& args) {
  if (OnCuda(stream)) {
    cuda::BlockAmax(stream, args);
    return;
  }
  CheckRank2(args.from);
  CheckFlat(args.from, args.from.elements());
  CHECK_MSG(args.first_row >= 0 && args.edge >= 0, "a row or an edge is negative");
  CheckGrid(args.amax, args.edge, args.first_row + args.from.size[0], args.from.size[1]);
  cpu::BlockAmax(args);
}

void QuantizeWeight(Stream& stream, const QuantizeWeightArgs& args) {
  if (OnCuda(stream)) {
    cuda::QuantizeWeight(stream, args);
    return;
  }
  CheckRank2(args.from);
  CheckFlat(args.from, args.from.elements());
  const int64_t rows = args.from.size[0];
  const int64_t columns = args.from.size[1];
  CHECK_MSG(args.first_row >= 0, "a row is negative");
  CheckScales(args.scales, args.first_row + rows, columns);
  CheckCodes(args.codes, args.scales.recipe, rows, columns);
  CheckWordIfPresent(args.unless, DType::kF32);
  cpu::QuantizeWeight(args);
}

void DecodeWeight(Stream& stream, const DecodeWeightArgs& args) {
  if (OnCuda(stream)) {
    cuda::DecodeWeight(stream, args);
    return;
  }
  if (args.to.present()) {
    CheckRank2(args.to);
    CheckFlat(args.to, args.to.elements(), DType::kBF16);
    CheckCodes(args.codes, args.scales.recipe, args.to.size[0], args.to.size[1]);
  } else {
    CHECK_MSG(plan::BlockEdge(args.scales.recipe) == 0 || args.scales.recipe == Recipe::kNvFp4,
              "a scale alone has a recipe with one for the whole tensor");
  }
  const int64_t edge = plan::BlockEdge(args.scales.recipe);
  const bool decodes = args.to.present();
  CheckScales(args.scales,
              decodes ? args.to.size[0] : 0,
              decodes ? args.to.size[1] : args.scales.amax.size[1] * edge);
  CheckWord(args.scale, DType::kF32);
  cpu::DecodeWeight(args);
}

void QuantizeActivation(Stream& stream, const QuantizeActivationArgs& args) {
  if (OnCuda(stream)) {
    cuda::QuantizeActivation(stream, args);
    return;
  }
  CHECK_MSG(args.recipe != Recipe::kNone, "a recipe is expected");
  CheckRank2(args.from);
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  CheckMatrix(args.from, tokens, columns, DType::kBF16);
  CheckRank2(args.to);
  CheckMatrix(args.to, tokens, columns, DType::kBF16);
  const bool whole_blocks = args.recipe == Recipe::kMxFp8 || args.recipe == Recipe::kNvFp4;
  const int64_t extent = args.along == BlocksAlong::kColumns ? columns : tokens;
  CHECK_MSG(!whole_blocks || extent % plan::BlockEdge(args.recipe) == 0,
            "mxfp8 and nvfp4 take whole blocks");
  CHECK_MSG(args.draws.sequence_tokens > 0, "a sequence has tokens");
  CheckWord(args.scale, DType::kF32);
  CheckWordIfPresent(args.encode, DType::kF32);
  CheckWordIfPresent(args.staged, DType::kU32);
  CheckWordIfPresent(args.non_finite, DType::kU32);
  cpu::QuantizeActivation(args);
}

namespace {

// Codes of one byte, in a matrix of this size.
void CheckByteCodes(const TensorView& codes, int64_t rows, int64_t columns) {
  CheckRank2(codes);
  CheckMatrix(codes, rows, columns, DType::kU8);
  CHECK_MSG(codes.contiguous(), "codes are contiguous");
}

}  // namespace

void QuantizeCodes(Stream& stream, const QuantizeCodesArgs& args) {
  if (OnCuda(stream)) {
    cuda::QuantizeCodes(stream, args);
    return;
  }
  CHECK_MSG(args.recipe == Recipe::kDelayed || args.recipe == Recipe::kCurrent,
            "codes of one scale are expected");
  CheckRank2(args.from);
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  CheckMatrix(args.from, tokens, columns, DType::kBF16);
  CHECK_EQ(columns % kCodesStep, 0);
  if (args.codes.present()) {
    CheckByteCodes(args.codes, tokens, columns);
  }
  if (args.transposed.present()) {
    CheckByteCodes(args.transposed, columns, tokens);
    CHECK_EQ(tokens % kCodesStep, 0);
  }
  CheckWord(args.scale, DType::kF32);
  CheckWordIfPresent(args.encode, DType::kF32);
  CheckWordIfPresent(args.staged, DType::kU32);
  CheckWordIfPresent(args.non_finite, DType::kU32);
  cpu::QuantizeCodes(args);
}

void TransposeCodes(Stream& stream, const TransposeCodesArgs& args) {
  if (OnCuda(stream)) {
    cuda::TransposeCodes(stream, args);
    return;
  }
  const int64_t per_byte = args.codes_per_byte;
  const int64_t rows = args.from.size[0];
  CHECK(per_byte == 1 || per_byte == 2);
  CheckByteCodes(args.from, rows, args.from.size[1]);
  CheckByteCodes(args.to, args.from.size[1] * per_byte, rows / per_byte);
  CHECK(rows % (kCodesStep * per_byte) == 0 && args.from.size[1] % kCodesStep == 0);
  cpu::TransposeCodes(args);
}

void QuantizeBlocks(Stream& stream, const QuantizeBlocksArgs& args) {
  if (OnCuda(stream)) {
    cuda::QuantizeBlocks(stream, args);
    return;
  }
  CheckRank2(args.from);
  const int64_t tokens = args.from.size[0];
  const int64_t columns = args.from.size[1];
  const bool turned = args.along == BlocksAlong::kRows;
  const ScaleForm form = ActivationScaleForm(args.recipe, args.as_mxfp8);
  CHECK_MSG(form != ScaleForm::kTensor, "a recipe whose blocks of codes have scales is expected");
  CheckMatrix(args.from, tokens, columns, DType::kBF16);
  const int64_t step = CodesStep(args.recipe);
  CHECK(columns % step == 0 && tokens % step == 0);
  const int64_t outer = turned ? columns : tokens;
  const int64_t inner = turned ? tokens : columns;
  CHECK_MSG(form != ScaleForm::kBlocks32 || inner % CodesOfScale(form) == 0,
            "mxfp8 takes whole blocks");
  CHECK(!args.as_mxfp8 || args.recipe == Recipe::kFloat8Block);
  CheckByteCodes(args.codes, outer, inner / plan::CodesPerByte(args.recipe));
  if (args.recipe == Recipe::kNvFp4) {
    CheckWord(args.scale, DType::kF32);
    CHECK_MSG(args.draws.sequence_tokens > 0, "a sequence has tokens");
  }
  CheckFlat(args.scales, ScaleBytes(form, outer, inner), DType::kU8);
  CheckWordIfPresent(args.non_finite, DType::kU32);
  cpu::QuantizeBlocks(args);
}

void PlaceScales(Stream& stream, const PlaceScalesArgs& args) {
  if (OnCuda(stream)) {
    cuda::PlaceScales(stream, args);
    return;
  }
  const ScaleForm form = WeightScaleForm(args.scales.recipe, args.as_mxfp8);
  CHECK_MSG(form != ScaleForm::kTensor, "a recipe whose blocks of codes have scales is expected");
  CHECK(!args.as_mxfp8 || args.scales.recipe == Recipe::kFloat8Block);
  CheckScales(args.scales, args.rows, args.columns);
  const int64_t edge = plan::BlockEdge(args.scales.recipe);
  CHECK(args.rows % edge == 0 && args.columns % edge == 0 && args.first_row % edge == 0);
  CHECK(args.first_row >= 0 && args.first_row + args.rows <= args.all_rows);
  const bool turned = args.inner == BlocksAlong::kRows;
  CheckFlat(args.to,
            ScaleBytes(
                form, turned ? args.columns : args.all_rows, turned ? args.all_rows : args.columns),
            DType::kU8);
  cpu::PlaceScales(args);
}

void UpdateDelayedScales(Stream& stream, const DelayedScalesArgs& args) {
  if (OnCuda(stream)) {
    cuda::UpdateDelayedScales(stream, args);
    return;
  }
  CheckRank2(args.histories);
  const int64_t slots = args.histories.size[0];
  CHECK_MSG(args.histories.size[1] > 0 && slots % kDelayedSlots == 0, "a history has a length");
  CheckMatrix(args.histories, slots, args.histories.size[1], DType::kF32);
  CheckMatrix(args.scales, slots, kDelayedWords, DType::kF32);
  CHECK(args.histories.contiguous() && args.scales.contiguous());
  CHECK_EQ(args.weight_amax.present(), args.activation_amax.present());
  if (args.weight_amax.present()) {
    CHECK(args.weight_amax.dtype == DType::kU32 && args.activation_amax.dtype == DType::kU32);
    CHECK_EQ(args.weight_amax.elements() * kDelayedSlots, slots);
    CHECK_EQ(args.activation_amax.elements() * kDelayedSlots, 2 * slots);
  }
  if (args.apply.present()) {
    CheckWord(args.apply, args.apply.dtype == DType::kI32 ? DType::kI32 : DType::kU32);
  }
  cpu::UpdateDelayedScales(args);
}

void LargestWords(Stream& stream, const LargestWordsArgs& args) {
  if (OnCuda(stream)) {
    cuda::LargestWords(stream, args);
    return;
  }
  CHECK(args.out.dtype == DType::kU32 && args.out.contiguous());
  cpu::LargestWords(args);
}

bool FitsWeightUpdate(const WeightUpdateArgs& args) {
  constexpr int64_t kWidth = 4;
  const ElementUpdateArgs& update = args.update.update;
  bool fits = args.columns % kWidth == 0;
  for (const TensorView& view :
       {update.main_weight, update.g, update.m, update.v, args.target.codes}) {
    const auto bytes = static_cast<uintptr_t>(kWidth * DTypeBytes(view.dtype));
    fits = fits && reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  }
  return fits;
}

void WeightUpdate(Stream& stream, const WeightUpdateArgs& args) {
  if (OnCuda(stream)) {
    cuda::WeightUpdate(stream, args);
    return;
  }
  const ElementUpdateArgs& update = args.update.update;
  const WeightTarget& target = args.target;
  const int64_t n = update.g.elements();
  const int64_t rows = DivExact(n, args.columns);
  CHECK_MSG(target.recipe != Recipe::kNone && target.first_row >= 0, "a recipe is expected");
  CHECK_MSG(!update.weight.present() && update.table.pieces == nullptr, "a weight, or a table");
  CheckFlat(update.main_weight, n);
  CheckFlat(update.g, n, update.g.dtype);
  CheckGrid(target.amax, plan::BlockEdge(target.recipe), target.first_row + rows, args.columns);
  CheckWordIfPresent(target.whole_amax, DType::kU32);
  if (target.codes.present()) {
    CheckCodes(target.codes, target.recipe, rows, args.columns);
    CHECK_MSG(target.encode.present() == (target.recipe == Recipe::kDelayed),
              "a scale is expected");
  }
  cpu::WeightUpdate(args);
}

}  // namespace ravel::kernels
