#pragma once

// Finds the parts of a bundle that a mesh axis cuts, on a rank.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/plan/layout/placement.h"

namespace ravel::plan {

// One part of a bundle on one rank.
struct BundlePiece {
  ElementRange in_part;     // of the part's own elements; empty when the rank has none of it
  int64_t local_begin = 0;  // from the start of the rank's range of the item
  bool operator==(const BundlePiece&) const = default;
};

// A bundle's parts lie one after another in its item. `owned` is the rank's range in *item*
// coordinates and `part_elements` the parts' full sizes in the item, never local counts; they must
// add up to `item_elements`. One piece per part. The same for weights and every optimizer state,
// and whether or not the item is replicated over `tensor`.
inline std::vector<BundlePiece> SplitBundle(const std::vector<int64_t>& part_elements,
                                            int64_t item_elements,
                                            const ElementRange& owned) {
  CHECK(0 <= owned.begin && owned.begin <= owned.end && owned.end <= item_elements);
  std::vector<BundlePiece> pieces;
  int64_t part_begin = 0;
  for (const int64_t elements : part_elements) {
    const int64_t part_end = part_begin + elements;
    const int64_t begin = std::max(owned.begin, part_begin);
    const int64_t end = std::min(owned.end, part_end);
    if (begin < end) {
      pieces.push_back({{begin - part_begin, end - part_begin}, begin - owned.begin});
    } else {
      pieces.push_back({});
    }
    part_begin = part_end;
  }
  CHECK_MSG(part_begin == item_elements, "the parts of a bundle are its item");
  return pieces;
}

}  // namespace ravel::plan
