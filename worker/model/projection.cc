// y = x W^T for matrices [out, in] (torch's Linear), y = x W for [in, out] (GPT-2's Conv1D).
//   dx = dy W   or dy W^T         the parts of a bundle add up in order of their columns
//   dW = dy^T x or x^T dy         [out, in] or [in, out];  db = the sum of dy's rows
// A bias is written to y first and the gemm accumulates onto it.
//
// Of a quantized weight W = s_w Q, with codes Q decoded exactly, the gemms are those of quantized
// operands: x = s_x Q_x, dy = s_d Q_d, sums in fp32, each times the product of two scales. Blocks
// of activations lie along the index that the gemm sums over, so x and dy are quantized once for
// each of the two gemms that read them, from the same values.

#include "worker/model/projection.h"

#include <algorithm>

#include "common/check.h"
#include "kernels/bias.h"

namespace ravel::model {

using kernels::Output;
using kernels::Transpose;
using plan::MatrixLayout;

namespace {

constexpr auto kColumns = kernels::BlocksAlong::kColumns;
constexpr auto kRows = kernels::BlocksAlong::kRows;

// A part of [rows, columns]; absent where columns are not in parts.
kernels::GemmPart ColumnPart(int64_t rows, int64_t part_columns) {
  return part_columns > 0 ? kernels::GemmPart{.rows = rows, .columns = part_columns}
                          : kernels::GemmPart();
}

}  // namespace

Projection::Projection(const UnitTensors& tensors, const plan::LinearNames& names)
    : Projection(tensors, names, Members()) {}

Projection::Projection(const UnitTensors& tensors,
                       const plan::LinearNames& names,
                       const Members& members)
    : layout_(tensors.architecture().layout), sums_(tensors), shared_(members.shared) {
  CHECK_MSG(names.names.size() == 1 || layout_ == MatrixLayout::kOutputInput,
            "matrices of [in, out] are fused, not bundled");
  for (const std::string_view name : names.names) {
    Part part;
    part.weight = tensors.Index(name, "weight");
    if (names.bias) {
      part.bias = tensors.Index(name, "bias");
    }
    part.site = tensors.tensor(part.weight).site;
    part.columns = tensors.tensor(part.weight).shape[layout_ == MatrixLayout::kOutputInput ? 0 : 1];
    part.weight_leaves = GradientLeaves(tensors, part.weight);
    if (part.bias.has_value()) {
      part.bias_leaves = GradientLeaves(tensors, *part.bias);
    }
    parts_.push_back(part);
  }
  const plan::DimensionCut& cut = tensors.tensor(parts_[0].weight).cut;
  apart_ = layout_ == MatrixLayout::kInputOutput && cut.cuts() && cut.parts[0] > 0;
  inputs_cut_ = cut.dim == (layout_ == MatrixLayout::kOutputInput ? 1 : 0);
  AddMembers(members);
  // A bundle of which some parts are frozen is not laid out as one. Where parts share key heads,
  // one part's width divides no rank's bundle, but each member's.
  const plan::TensorSpec& first = tensors.tensor(parts_[0].weight);
  bundled_ = parts_.size() > 1 && first.bundle >= 0 && !shared_;
  for (const Part& part : parts_) {
    const plan::TensorSpec& tensor = tensors.tensor(part.weight);
    bundled_ = bundled_ && tensor.bundle == first.bundle && tensor.trainable == first.trainable;
  }
  const std::vector<plan::ActivationSpec>& workspace = tensors.spec().workspace;
  const bool quantizes = std::any_of(
      workspace.begin(), workspace.end(), [](const auto& spec) { return spec.name == "q_weight"; });
  if (quantizes) {
    scratch_ = Scratch{.weight = ActivationIndex(workspace, "q_weight"),
                       .input = ActivationIndex(workspace, "q_input"),
                       .gradient = ActivationIndex(workspace, "q_gradient"),
                       .scales = ActivationIndex(workspace, "q_scales")};
    const bool of_blocks = std::any_of(workspace.begin(), workspace.end(), [](const auto& spec) {
      return spec.name == "q_weight_scales";
    });
    if (of_blocks) {
      scratch_->weight_scales = ActivationIndex(workspace, "q_weight_scales");
      scratch_->input_scales = ActivationIndex(workspace, "q_input_scales");
      scratch_->gradient_scales = ActivationIndex(workspace, "q_gradient_scales");
    }
  }
}

bool Projection::Quantized(const UnitMemory& memory, size_t part) const {
  return !memory.scales.empty() &&
         memory.scales[parts_[part].weight].weight.recipe != plan::Recipe::kNone;
}

std::optional<size_t> Projection::FirstQuantized(const UnitMemory& memory) const {
  for (size_t part = 0; part < parts_.size(); ++part) {
    if (Quantized(memory, part)) {
      return part;
    }
  }
  return std::nullopt;
}

// `inner`: the index of the stored matrix that the gemm sums over.
Projection::Operand Projection::Weight(kernels::Stream& stream,
                                       const UnitMemory& memory,
                                       const Block& block,
                                       kernels::BlocksAlong inner) const {
  if (!Quantized(memory, block.first)) {
    return {.matrix = block.matrix, .scale = {}};
  }
  return OfCodes(memory, block.first) ? Codes(stream, memory, block, inner)
                                      : Decoded(stream, memory, block);
}

Projection::Operand Projection::Decoded(kernels::Stream& stream,
                                        const UnitMemory& memory,
                                        const Block& block) const {
  TensorView scratch = memory.workspace[scratch_->weight];
  CHECK_LE(block.scratch, scratch.elements());
  const int64_t room = scratch.elements() - block.scratch;
  scratch.data = ElementAt(scratch.data, block.scratch, scratch.dtype);
  Operand operand = {.matrix = scratch, .scale = ScaleAt(memory, kWeightScale + block.scale)};
  int64_t rows = 0;
  int64_t columns = 0;
  for (size_t part = block.first; part < block.first + block.parts; ++part) {
    TensorView codes = memory.weights[parts_[part].weight];
    codes.dtype = DType::kU8;  // the recipe says what they are
    const kernels::WeightScales& scales = memory.scales[parts_[part].weight].weight;
    columns = codes.size[1] * plan::CodesPerByte(scales.recipe);
    TensorView to = MatrixView(nullptr, codes.size[0], columns);
    to.dtype = scratch.dtype;
    to.data = ElementAt(scratch.data, rows * columns, scratch.dtype);
    CHECK_LE((rows + codes.size[0]) * columns, room);
    kernels::DecodeWeight(stream,
                          {.codes = codes, .scales = scales, .to = to, .scale = operand.scale});
    rows += codes.size[0];
  }
  operand.matrix.size = {rows, columns};
  operand.matrix.row_stride = columns;
  if (!ScalesTheWhole(memory.scales[parts_[block.first].weight].weight.recipe)) {
    operand.scale = {};
  }
  return operand;
}

kernels::ActivationDraws Projection::DrawsOf(const ActivationArgs& args) const {
  kernels::ActivationDraws draws =
      args.memory.draws == nullptr ? kernels::ActivationDraws() : *args.memory.draws;
  draws.site = parts_[args.part].site;
  CHECK_LT(draws.site, 1u << 24);
  // The lowest bit tells the calls of a unit apart.
  CHECK_LT(draws.piece, 2u);
  CHECK_LT(args.piece, kernels::ActivationDraws::kMostPieces / 2);
  draws.piece |= args.piece << 1;
  return draws;
}

Projection::Operand Projection::Activation(kernels::Stream& stream,
                                           const ActivationArgs& args) const {
  const bool input = args.role == kernels::ActivationRole::kInput;
  if (OfBlocks(args.memory, args.part)) {
    return ActivationBlocks(stream, args);
  }
  if (OfCodes(args.memory, args.part)) {
    return ActivationCodes(stream, args);
  }
  const quant::GemmScales& scales = args.memory.scales[parts_[args.part].weight];
  Operand operand = {
      .matrix = Carve(args.memory.workspace[input ? scratch_->input : scratch_->gradient],
                      args.from.size[0],
                      args.from.size[1]),
      .scale = ScaleAt(args.memory, input ? kInputScale : kGradientScale)};
  const kernels::QuantizeActivationArgs quantize = {
      .recipe = scales.weight.recipe,
      .role = args.role,
      .along = args.along,
      .from = args.from,
      .to = operand.matrix,
      .scale = operand.scale,
      .encode = input ? scales.input_encode : scales.gradient_encode,
      .staged = input ? scales.input_staged : scales.gradient_staged,
      .non_finite = scales.non_finite,
      .draws = DrawsOf(args),
      .epsilon = scales.amax_epsilon};
  kernels::QuantizeActivation(stream, quantize);
  if (!ScalesTheWhole(scales.weight.recipe)) {
    operand.scale = {};
  }
  return operand;
}

Projection::Operand Projection::GradientOfAll(kernels::Stream& stream,
                                              const ActivationArgs& args) const {
  const std::optional<size_t> part = FirstQuantized(args.memory);
  if (!part.has_value() || ScalesBlocks(args.memory, *part)) {
    return {};
  }
  return Activation(stream,
                    {.memory = args.memory,
                     .part = *part,
                     .from = args.from,
                     .role = args.role,
                     .along = args.along});
}

Projection::Operand Projection::GradientOf(kernels::Stream& stream,
                                           const ActivationArgs& args,
                                           const Operand& all,
                                           const Block& block,
                                           int64_t column) const {
  const TensorView dy = ColumnsOf(args.from, column, block.columns);
  if (!Quantized(args.memory, block.first)) {
    return {.matrix = dy, .scale = {}};
  }
  if (ScalesBlocks(args.memory, block.first)) {
    return Activation(stream,
                      {.memory = args.memory,
                       .part = block.first,
                       .from = dy,
                       .role = args.role,
                       .along = args.along});
  }
  const bool turned = OfCodes(args.memory, block.first) && args.along == kRows;
  return {.matrix = turned ? RowsOf(all.matrix, column, block.columns)
                           : ColumnsOf(all.matrix, column, block.columns),
          .scale = all.scale};
}

TensorView Projection::MatrixOf(const std::vector<TensorView>& views, const Part& part) const {
  TensorView matrix = views[part.weight];
  if (apart_ && matrix.present()) {
    matrix.data = ElementAt(matrix.data, matrix.size[0] * part.first, matrix.dtype);
    matrix.size[1] = part.columns;
    matrix.row_stride = part.columns;
  }
  return matrix;
}

TensorView Projection::BiasOf(const std::vector<TensorView>& views, const Part& part) const {
  TensorView bias = part.bias.has_value() ? views[*part.bias] : TensorView();
  if (apart_ && bias.present()) {
    bias.data = ElementAt(bias.data, part.first, bias.dtype);
    bias.size[0] = part.columns;
  }
  return bias;
}

std::vector<Projection::Block> Projection::Blocks(const std::vector<TensorView>& views) const {
  std::vector<Block> blocks;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const TensorView view = MatrixOf(views, part);
    CHECK(!view.present() || (view.rank == 2 && view.contiguous()));
    if (!bundled_ || blocks.empty()) {
      blocks.push_back({.matrix = view, .columns = part.columns, .first = i, .parts = 1});
      continue;
    }
    Block& all = blocks.front();
    ++all.parts;
    all.columns += part.columns;
    CHECK_EQ(all.matrix.present(), view.present());
    if (view.present()) {
      CHECK_MSG(ElementAt(all.matrix.data, all.matrix.elements(), view.dtype) == view.data,
                "a bundle's parts are adjacent");
      all.matrix.size[0] += view.size[0];
    }
  }
  return blocks;
}

