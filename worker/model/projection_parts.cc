// Projections where sums are in parts. Of part p: x_p and W_p are the p-th shares of what a product
// sums over,
//   x W  = the tree over p of x_p W_p
//   dy W^T = the tree over p of the sum over members of dy_p W_p^T, the first one from zero

#include <algorithm>
#include <optional>

#include "common/check.h"
#include "common/shape.h"
#include "kernels/bias.h"
#include "kernels/part_sum.h"
#include "worker/model/projection.h"

namespace ravel::model {

using kernels::Output;
using kernels::Transpose;
using plan::MatrixLayout;

namespace {

constexpr auto kColumns = kernels::BlocksAlong::kColumns;
constexpr auto kRows = kernels::BlocksAlong::kRows;

}  // namespace

// One part for each member, in place of the one that is all of them.
void Projection::TakeApart(const Members& members) {
  CHECK_EQ(parts_.size(), 1u);
  parts_.resize(members.columns.size(), Part(parts_[0]));
  int64_t first = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].first = first;
    first += members.columns[i];
  }
}

void Projection::AddMembers(const Members& members) {
  if (apart_) {
    TakeApart(members);
  }
  if (members.columns.empty()) {
    for (size_t part = 0; part < parts_.size(); ++part) {
      members_.push_back({.part = part, .columns = parts_[part].columns});
    }
    return;
  }
  const bool fused = parts_.size() < members.columns.size();
  CHECK(!fused || parts_.size() == 1);
  int64_t row = 0;
  for (size_t i = 0; i < members.columns.size(); ++i) {
    members_.push_back({.part = fused ? 0 : i,
                        .row = fused ? row : 0,
                        .columns = members.columns[i],
                        .sharing = i == 0 ? 1 : members.sharing});
    row += members.columns[i];
    parts_[members_.back().part].columns = fused ? row : members.columns[i];
  }
}

uint32_t Projection::PieceOf(const Member& member, int64_t part) const {
  const plan::TensorCut& cut = sums_.cut();
  const auto index = static_cast<int64_t>(&member - members_.data());
  return static_cast<uint32_t>(1 + index * cut.parts + cut.first_part() + part);
}

std::vector<Projection::Operand> Projection::Weights(kernels::Stream& stream,
                                                     const UnitMemory& memory,
                                                     kernels::BlocksAlong inner) const {
  std::vector<Operand> of_parts;
  int64_t scratch = 0;
  for (Block& block : Blocks(memory.weights)) {
    block.scratch = scratch;
    block.scale = static_cast<int64_t>(block.first);
    block.in_parts = true;
    const Operand whole = Weight(stream, memory, block, inner);
    const bool turned = OfCodes(memory, block.first) && inner == kernels::BlocksAlong::kRows;
    int64_t row = 0;
    for (size_t part = block.first; part < block.first + block.parts; ++part) {
      Operand of_part = whole;
      if (block.parts > 1) {
        const int64_t rows = MatrixOf(memory.weights, parts_[part]).size[0];
        of_part.matrix = turned ? CodeColumns(whole, row, rows) : RowsOf(whole.matrix, row, rows);
        row += rows;
      }
      of_parts.push_back(of_part);
    }
    scratch += Quantized(memory, block.first) ? whole.matrix.elements() : 0;
  }
  return of_parts;
}

// Scales that gemms of codes read for each block lie as a gemm's whole operand has them, so those
// of a slice are placed anew, from its part of the grid.
Projection::Operand Projection::SliceOf(kernels::Stream& stream,
                                        const UnitMemory& memory,
                                        const Operand& weight,
                                        const Slice& slice) const {
  Operand sliced = weight;
  sliced.matrix = SumsColumns(memory, slice.part, slice.inner)
                      ? CodeColumns(weight, slice.first, slice.count)
                      : RowsOf(weight.matrix, slice.first, slice.count);
  if (OfBlocks(memory, slice.part)) {
    kernels::WeightScales scales = memory.scales[parts_[slice.part].weight].weight;
    const TensorView& codes = memory.weights[parts_[slice.part].weight];
    const int64_t edge = plan::BlockEdge(scales.recipe);
    const bool of_rows = slice.inner == kRows;
    const int64_t rows = of_rows ? slice.count : codes.size[0];
    const int64_t columns = of_rows ? codes.size[1] * CodesOfByte(weight.form) : slice.count;
    const int64_t first = DivExact(slice.first, edge);
    const int64_t count = DivExact(slice.count, edge);
    scales.amax =
        of_rows ? RowsOf(scales.amax, first, count) : ColumnsOf(scales.amax, first, count);
    sliced.scale =
        Carve(memory.workspace[*scratch_->weight_scales],
              1,
              ScaleBytes(weight.form, of_rows ? columns : rows, of_rows ? rows : columns));
    kernels::PlaceScales(stream,
                         {.scales = scales,
                          .inner = slice.inner,
                          .rows = rows,
                          .columns = columns,
                          .first_row = 0,
                          .all_rows = rows,
                          .to = sliced.scale,
                          .as_mxfp8 = memory.scales[parts_[slice.part].weight].as_mxfp8});
  }
  return sliced;
}

