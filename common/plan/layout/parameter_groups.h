#pragma once

// Parameter groups: the tensors of a unit that share one flat buffer.

#include <cstdint>
#include <vector>

#include "common/model/bundles.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/flat_layout.h"

namespace ravel::plan {

// The tensors of one parameter group in one flat buffer: those of a unit, or a part of them.
// `tensor_offsets[i]` is where units' tensor i starts in the gathered buffer.
struct GroupLayout {
  UnitId unit = 0;
  bool trainable = true;
  Recipe recipe = Recipe::kNone;  // of all its tensors
  FlatLayout layout;
  std::vector<TensorId> tensors;        // ascending offset
  std::vector<int64_t> tensor_offsets;  // elements, same order
};
using GroupLayouts = IdVector<GroupId, GroupLayout>;

struct GroupOptions {
  int most_groups = 3;  // of one kind (quantized, trained or frozen)
  // Cost of a further group: the time of its collectives' launches, in elements on the wire.
  int64_t launch_elements = 262144;
  int64_t alignment_elements = kLayoutAlignmentElements;  // 512 where two elements share a byte
};
// The parameter groups of a unit: quantized before other trained before frozen tensors, which never
// share a group, nor do those with and without DimensionCut::partial_gradient; each kind split by
// atom family where that saves more than its launches cost: every way to form at most `most_groups`
// is tried. Bundles stay whole. `width`: ranks that cut each group's buffer. Every tensor of the
// unit is in exactly one group; no group is empty.
GroupLayouts PlanGroups(const ModelInventory& inventory,
                        UnitId unit,
                        int64_t width,
                        const GroupOptions& options = {});

}  // namespace ravel::plan