// Ranks of more than one have fused maps apart, so a part is then of one map, all of which are
// alike.
int64_t Projection::PartOutputs(const Block& block) const {
  if (!sums_.cuts() || inputs_cut_) {
    return 0;
  }
  const bool fused = parts_.size() < members_.size();
  int64_t outputs = 0;
  for (const Member& member : members_) {
    if (member.part >= block.first && member.part < block.first + block.parts) {
      const int64_t columns = member.columns * member.sharing;
      if (columns % sums_.cut().local_parts() != 0) {
        return 0;  // of a decoder, which is not in parts
      }
      const int64_t share = columns / sums_.cut().local_parts();
      CHECK_MSG(!fused || outputs == 0 || outputs == share, "fused maps are alike");
      outputs = fused ? share : outputs + share;
    }
  }
  return outputs;
}

int64_t Projection::PartInputs(int64_t inputs) const {
  return sums_.cuts() && inputs_cut_ ? DivExact(inputs, sums_.cut().local_parts()) : 0;
}

void Projection::Forward(kernels::Stream& stream, const ForwardArgs& args) const {
  int64_t column = 0;
  bool biased = false;
  for (const Part& part : parts_) {
    if (part.bias.has_value()) {
      kernels::AddBias(stream,
                       {.bias = BiasOf(args.memory.weights, part),
                        .y = ColumnsOf(args.y, column, part.columns),
                        .output = args.output});
      biased = true;
    }
    column += part.columns;
  }
  CHECK_EQ(column, args.y.size[1]);
  column = 0;
  Operand quantized;
  if (const std::optional<size_t> part = FirstQuantized(args.memory)) {
    quantized = Activation(stream, {.memory = args.memory, .part = *part, .from = args.x});
  }
  for (const Block& block : Blocks(args.memory.weights)) {
    const bool codes = Quantized(args.memory, block.first);
    const bool output_first = layout_ == MatrixLayout::kOutputInput;
    const bool turned = output_first || OfCodes(args.memory, block.first);
    const Operand weight = Weight(stream, args.memory, block, output_first ? kColumns : kRows);
    kernels::Gemm(stream,
                  {.a = codes ? quantized.matrix : args.x,
                   .transpose_a = Transpose::kNo,
                   .b = weight.matrix,
                   .transpose_b = turned ? Transpose::kYes : Transpose::kNo,
                   .c = ColumnsOf(args.y, column, block.columns),
                   .output = biased ? Output::kAccumulate : args.output,
                   .scale_a = codes ? quantized.scale : TensorView(),
                   .scale_b = weight.scale,
                   .form_a = codes ? quantized.form : ScaleForm::kTensor,
                   .form_b = weight.form,
                   .whole_a = codes ? quantized.whole : TensorView(),
                   .whole_b = weight.whole,
                   .factors = Factors(args.memory, weight),
                   .fast_accumulation = Fast(args.memory, block, &quant::GemmScales::fast_forward),
                   .part = ColumnPart(args.y.size[0], PartOutputs(block))});
    column += block.columns;
  }
}

