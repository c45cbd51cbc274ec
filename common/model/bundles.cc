#include "common/model/bundles.h"

#include <algorithm>
#include <utility>

#include "common/model/tensor_cuts.h"
#include "common/shape.h"

namespace ravel::plan {
namespace {

constexpr int64_t kOneDimensionalRow = 256;

}  // namespace

int64_t AtomElements(const TensorSpec& tensor) {
  const Shape item = ItemShape(tensor);
  if (item.size() == 1) {
    return std::max<int64_t>(1, std::min(item[0], kOneDimensionalRow));
  }
  // Parts of another dimension than the rows' are matrices of their own, with shorter rows.
  const auto first = tensor.cut.parts.begin();
  const int64_t parts =
      std::count_if(first, tensor.cut.parts.end(), [](int64_t part) { return part > 0; });
  if (tensor.cut.cuts() && tensor.cut.dim > 0 && parts > 0) {
    const bool equal = std::all_of(
        first, first + parts, [&](int64_t part) { return part == tensor.cut.parts[0]; });
    return equal ? RowElements(item) / parts * tensor.block_rows : ElementCount(item);
  }
  return RowElements(item) * tensor.block_rows;
}

bool CanFuse(const ModelInventory& inventory, const BundleSpec& bundle) {
  const TensorSpec& first = inventory.tensors[bundle.tensors.front()];
  for (const TensorId index : bundle.tensors) {
    const TensorSpec& part = inventory.tensors[index];
    const int64_t elements = ItemElements(part);
    if (part.cut.partial_gradient != first.cut.partial_gradient || part.unit != first.unit ||
        part.trainable != first.trainable || part.recipe != first.recipe ||
        AtomElements(part) != AtomElements(first) || elements % kLayoutAlignmentElements != 0 ||
        elements % AtomElements(part) != 0) {
      return false;
    }
  }
  return true;
}

void DissolveBundles(ModelInventory& inventory) {
  IdVector<BundleId, BundleSpec> kept;
  for (BundleSpec& bundle : inventory.bundles) {
    const bool fused = CanFuse(inventory, bundle);
    for (const TensorId tensor : bundle.tensors) {
      inventory.tensors[tensor].bundle = fused ? kept.end_id() : BundleId();
    }
    if (fused) {
      kept.push_back(std::move(bundle));
    }
  }
  inventory.bundles = std::move(kept);
}

}  // namespace ravel::plan
