#pragma once

#include "common/model/model_inventory.h"

namespace ravel::plan {

// Fills the activations of every unit and the shared ones. Pure; part of BuildInventory.
void AddActivations(ModelInventory& inventory,
                    const MicroBatchShape& micro_batch,
                    RecomputePolicy recompute);

}  // namespace ravel::plan