void Projection::InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const {
  int64_t column = 0;
  const ActivationArgs gradient = {
      .memory = args.memory, .from = args.dy, .role = kernels::ActivationRole::kGradient};
  const Operand all = GradientOfAll(stream, gradient);
  for (const Block& block : Blocks(args.memory.weights)) {
    const bool output_first = layout_ == MatrixLayout::kOutputInput;
    const bool turned = !output_first || OfCodes(args.memory, block.first);
    const Operand dy = GradientOf(stream, gradient, all, block, column);
    const Operand weight = Weight(stream, args.memory, block, output_first ? kRows : kColumns);
    kernels::Gemm(
        stream,
        {.a = dy.matrix,
         .transpose_a = Transpose::kNo,
         .b = weight.matrix,
         .transpose_b = turned ? Transpose::kYes : Transpose::kNo,
         .c = args.dx,
         .output = column == 0 ? Output::kOverwrite : Output::kAccumulate,
         .scale_a = dy.scale,
         .scale_b = weight.scale,
         .form_a = dy.form,
         .form_b = weight.form,
         .whole_a = dy.whole,
         .whole_b = weight.whole,
         .factors = Factors(args.memory, weight),
         .fast_accumulation = Fast(args.memory, block, &quant::GemmScales::fast_input_gradient),
         .part = ColumnPart(args.dx.size[0], PartInputs(args.dx.size[1]))});
    column += block.columns;
  }
  CHECK_EQ(column, args.dy.size[1]);
}

