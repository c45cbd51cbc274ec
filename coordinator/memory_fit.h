#pragma once

// Whether a job's plans fit the memory of the devices that are known, before any of them is held.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/job_spec.h"
#include "common/status.h"
#include "coordinator/device_inventory.h"
#include "coordinator/planner.h"

namespace ravel::coordinator {

// What a rank may use of a device, or all ranks of a cpu node together: less 6 %, as `ravelctl
// plan` has it.
int64_t UsableBytes(int64_t memory_bytes);

struct MemoryFit {
  absl::Status status;                // why no known device can hold any allowed size
  std::vector<std::string> warnings;  // sizes that none can hold, or that nothing is known
  std::vector<int64_t> peak_bytes;    // predicted, of the worst rank, by index of elastic.sizes; 0:
                                      // a size above devices.count, which is never used
};

// Plans the allowed sizes (most are cached) and, for a refusal, the changes that could help.
MemoryFit CheckMemory(Planner& planner,
                      const plan::JobSpec& spec,
                      const DeviceInventory& inventory);

}  // namespace ravel::coordinator