std::vector<TensorView> Projection::ForwardParts(kernels::Stream& stream,
                                                 const PartArgs& args) const {
  CHECK_MSG(parts_.size() == 1, "a row layer is one matrix");
  const bool output_first = layout_ == MatrixLayout::kOutputInput;
  const bool quantized = Quantized(args.memory, 0);
  const kernels::BlocksAlong inner = output_first ? kColumns : kRows;
  const Operand whole = Weights(stream, args.memory, inner)[0];
  const bool fast = quantized && args.memory.scales[parts_[0].weight].fast_forward;
  const int64_t inputs = args.from.size[1] / sums_.cut().local_parts();
  return sums_.Products(
      stream,
      args.memory,
      {.first = args.first, .rows = args.from.size[0], .columns = parts_[0].columns},
      [&](int64_t part, const TensorView& to) {
        Operand x = {.matrix = ColumnsOf(args.from, part * inputs, inputs), .scale = {}};
        if (quantized) {
          x = Activation(stream, {.memory = args.memory, .from = x.matrix});
        }
        const Operand weight = SliceOf(
            stream, args.memory, whole, {.inner = inner, .first = part * inputs, .count = inputs});
        const bool turned = SumsColumns(args.memory, 0, inner);
        kernels::Gemm(stream,
                      {.a = x.matrix,
                       .b = weight.matrix,
                       .transpose_b = turned ? Transpose::kYes : Transpose::kNo,
                       .c = to,
                       .scale_a = x.scale,
                       .scale_b = weight.scale,
                       .form_a = x.form,
                       .form_b = weight.form,
                       .whole_a = x.whole,
                       .whole_b = weight.whole,
                       .factors = Factors(args.memory, weight),
                       .fast_accumulation = fast,
                       .part = {.rows = to.size[0], .columns = to.size[1]}});
      });
}

void Projection::FinishForward(kernels::Stream& stream, const FinishArgs& args) const {
  const std::optional<size_t>& bias = parts_[0].bias;
  kernels::SumParts(stream,
                    {.pieces = args.pieces,
                     .residual = args.residual,
                     .bias = bias.has_value() ? args.memory.weights[*bias] : TensorView(),
                     .out = args.y});
}

std::vector<TensorView> Projection::InputGradientParts(kernels::Stream& stream,
                                                       const PartArgs& args) const {
  const bool output_first = layout_ == MatrixLayout::kOutputInput;
  const int64_t parts = sums_.cut().local_parts();
  const kernels::BlocksAlong inner = output_first ? kRows : kColumns;
  const std::vector<Operand> weights = Weights(stream, args.memory, inner);
  const int64_t inputs = weights[0].matrix.size[SumsColumns(args.memory, 0, inner) ? 0 : 1];
  const auto product = [&](const Member& member, int64_t part, int64_t column, TensorView to) {
    const int64_t share = member.columns * member.sharing / parts;
    const int64_t row = member.row + part / member.sharing * share;
    const bool quantized = Quantized(args.memory, member.part);
    Operand dy = {.matrix = ColumnsOf(args.from, column + part * share, share), .scale = {}};
    if (quantized) {
      dy = Activation(stream,
                      {.memory = args.memory,
                       .part = member.part,
                       .from = dy.matrix,
                       .role = kernels::ActivationRole::kGradient,
                       .piece = PieceOf(member, part)});
    }
    const Operand weight =
        SliceOf(stream,
                args.memory,
                weights[member.part],
                {.part = member.part, .inner = inner, .first = row, .count = share});
    const bool turned = SumsColumns(args.memory, member.part, inner);
    kernels::Gemm(
        stream,
        {.a = dy.matrix,
         .b = weight.matrix,
         .transpose_b = turned ? Transpose::kYes : Transpose::kNo,
         .c = to,
         .output = column == 0 ? Output::kOverwrite : Output::kAccumulate,
         .scale_a = dy.scale,
         .scale_b = weight.scale,
         .form_a = dy.form,
         .form_b = weight.form,
         .whole_a = dy.whole,
         .whole_b = weight.whole,
         .factors = Factors(args.memory, weight),
         .fast_accumulation =
             quantized && args.memory.scales[parts_[member.part].weight].fast_input_gradient,
         .part = {.rows = to.size[0], .columns = to.size[1]}});
  };
  return sums_.Products(stream,
                        args.memory,
                        {.first = args.first, .rows = args.from.size[0], .columns = inputs},
                        [&](int64_t part, const TensorView& to) {
                          int64_t column = 0;
                          for (const Member& member : members_) {
                            product(member, part, column, to);
                            column += member.columns * member.sharing;
                          }
                          CHECK_EQ(column, args.from.size[1]);
                        });
}

