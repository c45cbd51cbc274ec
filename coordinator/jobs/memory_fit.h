#pragma once

// Checks a job's plans against the memory of the devices that are known, before any is held.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/status.h"
#include "coordinator/fleet/device_inventory.h"
#include "coordinator/jobs/planner.h"

namespace ravel::coordinator {

// Bytes that a rank may use of a device, or all ranks of a cpu node together: 6 % less than the
// memory, as in `ravelctl plan`.
int64_t UsableBytes(int64_t memory_bytes);

// Sets the memory that an automatic offload of the job is planned for: that of the largest device
// of its kind that is here, or 0.
void SetOffloadMemory(const DeviceInventory& inventory, plan::JobSpec& spec);

struct MemoryFit {
  absl::Status status;                // why no known device can hold any allowed size
  std::vector<std::string> warnings;  // sizes that none can hold, or that nothing is known
  std::vector<int64_t> peak_bytes;    // predicted, of the worst rank, by index of elastic.sizes; 0:
                                      // a size above devices.count, which is never used
};

// Plans every allowed size, the very code that runs later, and for a refusal the changes that could
// help. A size fits where a device can hold its rank and the hosts of devices what that offloads;
// hosts of unknown memory hold anything, until a trainer starts. An error names the job field and
// the size. Before each size `give_up` is asked; what it answers, when not OK, is the result.
MemoryFit CheckMemory(
    Planner& planner,
    const plan::JobSpec& spec,
    const DeviceInventory& inventory,
    const std::function<absl::Status()>& give_up = [] { return absl::OkStatus(); });

}  // namespace ravel::coordinator
