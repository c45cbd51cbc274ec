#pragma once

// Owners of whole tensors, for optimizers that need a matrix in one place.

#include <cstdint>
#include <vector>

#include "common/model/bundles.h"
#include "common/plan/layout/flat_layout.h"

namespace ravel::plan {

// Who owns which tensor of a model under TensorAtomic, and where it lies in the owner's part.
struct TensorOwners {
  std::vector<int64_t> owner;          // per item, in input order
  std::vector<int64_t> offset;         // elements from the start of the owner's part, aligned
  std::vector<int64_t> part_elements;  // per owner; unequal, so nothing is padded but alignment
};

// Over the whole model, not unit by unit: longest first, to whoever has least, ties to the lower
// name and the lower owner. A pure function of the set of items; within a part, items are in input
// order.
TensorOwners AssignTensorOwners(const std::vector<LayoutItem>& items,
                                int64_t owner_count,
                                int64_t alignment_elements = kLayoutAlignmentElements);

}  // namespace ravel::plan