// Rows of the gradient are those of dy's columns; of [in, out] its columns are.
void Projection::MemberGradient(kernels::Stream& stream,
                                const Member& member,
                                const MemberArgs& args) const {
  const bool output_first = layout_ == MatrixLayout::kOutputInput;
  const kernels::Output output = args.all.gradients.output;
  const int64_t parts = sums_.cut().local_parts();
  const int64_t share = DivExact(args.dy.size[1], parts);
  if (!Quantized(args.all.memory, member.part)) {
    AddProduct(stream,
               {.memory = args.all.memory,
                .x = {.matrix = args.all.x, .scale = {}},
                .dy = {.matrix = args.dy, .scale = {}},
                .to = args.to,
                .output = output,
                .part_outputs = share});
    return;
  }
  for (int64_t part = 0; part < parts; ++part) {
    const Operand dy = Activation(stream,
                                  {.memory = args.all.memory,
                                   .part = member.part,
                                   .from = ColumnsOf(args.dy, part * share, share),
                                   .role = kernels::ActivationRole::kGradient,
                                   .along = kRows,
                                   .piece = PieceOf(member, part)});
    AddProduct(stream,
               {.memory = args.all.memory,
                .x = args.x,
                .dy = dy,
                .turned = OfCodes(args.all.memory, member.part),
                .to = output_first ? RowsOf(args.to, part * share, share)
                                   : ColumnsOf(args.to, part * share, share),
                .output = output,
                .part_outputs = share});
  }
}

// Slots of one head have leaves of their own, which are then added: dw of a head is the tree over
// the parts that share it.
void Projection::MemberGradients(kernels::Stream& stream, const WeightGradientArgs& args) const {
  CHECK_MSG(members_.size() == parts_.size(), "shared heads have matrices of their own");
  Operand x;
  if (const std::optional<size_t> part = FirstQuantized(args.memory)) {
    x = Activation(stream, {.memory = args.memory, .part = *part, .from = args.x, .along = kRows});
  }
  int64_t column = 0;
  for (const Member& member : members_) {
    const Part& part = parts_[member.part];
    const TensorView dy = ColumnsOf(args.dy, column, member.columns * member.sharing);
    const auto fold = [&](const GradientLeaves& leaves) {
      if (SharesHeads()) {
        const int64_t heads = std::max<int64_t>(1, leaves.count() / member.sharing);
        leaves.Fold(stream, args.memory, args.gradients, heads);
      }
    };
    TensorView to = args.gradients.views[part.weight];
    if (to.present()) {
      if (member.sharing > 1) {
        to =
            MatrixView(part.weight_leaves.All(args.memory).As<float>(), dy.size[1], args.x.size[1]);
      }
      MemberGradient(stream, member, {.all = args, .x = x, .dy = dy, .to = to});
      fold(part.weight_leaves);
    }
    if (SharesHeads() && part.bias.has_value() && args.gradients.views[*part.bias].present()) {
      const TensorView db =
          member.sharing > 1 ? VectorView(part.bias_leaves.All(args.memory).As<float>(), dy.size[1])
                             : args.gradients.views[*part.bias];
      kernels::BiasGradient(stream, {.dy = dy, .db = db, .output = args.gradients.output});
      fold(part.bias_leaves);
    }
    column += dy.size[1];
  }
  CHECK_EQ(column, args.dy.size[1]);
  if (!SharesHeads()) {
    BiasGradients(stream, args);
  }
}

void Projection::InputPartGradients(kernels::Stream& stream, const WeightGradientArgs& args) const {
  CHECK_MSG(parts_.size() == 1, "a row layer is one matrix");
  const TensorView& dw = args.gradients.views[parts_[0].weight];
  if (dw.present()) {
    const bool output_first = layout_ == MatrixLayout::kOutputInput;
    const Operand dy = Activation(stream,
                                  {.memory = args.memory,
                                   .from = args.dy,
                                   .role = kernels::ActivationRole::kGradient,
                                   .along = kRows});
    const int64_t parts = sums_.cut().local_parts();
    const int64_t inputs = DivExact(args.x.size[1], parts);
    for (int64_t part = 0; part < parts; ++part) {
      const Operand x = Activation(stream,
                                   {.memory = args.memory,
                                    .from = ColumnsOf(args.x, part * inputs, inputs),
                                    .along = kRows});
      AddProduct(stream,
                 {.memory = args.memory,
                  .x = x,
                  .dy = dy,
                  .turned = OfCodes(args.memory, 0),
                  .to = output_first ? ColumnsOf(dw, part * inputs, inputs)
                                     : RowsOf(dw, part * inputs, inputs),
                  .output = args.gradients.output,
                  .part_inputs = inputs});
    }
  }
  BiasGradients(stream, args);
}

}  // namespace ravel::model