void Projection::AddProduct(kernels::Stream& stream, const ProductArgs& args) const {
  const bool rows_are_outputs = layout_ == MatrixLayout::kOutputInput;
  const Operand& first = rows_are_outputs ? args.dy : args.x;
  const Operand& second = rows_are_outputs ? args.x : args.dy;
  kernels::GemmPart part;
  if (args.part_outputs > 0 || args.part_inputs > 0) {
    const int64_t rows = rows_are_outputs ? args.part_outputs : args.part_inputs;
    const int64_t columns = rows_are_outputs ? args.part_inputs : args.part_outputs;
    part = {.rows = rows > 0 ? rows : args.to.size[0],
            .columns = columns > 0 ? columns : args.to.size[1]};
  }
  kernels::Gemm(stream,
                {.a = first.matrix,
                 .transpose_a = args.turned ? Transpose::kNo : Transpose::kYes,
                 .b = second.matrix,
                 .transpose_b = args.turned ? Transpose::kYes : Transpose::kNo,
                 .c = args.to,
                 .output = args.output,
                 .scale_a = first.scale,
                 .scale_b = second.scale,
                 .form_a = first.form,
                 .form_b = second.form,
                 .whole_a = first.whole,
                 .whole_b = second.whole,
                 .factors = Factors(args.memory, first),
                 .part = part});
}

