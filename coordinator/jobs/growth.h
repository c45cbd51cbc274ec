#pragma once

// Why a job that trains is smaller than the size it wants, and when it is looked at next. Pure.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/model/job_spec.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

struct GrowthLook {
  const plan::JobSpec* spec = nullptr;
  int64_t world_size = 0;
  int64_t free = 0;                      // devices that it may take beside its own
  size_t queued = 0;                     // jobs that wait: free devices are theirs first
  std::optional<int64_t> since_ms = {};  // monotonic: a larger size has been possible since then
  int64_t rested_ms = 0;                 // monotonic: growEvery is over then
  bool saving = false;                   // a save is under way
  int64_t now_ms = 0;                    // monotonic
};

// The condition WantedSize: false, with the reason NoFreeDevices, JobsAreQueued, GrowthWaits,
// SaveUnderWay or Growing. Only for a job below its wanted size.
JobCondition WantedSize(const GrowthLook& look);

}  // namespace ravel::coordinator
