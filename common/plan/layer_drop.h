#pragma once

// Stochastic depth: which layers a micro-batch leaves out.

#include <cstdint>
#include <string>

#include "common/model/model_inventory.h"

namespace ravel::plan {

struct LayerDraw {
  uint64_t seed = 0;
  double probability = 0;  // 0 to below 1
  int64_t step = 0;        // 0-based
  int64_t lane = 0;
  int64_t micro_batch = 0;  // of the lane
};

// Says of each unit if the micro-batch uses it; empty where the probability is 0: all are used.
// Every optional unit is left out with the probability, by one Philox draw of its own, keyed by
// seed, step, lane, micro-batch and layer: no number of ranks changes it. Both calls of a unit that
// is called twice are used, or neither is.
IdVector<UnitId, bool> UsedUnits(const ModelInventory& inventory, const LayerDraw& draw);

// The probability in the fewest digits that give it back: "0", "0.1".
std::string LayerDropText(double probability);

}  // namespace ravel::plan
