#pragma once

// Items in one flat buffer that ranks cut into equal shards.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/bundles.h"

namespace ravel::plan {

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

// The offset of each item in a virtual buffer of width * shard_elements elements. Invariants: see
// PlanFlatLayout.
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

}  // namespace ravel::plan
