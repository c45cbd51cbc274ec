#pragma once

// Refuses units too much of which is padding.

#include <vector>

#include "common/model/model_inventory.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/status.h"

namespace ravel::plan {

// Padding of all groups of one unit.
struct UnitPadding {
  int64_t elements = 0;  // without padding
  int64_t padding = 0;
  int64_t tensors = 0;
  double percent() const;
};
UnitPadding PaddingOf(const GroupLayouts& groups, UnitId unit);

// Elements of padding per rank and unit that nobody need worry about: 256 KiB in fp32.
inline constexpr int64_t kFreePaddingElements = 65536;

// A unit that is padded by more than 10 % is refused, unless each rank's padding is at most
// kFreePaddingElements: small units, where it costs nothing. The error
// names the tensor that forces the padding and what helps, in this order: a narrower shard axis
// (the widest that is allowed), larger gather granules, row atoms, allowPadding.
absl::Status CheckPadding(const ModelInventory& inventory, const GroupLayouts& groups);

}  // namespace ravel::plan
