#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/model_inventory.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::plan {

inline constexpr int64_t kLayoutAlignmentElements = 256;

// One thing placed contiguously in the gathered buffer: a tensor, or a bundle of adjacent tensors.
struct LayoutItem {
  std::string name;
  int64_t elements = 0;
  int64_t atom_elements =
      1;  // a shard boundary strictly inside the item lies at a multiple of this from its offset
};

struct FlatLayoutOptions {
  int64_t width = 1;  // ranks on the shard axis
  int64_t alignment_elements = kLayoutAlignmentElements;
};

// Where each item lies in a virtual buffer of width * shard_elements elements. Invariants: see docs
// of PlanFlatLayout.
struct FlatLayout {
  int64_t width = 1;
  int64_t shard_elements = 0;    // S; total T = width * S
  std::vector<int64_t> offsets;  // per item, in input order
  int64_t padding_elements = 0;  // T - sum of item elements
  int64_t total_elements() const { return width * shard_elements; }
};

// Places the items. Pure function of (items, options): L1 disjoint extents inside [0, T); L2
// offsets aligned; L3 equal shards, S aligned; L4 boundaries inside an item at atoms; L9 T at most
// that of the LCM baseline.
FlatLayout PlanFlatLayout(const std::vector<LayoutItem>& items, const FlatLayoutOptions& options);

// A contiguous part of a tensor's row-major elements that one rank owns, and where it lies in that
// rank's shard.
struct OwnedPiece {
  TensorId tensor = {};
  int64_t begin = 0;  // global row-major element range [begin, end) of the tensor
  int64_t end = 0;
  int64_t shard_offset = 0;  // elements from the start of the rank's shard of the group
  bool operator==(const OwnedPiece&) const = default;
};

// A shard boundary inside a tensor lies at a multiple of this from its start: a block of rows; of
// 256 elements, or all, where it has one dimension.
int64_t AtomElements(const TensorSpec& tensor);

// Whether the parts of a bundle can be one item: equal atoms, sizes that keep every part aligned
// and between blocks, all trained or all frozen.
bool CanFuse(const ModelInventory& inventory, const BundleSpec& bundle);
// Takes apart the bundles that cannot be fused; their tensors are placed one by one. Layouts need
// that done after blocks or the frozen set have changed.
void DissolveBundles(ModelInventory& inventory);

// The tensors of one parameter group in one flat buffer: those of a unit, or a part of them.
// `tensor_offsets[i]` is where units' tensor i starts in the gathered buffer.
struct GroupLayout {
  UnitId unit = 0;
  bool trainable = true;
  FlatLayout layout;
  std::vector<TensorId> tensors;        // ascending offset
  std::vector<int64_t> tensor_offsets;  // elements, same order
};
using GroupLayouts = IdVector<GroupId, GroupLayout>;
GroupLayout PlanGroupLayout(const ModelInventory& inventory, UnitId unit, int64_t width);

struct GroupOptions {
  int most_groups = 3;  // of one kind (trainable or frozen)
  // What a further group costs: the time of its collectives' launches, in elements on the wire.
  int64_t launch_elements = 262144;
  int64_t alignment_elements = kLayoutAlignmentElements;  // 512 where two elements share a byte
};
// The parameter groups of a unit: trainable before frozen, which never share a group; each kind
// split by atom family where that saves more than its launches cost: every way to form at most
// `most_groups` is tried. Bundles stay whole. `width`: ranks that cut each group's buffer. Every
// tensor of the unit is in exactly one group; no group is empty.
GroupLayouts PlanGroups(const ModelInventory& inventory,
                        UnitId unit,
                        int64_t width,
                        const GroupOptions& options = {});

// Pieces that `rank` owns, in buffer order; empty when it owns nothing.
std::vector<OwnedPiece> OwnedPieces(const ModelInventory& inventory,
                                    const GroupLayout& group,
                                    int64_t rank);

}  // namespace ravel::plan
