#pragma once

// The mistakes of tests/worker/model/tensor_ranks.h that are made inside a segment: what one rank
// would compute without the rule.

#include <absl/functional/function_ref.h>

#include "common/model/model_inventory.h"
#include "common/model/segments.h"
#include "tests/worker/model/tensor_ranks.h"
#include "worker/model/module.h"

namespace ravel::model {

// Norms of heads then have one gradient, which each part is added to.
void DropHeadNormLeaves(plan::ModelInventory& inventory);

struct Mistaken {
  Mistake mistake = Mistake::kNone;
  const plan::ModelInventory& inventory;
  plan::UnitId unit;
  const UnitMemory& memory;
};
// Changes what a segment of a forward has computed.
void AfterForward(const Mistaken& mistaken, plan::SegmentKind kind);
// Runs a segment of a backward, or what the rank would do in its place.
void RunBackward(const Mistaken& mistaken,
                 plan::SegmentKind kind,
                 kernels::Output output,
                 absl::FunctionRef<void(kernels::Output)> run);

}  // namespace ravel::model
