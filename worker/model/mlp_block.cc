// T tokens, h hidden, f intermediate.
//
//   n = norm(x)                    [T, h]
//   g | u = n Win + b              [T, 2 f]; GELU models have u alone, [T, f]
//   m = silu(g) * u, or gelu(u)    [T, f]; not kept, backward makes it again
//   y = x + m Wout + b             [T, h]
//
// Backward, from dy = dhidden:
//   dm = dy Wout^T
//   dg, du from g, u, dm, in place of g and u;  m again in the same pass
//   dWout += m^T dy,  dn = d(gu) Win^T,  dWin += n^T d(gu)
//   dx = dy + the norm's input gradient of dn, in place in dhidden

#include "worker/model/mlp_block.h"

#include "kernels/activation.h"
#include "kernels/part_sum.h"

namespace ravel::model {

using kernels::Output;
using kernels::Stream;

MlpBlock::MlpBlock(const UnitTensors& tensors)
    : kind_(tensors.architecture().mlp),
      inner_(plan::LocalSizesOf(tensors.inventory().config, tensors.inventory().cut).inner),
      norm_(tensors, tensors.architecture().mlp_norm),
      normed_(tensors, "1", "d_c"),
      input_(tensors,
             tensors.architecture().mlp_input,
             {.columns = std::vector<int64_t>(kind_ == plan::MlpKind::kSwiGlu ? 2 : 1, inner_)}),
      output_(tensors, tensors.architecture().mlp_output),
      cuts_(tensors.inventory().cut.cuts()),
      x1_(tensors.spec(), "x1"),
      input_values_(tensors.spec(), "mlp_in", "d_b"),
      d_a_(ActivationIndex(tensors.spec().workspace, "d_a")),
      d_b_(ActivationIndex(tensors.spec().workspace, "d_b")),
      d_c_(ActivationIndex(tensors.spec().workspace, "d_c")),
      hidden_(ActivationIndex(tensors.inventory().shared, "hidden")),
      dhidden_(ActivationIndex(tensors.inventory().shared, "dhidden")) {}

void MlpBlock::Activate(Stream& stream, const TensorView& x, const TensorView& y) const {
  if (kind_ == plan::MlpKind::kSwiGlu) {
    kernels::SwiGluForward(
        stream, {.gate = ColumnsOf(x, 0, inner_), .up = ColumnsOf(x, inner_, inner_), .y = y});
  } else {
    kernels::GeluForward(stream, {.x = x, .y = y});
  }
}

void MlpBlock::Deactivate(Stream& stream,
                          const TensorView& x,
                          const TensorView& dy,
                          const TensorView& y) const {
  if (kind_ == plan::MlpKind::kSwiGlu) {
    const TensorView gate = ColumnsOf(x, 0, inner_);
    const TensorView up = ColumnsOf(x, inner_, inner_);
    kernels::SwiGluBackward(stream,
                            {.gate = gate, .up = up, .dy = dy, .dgate = gate, .dup = up, .y = y});
  } else {
    kernels::GeluBackward(stream, {.x = x, .dy = dy, .dx = x, .y = y});
  }
}

void MlpBlock::ForwardNorm(Stream& stream, const UnitMemory& memory) const {
  norm_.Forward(stream,
                {.memory = memory,
                 .x = memory.shared[hidden_],
                 .copy = x1_.IfKept(memory),
                 .y = normed_.ResultIn(memory),
                 .statistics = normed_.StatisticsIn(memory)});
}

void MlpBlock::Forward(Stream& stream, const UnitMemory& memory) const {
  const TensorView& hidden = memory.shared[hidden_];
  const TensorView inner = InnerForward(stream, memory);
  if (cuts_) {
    FinishForward(stream, memory, output_.ForwardParts(stream, {.memory = memory, .from = inner}));
    return;
  }
  output_.Forward(stream,
                  {.memory = memory, .x = inner, .y = hidden, .output = Output::kAccumulate});
}

std::vector<TensorView> MlpBlock::ForwardParts(Stream& stream, const UnitMemory& memory) const {
  return output_.ForwardParts(stream, {.memory = memory, .from = InnerForward(stream, memory)});
}

void MlpBlock::FinishForward(Stream& stream,
                             const UnitMemory& memory,
                             const std::vector<TensorView>& pieces) const {
  const TensorView& hidden = memory.shared[hidden_];
  output_.FinishForward(stream,
                        {.memory = memory, .pieces = pieces, .residual = hidden, .y = hidden});
}

TensorView MlpBlock::InnerForward(Stream& stream, const UnitMemory& memory) const {
  const TensorView input = input_values_.In(memory);
  const TensorView inner = Carve(memory.workspace[d_a_], input.size[0], inner_);
  input_.Forward(stream, {.memory = memory, .x = normed_.ResultIn(memory), .y = input});
  Activate(stream, input, inner);
  return inner;
}

void MlpBlock::RemakeNorm(Stream& stream, const UnitMemory& memory) const {
  norm_.Forward(stream,
                {.memory = memory,
                 .x = x1_.In(memory),
                 .copy = {},
                 .y = normed_.ResultIn(memory),
                 .statistics = normed_.StatisticsIn(memory)});
}

void MlpBlock::Remake(Stream& stream, const UnitMemory& memory) const {
  input_.Forward(stream,
                 {.memory = memory, .x = normed_.ResultIn(memory), .y = input_values_.In(memory)});
}

void MlpBlock::Backward(Stream& stream,
                        const UnitMemory& memory,
                        const WeightGradients& gradients) const {
  const TensorView input = InnerBackward(stream, memory, gradients);
  if (cuts_) {
    FinishBackward(stream,
                   memory,
                   gradients,
                   input_.InputGradientParts(stream, {.memory = memory, .from = input}));
  } else {
    input_.InputGradient(stream, {.memory = memory, .dy = input, .dx = memory.workspace[d_c_]});
    InputWeightGradient(stream, memory, gradients);
  }
}

std::vector<TensorView> MlpBlock::BackwardParts(Stream& stream,
                                                const UnitMemory& memory,
                                                const WeightGradients& gradients) const {
  const TensorView input = InnerBackward(stream, memory, gradients);
  return input_.InputGradientParts(stream, {.memory = memory, .from = input});
}

void MlpBlock::FinishBackward(Stream& stream,
                              const UnitMemory& memory,
                              const WeightGradients& gradients,
                              const std::vector<TensorView>& pieces) const {
  kernels::SumParts(stream, {.pieces = pieces, .out = memory.workspace[d_c_]});
  InputWeightGradient(stream, memory, gradients);
}

// Down to the gradient of `input`, in its place, with the gradients of the output projection.
TensorView MlpBlock::InnerBackward(Stream& stream,
                                   const UnitMemory& memory,
                                   const WeightGradients& gradients) const {
  const TensorView& dhidden = memory.shared[dhidden_];
  const TensorView input = input_values_.In(memory);
  const TensorView inner = Carve(memory.workspace[d_a_], dhidden.size[0], inner_);
  const TensorView d_inner = Carve(memory.workspace[d_b_], dhidden.size[0], inner_);
  output_.InputGradient(stream, {.memory = memory, .dy = dhidden, .dx = d_inner});
  Deactivate(stream, input, d_inner, inner);
  output_.WeightGradient(stream,
                         {.memory = memory, .gradients = gradients, .x = inner, .dy = dhidden});
  return input;
}

void MlpBlock::InputWeightGradient(Stream& stream,
                                   const UnitMemory& memory,
                                   const WeightGradients& gradients) const {
  input_.WeightGradient(stream,
                        {.memory = memory,
                         .gradients = gradients,
                         .x = normed_.ResultIn(memory),
                         .dy = input_values_.In(memory)});
}

void MlpBlock::BackwardNorm(Stream& stream,
                            const UnitMemory& memory,
                            const WeightGradients& gradients) const {
  const TensorView& dhidden = memory.shared[dhidden_];
  norm_.Backward(stream,
                 {.memory = memory,
                  .gradients = gradients,
                  .dy = memory.workspace[d_c_],
                  .x = x1_.In(memory),
                  .dresidual = dhidden,
                  .dx = dhidden,
                  .statistics = normed_.StatisticsIn(memory)});
}

}  // namespace ravel::model
