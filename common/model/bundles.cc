#include "common/model/bundles.h"

#include <algorithm>
#include <utility>

#include "common/shape.h"

namespace ravel::plan {
namespace {

constexpr int64_t kOneDimensionalRow = 256;

}  // namespace

int64_t AtomElements(const TensorSpec& tensor) {
  if (tensor.shape.size() > 1) {
    return RowElements(tensor.shape) * tensor.block_rows;
  }
  return std::max<int64_t>(1, std::min(ElementCount(tensor.shape), kOneDimensionalRow));
}

bool CanFuse(const ModelInventory& inventory, const BundleSpec& bundle) {
  const TensorSpec& first = inventory.tensors[bundle.tensors.front()];
  for (const TensorId index : bundle.tensors) {
    const TensorSpec& part = inventory.tensors[index];
    const int64_t elements = ElementCount(part.shape);
    if (part.unit != first.unit || part.trainable != first.trainable ||
        part.recipe != first.recipe || AtomElements(part) != AtomElements(first) ||
        elements % kLayoutAlignmentElements != 0 || elements % AtomElements(part) != 0) {
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
