// Operands of gemms of codes: a weight's codes with their scales where a gemm reads them,
// transposed where it sums over the rows of the stored matrix, and the codes of activations.

#include "common/check.h"
#include "worker/model/projection.h"

namespace ravel::model {

// Recipes whose blocks have all there is of scales decode to operands with a scale of 1, which a
// gemm need not multiply by.
bool Projection::ScalesTheWhole(plan::Recipe recipe) {
  return plan::BlockEdge(recipe) == 0 || recipe == plan::Recipe::kNvFp4;
}

TensorView Projection::ScaleAt(const UnitMemory& memory, int64_t place) const {
  return VectorView(memory.workspace[scratch_->scales].As<float>() + place, 1);
}

TensorView Projection::Factors(const UnitMemory& memory, const Operand& operand) const {
  return operand.whole.present()
             ? VectorView(memory.workspace[scratch_->scales].As<float>() + kFactors, 2)
             : TensorView();
}

TensorView Projection::CodeColumns(const Operand& operand, int64_t first, int64_t count) {
  const int64_t per_byte = CodesOfByte(operand.form);
  return ColumnsOf(operand.matrix, DivExact(first, per_byte), DivExact(count, per_byte));
}

Projection::Operand Projection::Codes(kernels::Stream& stream,
                                      const UnitMemory& memory,
                                      const Block& block,
                                      kernels::BlocksAlong inner) const {
  Operand operand = {.matrix = block.matrix, .scale = {}};
  operand.matrix.dtype = DType::kU8;
  const quant::GemmScales& of_gemms = memory.scales[parts_[block.first].weight];
  const kernels::WeightScales& scales = of_gemms.weight;
  const TensorView whole = ScaleAt(memory, kWeightScale + block.scale);
  if (ScalesTheWhole(scales.recipe)) {
    kernels::DecodeWeight(stream, {.codes = {}, .scales = scales, .to = {}, .scale = whole});
  }
  if (OfBlocks(memory, block.first)) {
    operand.scale = block.in_parts ? TensorView() : PlacedScales(stream, memory, block, inner);
    operand.form = kernels::WeightScaleForm(scales.recipe, of_gemms.as_mxfp8);
    operand.whole = ScalesTheWhole(scales.recipe) ? whole : TensorView();
  } else {
    operand.scale = whole;
  }
  const int64_t per_byte = CodesOfByte(operand.form);
  if (inner == kernels::BlocksAlong::kRows) {
    const TensorView& scratch = memory.workspace[scratch_->weight];
    CHECK_LE(block.scratch + operand.matrix.elements(), scratch.elements());
    TensorView to = MatrixView(
        nullptr, operand.matrix.size[1] * per_byte, DivExact(operand.matrix.size[0], per_byte));
    to.dtype = scratch.dtype;
    to.data = ElementAt(scratch.data, block.scratch, scratch.dtype);
    kernels::TransposeCodes(stream, {.from = operand.matrix, .to = to, .codes_per_byte = per_byte});
    operand.matrix = to;
  }
  operand.matrix.dtype = per_byte > 1 ? DType::kU8 : DType::kF8E4M3;
  return operand;
}

TensorView Projection::PlacedScales(kernels::Stream& stream,
                                    const UnitMemory& memory,
                                    const Block& block,
                                    kernels::BlocksAlong inner) const {
  const quant::GemmScales& scales = memory.scales[parts_[block.first].weight];
  const ScaleForm form = kernels::WeightScaleForm(scales.weight.recipe, scales.as_mxfp8);
  const int64_t rows = block.matrix.size[0];
  const int64_t columns = block.matrix.size[1] * CodesOfByte(form);
  const bool turned = inner == kernels::BlocksAlong::kRows;
  const TensorView to = Carve(memory.workspace[*scratch_->weight_scales],
                              1,
                              ScaleBytes(form, turned ? columns : rows, turned ? rows : columns));
  int64_t first_row = 0;
  for (size_t part = block.first; part < block.first + block.parts; ++part) {
    const int64_t part_rows = memory.weights[parts_[part].weight].size[0];
    kernels::PlaceScales(stream,
                         {.scales = memory.scales[parts_[part].weight].weight,
                          .inner = inner,
                          .rows = part_rows,
                          .columns = columns,
                          .first_row = first_row,
                          .all_rows = rows,
                          .to = to,
                          .as_mxfp8 = scales.as_mxfp8});
    first_row += part_rows;
  }
  return to;
}

Projection::Operand Projection::ActivationCodes(kernels::Stream& stream,
                                                const ActivationArgs& args) const {
  const bool input = args.role == kernels::ActivationRole::kInput;
  const bool turned = args.along == kernels::BlocksAlong::kRows;
  const quant::GemmScales& scales = args.memory.scales[parts_[args.part].weight];
  const TensorView& scratch = args.memory.workspace[input ? scratch_->input : scratch_->gradient];
  Operand operand = {.matrix = turned ? Carve(scratch, args.from.size[1], args.from.size[0])
                                      : Carve(scratch, args.from.size[0], args.from.size[1]),
                     .scale = ScaleAt(args.memory, input ? kInputScale : kGradientScale)};
  kernels::QuantizeCodes(stream,
                         {.recipe = scales.weight.recipe,
                          .role = args.role,
                          .from = args.from,
                          .codes = turned ? TensorView() : operand.matrix,
                          .transposed = turned ? operand.matrix : TensorView(),
                          .scale = operand.scale,
                          .encode = input ? scales.input_encode : scales.gradient_encode,
                          .staged = input ? scales.input_staged : scales.gradient_staged,
                          .non_finite = scales.non_finite,
                          .epsilon = scales.amax_epsilon});
  operand.matrix.dtype = input ? DType::kF8E4M3 : DType::kF8E5M2;
  return operand;
}

Projection::Operand Projection::ActivationBlocks(kernels::Stream& stream,
                                                 const ActivationArgs& args) const {
  const bool input = args.role == kernels::ActivationRole::kInput;
  const bool turned = args.along == kernels::BlocksAlong::kRows;
  const quant::GemmScales& scales = args.memory.scales[parts_[args.part].weight];
  const int64_t outer = args.from.size[turned ? 1 : 0];
  const int64_t inner = args.from.size[turned ? 0 : 1];
  const ScaleForm form = kernels::ActivationScaleForm(scales.weight.recipe, scales.as_mxfp8);
  const std::vector<TensorView>& workspace = args.memory.workspace;
  const bool packed = form == ScaleForm::kBlocks16;
  Operand operand = {
      .matrix = Carve(workspace[input ? scratch_->input : scratch_->gradient],
                      outer,
                      DivExact(inner, CodesOfByte(form))),
      .scale = Carve(workspace[input ? *scratch_->input_scales : *scratch_->gradient_scales],
                     1,
                     ScaleBytes(form, outer, inner)),
      .form = form,
      .whole = packed ? ScaleAt(args.memory, input ? kInputScale : kGradientScale) : TensorView()};
  kernels::QuantizeBlocks(stream,
                          {.recipe = scales.weight.recipe,
                           .role = args.role,
                           .along = args.along,
                           .from = args.from,
                           .codes = operand.matrix,
                           .scales = operand.scale,
                           .scale = operand.whole,
                           .non_finite = scales.non_finite,
                           .draws = DrawsOf(args),
                           .epsilon = scales.amax_epsilon,
                           .as_mxfp8 = scales.as_mxfp8});
  operand.matrix.dtype = packed ? DType::kU8 : DType::kF8E4M3;
  return operand;
}

}  // namespace ravel::model
