// Parts p = 0 ... Q - 1 are products from zero, each in fp32, added like a binary counter:
//   node(p) = product;  while p + 1 is a multiple of 2, 4, ...: the last two nodes become one
// so that at most log2(Q) + 1 of them are alive. Adding costs Q - 1 passes over [tokens, hidden].

#include "worker/model/part_sums.h"

#include "common/check.h"
#include "kernels/part_sum.h"
#include "kernels/tree_reduce.h"

namespace ravel::model {
namespace {

TensorView AsRow(const TensorView& view) {
  CHECK(view.contiguous());
  TensorView row = view;
  row.rank = 2;
  row.size = {1, view.elements()};
  row.row_stride = view.elements();
  return row;
}

}  // namespace

PartSums::PartSums(const UnitTensors& tensors) : cut_(tensors.inventory().cut) {
  if (cuts()) {
    scratch_ = ActivationIndex(tensors.spec().workspace, "parts");
  }
}

std::vector<TensorView> PartSums::Products(
    kernels::Stream& stream,
    const UnitMemory& memory,
    const Place& place,
    absl::FunctionRef<void(int64_t part, const TensorView& to)> product) const {
  const TensorView& scratch = memory.workspace[scratch_];
  const int64_t parts = cut_.local_parts();
  const bool halves = cut_.degree == 1;
  std::vector<TensorView> nodes;
  const auto next = [&] {
    if (!halves && nodes.empty()) {  // the root is left where the first node was
      return RowsOf(memory.addend, place.first, place.rows);
    }
    const auto depth = static_cast<int64_t>(nodes.size()) - (halves ? 0 : 1);
    const int64_t elements = place.rows * place.columns;
    CHECK_LE((depth + 1) * elements, scratch.elements());
    return MatrixView(scratch.As<float>() + depth * elements, place.rows, place.columns);
  };
  for (int64_t part = 0; part < parts; ++part) {
    nodes.push_back(next());
    product(part, nodes.back());
    for (int64_t closed = part + 1; closed % 2 == 0; closed /= 2) {
      if (halves && closed == 2 && part + 1 == parts) {
        break;
      }
      const TensorView right = AsRow(nodes.back());
      nodes.pop_back();
      const TensorView left = AsRow(nodes.back());
      kernels::TreeAdd(stream, {.a = left, .b = right, .out = left});
    }
  }
  return halves ? nodes : std::vector<TensorView>();
}

GradientLeaves::GradientLeaves(const UnitTensors& tensors, size_t weight) : weight_(weight) {
  const std::vector<plan::ActivationSpec>& leaves = tensors.spec().leaves;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].name == tensors.tensor(weight).name) {
      leaves_ = i;
      count_ = leaves[i].shape[0];
    }
  }
}

TensorView GradientLeaves::Leaf(const UnitMemory& memory,
                                const WeightGradients& gradients,
                                int64_t i) const {
  CHECK(i >= 0 && i < count_);
  const TensorView& whole = gradients.views[weight_];
  if (!leaves_.has_value() || !whole.present()) {
    return whole;
  }
  const TensorView& leaves = memory.leaves[*leaves_];
  return VectorView(leaves.Row<float>(i), leaves.size[1]);
}

TensorView GradientLeaves::All(const UnitMemory& memory) const {
  return memory.leaves[*leaves_];
}

void GradientLeaves::Fold(kernels::Stream& stream,
                          const UnitMemory& memory,
                          const WeightGradients& gradients,
                          int64_t shares) const {
  const TensorView& whole = gradients.views[weight_];
  if (!leaves_.has_value() || !whole.present()) {
    return;
  }
  const TensorView& leaves = memory.leaves[*leaves_];
  const int64_t each = count_ / shares;
  TensorView out = AsRow(whole);
  out.size[1] = leaves.size[1];
  for (int64_t share = 0; share < shares; ++share) {
    kernels::SumPartsArgs args = {.pieces = {}, .out = out};
    for (int64_t i = 0; i < each; ++i) {
      args.pieces.push_back(MatrixView(leaves.Row<float>(share * each + i), 1, leaves.size[1]));
    }
    kernels::SumParts(stream, args);
    out.data = ElementAt(out.data, leaves.size[1], out.dtype);
  }
}

}  // namespace ravel::model
