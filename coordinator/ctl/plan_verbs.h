#pragma once

// plan: what a job would be on devices that nobody has to have.

#include <optional>
#include <string>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct PlanOptions {
  std::string file = {};
  std::string devices = {};                // "64xH100-80G", "4xcpu", "4"; "": the job's own
  std::optional<bool> shared_memory = {};  // default: cpu devices, unless by gloo
  bool verbose = false;
};
// Prints groups, memory, wire, a timeline of one step and the plan's digest. A plan that does not
// fit its devices ends with kExitConflict and names what would fit.
int RunPlan(const CommonOptions& common, const PlanOptions& options);

}  // namespace ravel::ctl