void Projection::WeightGradient(kernels::Stream& stream, const WeightGradientArgs& args) const {
  const bool of_parts = sums_.cuts() && FirstQuantized(args.memory).has_value();
  if (of_parts && inputs_cut_) {
    InputPartGradients(stream, args);
    return;
  }
  if (of_parts || shared_) {
    MemberGradients(stream, args);
    return;
  }
  int64_t column = 0;
  Operand x;
  if (const std::optional<size_t> part = FirstQuantized(args.memory)) {
    x = Activation(stream, {.memory = args.memory, .part = *part, .from = args.x, .along = kRows});
  }
  const ActivationArgs gradient = {.memory = args.memory,
                                   .from = args.dy,
                                   .role = kernels::ActivationRole::kGradient,
                                   .along = kRows};
  const Operand all = GradientOfAll(stream, gradient);
  for (const Block& block : Blocks(args.gradients.views)) {
    const Operand in =
        Quantized(args.memory, block.first) ? x : Operand{.matrix = args.x, .scale = {}};
    if (block.matrix.present()) {
      AddProduct(stream,
                 {.memory = args.memory,
                  .x = in,
                  .dy = GradientOf(stream, gradient, all, block, column),
                  .turned = OfCodes(args.memory, block.first),
                  .to = block.matrix,
                  .output = args.gradients.output,
                  .part_outputs = PartOutputs(block),
                  .part_inputs = PartInputs(args.x.size[1])});
    }
    column += block.columns;
  }
  CHECK_EQ(column, args.dy.size[1]);
  BiasGradients(stream, args);
}

void Projection::BiasGradients(kernels::Stream& stream, const WeightGradientArgs& args) const {
  const TensorView& dy = args.bias_dy.present() ? args.bias_dy : args.dy;
  int64_t column = 0;
  for (const Part& part : parts_) {
    const TensorView db = BiasOf(args.gradients.views, part);
    const int64_t blocks = part.bias_leaves.count();
    const int64_t rows = dy.size[0] / blocks;
    for (int64_t block = 0; db.present() && block < blocks; ++block) {
      kernels::BiasGradient(
          stream,
          {.dy = RowsOf(ColumnsOf(dy, column, part.columns), block * rows, rows),
           .db = blocks > 1 ? part.bias_leaves.Leaf(args.memory, args.gradients, block) : db,
           .output = args.gradients.output});
    }
    part.bias_leaves.Fold(stream, args.memory, args.gradients);
    column += part.columns;
  }
}

}  // namespace ravel::model
