#pragma once

// Checks a job's recipe against the GPUs that are known, before any is held. Pure.

#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/status.h"
#include "coordinator/fleet/device_inventory.h"

namespace ravel::coordinator {

struct RecipeFit {
  absl::Status status;                // why no GPU that is here can run the recipe
  std::vector<std::string> warnings;  // models that cannot, where others may: none is placed there
};

// An error names the job field, the first model and what it lacks. Models that are not known may
// run anything, until a trainer starts; without a GPU nothing is refused.
RecipeFit CheckRecipeHere(const plan::JobSpec& spec, const DeviceInventory& inventory);

}  // namespace ravel::coordinator
