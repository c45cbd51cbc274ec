#include "worker/model/residual_block.h"

#include "common/shape.h"
#include "kernels/part_sum.h"

namespace ravel::model {

using kernels::Stream;

ResidualBlock::ResidualBlock(const UnitTensors& tensors, const Parts& parts)
    : cut_(tensors.inventory().cut),
      norm_(tensors, parts.norm),
      normed_(tensors, parts.index, "d_c"),
      input_(tensors, parts.input, parts.members),
      output_(tensors, parts.output),
      x_(tensors.spec(), parts.x),
      d_a_(ActivationIndex(tensors.spec().workspace, "d_a")),
      d_b_(ActivationIndex(tensors.spec().workspace, "d_b")),
      d_c_(ActivationIndex(tensors.spec().workspace, "d_c")),
      hidden_(ActivationIndex(tensors.inventory().shared, "hidden")),
      dhidden_(ActivationIndex(tensors.inventory().shared, "dhidden")) {
  if (cut_.sequence) {
    n_all_ = ActivationIndex(tensors.spec().workspace, "n_all");
    dy_all_ = ActivationIndex(tensors.spec().workspace, "dy_all");
  }
}

TensorView ResidualBlock::Normed(const UnitMemory& memory) const {
  return cut_.sequence ? memory.workspace[n_all_] : normed_.ResultIn(memory);
}

TensorView ResidualBlock::OutputGradient(const UnitMemory& memory) const {
  return cut_.sequence ? memory.workspace[dy_all_] : memory.shared[dhidden_];
}

void ResidualBlock::GiveNormed(Stream& stream, const UnitMemory& memory) const {
  CopyView(stream, normed_.ResultIn(memory), memory.rows);
}

void ResidualBlock::GiveGradient(Stream& stream, const UnitMemory& memory) const {
  CopyView(stream, memory.shared[dhidden_], memory.rows);
}

void ResidualBlock::OutputWeightGradient(Stream& stream,
                                         const UnitMemory& memory,
                                         const WeightGradients& gradients,
                                         const TensorView& x) const {
  const TensorView dy = OutputGradient(memory);
  const int64_t own = memory.shared[dhidden_].size[0];
  output_.WeightGradient(stream,
                         {.memory = memory,
                          .gradients = gradients,
                          .x = x,
                          .dy = dy,
                          .bias_dy = cut_.sequence ? RowsOf(dy, cut_.coordinate * own, own) : dy});
}

void ResidualBlock::ForwardNorm(Stream& stream, const UnitMemory& memory) const {
  norm_.Forward(stream,
                {.memory = memory,
                 .x = memory.shared[hidden_],
                 .copy = x_.IfKept(memory),
                 .y = normed_.ResultIn(memory),
                 .statistics = normed_.StatisticsIn(memory)});
}

void ResidualBlock::RemakeNorm(Stream& stream, const UnitMemory& memory) const {
  norm_.Forward(stream,
                {.memory = memory,
                 .x = x_.In(memory),
                 .copy = {},
                 .y = normed_.ResultIn(memory),
                 .statistics = normed_.StatisticsIn(memory)});
}

void ResidualBlock::Forward(Stream& stream, const UnitMemory& memory) const {
  InnerForward(stream, memory);
  if (!over_ranks()) {
    AddOutput(stream, memory, InnerResult(memory), memory.shared[hidden_]);
  }
}

// A chunk, where ranks have their own tokens alone, has a share of those of each of them, in order.
std::vector<Projection::PartArgs> ResidualBlock::RunsOf(const UnitMemory& memory,
                                                        const TensorView& from) const {
  const bool apart = cut_.sequence && cut_.chunks > 1;
  const int64_t owners = apart ? cut_.degree : 1;
  const int64_t owned = DivExact(from.size[0], owners);
  const int64_t count = DivExact(owned, cut_.chunks);
  std::vector<Projection::PartArgs> runs;
  for (int64_t owner = 0; owner < owners; ++owner) {
    runs.push_back({.memory = memory,
                    .from = RowsOf(from, owner * owned + memory.chunk * count, count),
                    .first = owner * count});
  }
  return runs;
}

void ResidualBlock::Output(Stream& stream, const UnitMemory& memory) const {
  for (const Projection::PartArgs& run : RunsOf(memory, InnerResult(memory))) {
    output_.ForwardParts(stream, run);
  }
}

// y holds x.
void ResidualBlock::AddOutput(Stream& stream,
                              const UnitMemory& memory,
                              const TensorView& from,
                              const TensorView& y) const {
  if (!cut_.cuts()) {
    output_.Forward(stream,
                    {.memory = memory, .x = from, .y = y, .output = kernels::Output::kAccumulate});
    return;
  }
  const std::vector<TensorView> halves =
      output_.ForwardParts(stream, {.memory = memory, .from = from});
  output_.FinishForward(stream, {.memory = memory, .pieces = halves, .residual = y, .y = y});
}

void ResidualBlock::ForwardSum(Stream& stream, const UnitMemory& memory) const {
  Sum(stream, memory, memory.shared[hidden_]);
}

void ResidualBlock::Sum(Stream& stream, const UnitMemory& memory, const TensorView& x) const {
  output_.FinishForward(stream,
                        {.memory = memory,
                         .pieces = memory.pieces,
                         .residual = RowsOf(x, memory.first_row, memory.rows.size[0]),
                         .y = memory.rows});
}

void ResidualBlock::Backward(Stream& stream,
                             const UnitMemory& memory,
                             const WeightGradients& gradients) const {
  InnerBackward(stream, memory, gradients);
  if (over_ranks()) {
    return;
  }
  const TensorView dy = InnerGradient(memory);
  const TensorView& dx = memory.workspace[d_c_];
  if (!cut_.cuts()) {
    input_.InputGradient(stream, {.memory = memory, .dy = dy, .dx = dx});
  } else {
    const std::vector<TensorView> halves =
        input_.InputGradientParts(stream, {.memory = memory, .from = dy});
    kernels::SumParts(stream, {.pieces = halves, .out = dx});
  }
  InputWeights(stream, memory, gradients);
}

void ResidualBlock::InputProduct(Stream& stream, const UnitMemory& memory) const {
  for (const Projection::PartArgs& run : RunsOf(memory, InnerGradient(memory))) {
    input_.InputGradientParts(stream, run);
  }
}

void ResidualBlock::InputWeights(Stream& stream,
                                 const UnitMemory& memory,
                                 const WeightGradients& gradients) const {
  input_.WeightGradient(
      stream,
      {.memory = memory, .gradients = gradients, .x = Normed(memory), .dy = InnerGradient(memory)});
}

void ResidualBlock::BackwardSum(Stream& stream, const UnitMemory& memory) const {
  kernels::SumParts(stream, {.pieces = memory.pieces, .out = memory.rows});
}

void ResidualBlock::BackwardNorm(Stream& stream,
                                 const UnitMemory& memory,
                                 const WeightGradients& gradients) const {
  const TensorView& dhidden = memory.shared[dhidden_];
  norm_.Backward(stream,
                 {.memory = memory,
                  .gradients = gradients,
                  .dy = over_ranks() ? memory.input_gradient : memory.workspace[d_c_],
                  .x = x_.In(memory),
                  .dresidual = dhidden,
                  .dx = dhidden,
                  .statistics = normed_.StatisticsIn(memory)});
}

}  // namespace ravel::model
