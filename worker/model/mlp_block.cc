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

using kernels::Stream;

namespace {

// Columns that a rank has of gate and up, or of up alone.
Projection::Members MlpMembersOf(const UnitTensors& tensors) {
  const plan::ModelInventory& inventory = tensors.inventory();
  const size_t maps = tensors.architecture().mlp == plan::MlpKind::kSwiGlu ? 2 : 1;
  return {.columns = std::vector<int64_t>(
              maps, plan::LocalSizesOf(inventory.config, inventory.cut).inner)};
}

}  // namespace

MlpBlock::MlpBlock(const UnitTensors& tensors)
    : ResidualBlock(tensors,
                    {.norm = tensors.architecture().mlp_norm,
                     .index = "1",
                     .x = "x1",
                     .input = tensors.architecture().mlp_input,
                     .members = MlpMembersOf(tensors),
                     .output = tensors.architecture().mlp_output}),
      kind_(tensors.architecture().mlp),
      inner_(plan::LocalSizesOf(tensors.inventory().config, cut_).inner),
      input_values_(tensors.spec(), "mlp_in", "d_b") {}

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

void MlpBlock::InnerForward(Stream& stream, const UnitMemory& memory) const {
  const TensorView input = input_values_.In(memory);
  input_.Forward(stream, {.memory = memory, .x = Normed(memory), .y = input});
  Activate(stream, input, InnerResult(memory));
}

TensorView MlpBlock::InnerResult(const UnitMemory& memory) const {
  return Carve(memory.workspace[d_a_], input_values_.In(memory).size[0], inner_);
}

TensorView MlpBlock::InnerGradient(const UnitMemory& memory) const {
  return input_values_.In(memory);
}

void MlpBlock::Remake(Stream& stream, const UnitMemory& memory) const {
  input_.Forward(stream, {.memory = memory, .x = Normed(memory), .y = input_values_.In(memory)});
}

// Down to the gradient of `input`, in its place, with the gradients of the output projection.
void MlpBlock::InnerBackward(Stream& stream,
                             const UnitMemory& memory,
                             const WeightGradients& gradients) const {
  const TensorView dy = OutputGradient(memory);
  const TensorView input = input_values_.In(memory);
  const TensorView inner = Carve(memory.workspace[d_a_], dy.size[0], inner_);
  const TensorView d_inner = Carve(memory.workspace[d_b_], dy.size[0], inner_);
  output_.InputGradient(stream, {.memory = memory, .dy = dy, .dx = d_inner});
  Deactivate(stream, input, d_inner, inner);
  OutputWeightGradient(stream, memory, gradients, inner);
}

}  // namespace ravel::model
