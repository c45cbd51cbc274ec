// Projections where sums are in parts. Of part p: x_p and W_p are the p-th shares of what a product
// sums over,
//   x W  = the tree over p of x_p W_p
//   dy W^T = the tree over p of the sum over members of dy_p W_p^T, the first one from zero

#include <algorithm>

#include "common/check.h"
#include "kernels/bias.h"
#include "kernels/part_sum.h"
#include "worker/model/projection.h"

namespace ravel::model {

using kernels::Output;
using kernels::Transpose;
using plan::MatrixLayout;

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

std::vector<TensorView> Projection::ForwardParts(kernels::Stream& stream,
                                                 const PartArgs& args) const {
  CHECK_MSG(parts_.size() == 1, "a row layer is one matrix");
  const TensorView& weight = args.memory.weights[parts_[0].weight];
  const bool output_first = layout_ == MatrixLayout::kOutputInput;
  const int64_t inputs = args.from.size[1] / sums_.cut().local_parts();
  return sums_.Products(stream,
                        args.memory,
                        {.rows = args.from.size[0], .columns = parts_[0].columns},
                        [&](int64_t part, const TensorView& to) {
                          kernels::Gemm(
                              stream,
                              {.a = ColumnsOf(args.from, part * inputs, inputs),
                               .b = output_first ? ColumnsOf(weight, part * inputs, inputs)
                                                 : RowsOf(weight, part * inputs, inputs),
                               .transpose_b = output_first ? Transpose::kYes : Transpose::kNo,
                               .c = to});
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
  const TensorView& any = args.memory.weights[parts_[0].weight];
  return sums_.Products(
      stream,
      args.memory,
      {.rows = args.from.size[0], .columns = any.size[output_first ? 1 : 0]},
      [&](int64_t part, const TensorView& to) {
        int64_t column = 0;
        for (const Member& member : members_) {
          const int64_t share = member.columns * member.sharing / parts;
          const TensorView weight = MatrixOf(args.memory.weights, parts_[member.part]);
          const int64_t row = member.row + part / member.sharing * share;
          kernels::Gemm(
              stream,
              {.a = ColumnsOf(args.from, column + part * share, share),
               .b = output_first ? RowsOf(weight, row, share) : ColumnsOf(weight, row, share),
               .transpose_b = output_first ? Transpose::kNo : Transpose::kYes,
               .c = to,
               .output = column == 0 ? Output::kOverwrite : Output::kAccumulate});
          column += member.columns * member.sharing;
        }
        CHECK_EQ(column, args.from.size[1]);
      });
}

// Slots of one head have leaves of their own, which are then added: dw of a head is the tree over
// the parts that share it.
void Projection::SharedWeightGradient(kernels::Stream& stream,
                                      const WeightGradientArgs& args) const {
  CHECK_MSG(layout_ == MatrixLayout::kOutputInput && members_.size() == parts_.size(),
            "shared heads have matrices of their own");
  int64_t column = 0;
  for (const Member& member : members_) {
    const Part& part = parts_[member.part];
    const TensorView dy = ColumnsOf(args.dy, column, member.columns * member.sharing);
    const auto fold = [&](const GradientLeaves& leaves) {
      const int64_t heads = std::max<int64_t>(1, leaves.count() / member.sharing);
      leaves.Fold(stream, args.memory, args.gradients, heads);
    };
    const TensorView& dw = args.gradients.views[part.weight];
    if (dw.present()) {
      TensorView to = dw;
      if (member.sharing > 1) {
        to =
            MatrixView(part.weight_leaves.All(args.memory).As<float>(), dy.size[1], args.x.size[1]);
      }
      kernels::Gemm(stream,
                    {.a = dy,
                     .transpose_a = Transpose::kYes,
                     .b = args.x,
                     .c = to,
                     .output = args.gradients.output});
      fold(part.weight_leaves);
    }
    if (part.bias.has_value() && args.gradients.views[*part.bias].present()) {
      const TensorView to =
          member.sharing > 1 ? VectorView(part.bias_leaves.All(args.memory).As<float>(), dy.size[1])
                             : args.gradients.views[*part.bias];
      kernels::BiasGradient(stream, {.dy = dy, .db = to, .output = args.gradients.output});
      fold(part.bias_leaves);
    }
    column += dy.size[1];
  }
  CHECK_EQ(column, args.dy.size[1]);
}

}  // namespace ravel::model
