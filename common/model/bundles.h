#pragma once

// Cuts of tensors, and bundles that lie in a buffer as one.

#include <cstdint>

#include "common/model/model_inventory.h"

namespace ravel::plan {

// Elements: everything in a flat buffer starts at a multiple of this.
inline constexpr int64_t kLayoutAlignmentElements = 256;

// A shard boundary inside a tensor's item (ItemShape) lies at a multiple of this from its start: a
// block of rows; of 256 elements, or all, where it has one dimension; all, where the tensor axis
// leaves parts with rows of several lengths.
int64_t AtomElements(const TensorSpec& tensor);

// Returns true if the parts of a bundle can be one item: equal atoms, sizes that keep every part
// aligned and between blocks, all trained or all frozen, gradients all whole or all addends.
bool CanFuse(const ModelInventory& inventory, const BundleSpec& bundle);
// Takes apart the bundles that cannot be fused; their tensors are placed one by one. Layouts need
// that done after blocks or the frozen set have changed.
void DissolveBundles(ModelInventory& inventory);

}  // namespace ravel::plan
