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

namespace ravel::model {

using kernels::Output;
using kernels::Stream;

MlpBlock::MlpBlock(const UnitTensors& tensors)
    : kind_(tensors.architecture().mlp),
      inner_(tensors.inventory().config.intermediate_size),
      norm_(tensors, tensors.architecture().mlp_norm),
      normed_(tensors, "1", "d_c"),
      input_(tensors, tensors.architecture().mlp_input),
      output_(tensors, tensors.architecture().mlp_output),
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
  const TensorView input = input_values_.In(memory);
  const TensorView inner = Carve(memory.workspace[d_a_], hidden.size[0], inner_);
  input_.Forward(stream, {.memory = memory, .x = normed_.ResultIn(memory), .y = input});
  Activate(stream, input, inner);
  output_.Forward(stream,
                  {.memory = memory, .x = inner, .y = hidden, .output = Output::kAccumulate});
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
  const TensorView& dhidden = memory.shared[dhidden_];
  const TensorView input = input_values_.In(memory);
  const TensorView inner = Carve(memory.workspace[d_a_], dhidden.size[0], inner_);
  const TensorView d_inner = Carve(memory.workspace[d_b_], dhidden.size[0], inner_);
  output_.InputGradient(stream, {.memory = memory, .dy = dhidden, .dx = d_inner});
  Deactivate(stream, input, d_inner, inner);
  output_.WeightGradient(stream,
                         {.memory = memory, .gradients = gradients, .x = inner, .dy = dhidden});
  const TensorView& d_normed = memory.workspace[d_c_];
  input_.InputGradient(stream, {.memory = memory, .dy = input, .dx = d_normed});
  input_.WeightGradient(
      stream,
      {.memory = memory, .gradients = gradients, .x = normed_.ResultIn(memory), .dy = input});
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
