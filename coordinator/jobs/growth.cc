#include "coordinator/jobs/growth.h"

#include <algorithm>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/time_text.h"
#include "coordinator/jobs/admission.h"

namespace ravel::coordinator {
namespace {

// The smallest allowed size above the present one, at most the wanted one.
int64_t NextSize(const GrowthLook& look) {
  int64_t next = look.spec->device_count;
  for (const int64_t size : look.spec->elastic.sizes) {
    if (size > look.world_size) {
      next = std::min(next, size);
    }
  }
  return next;
}

std::string WaitText(const GrowthLook& look, int64_t larger) {
  const plan::ElasticSpec& elastic = look.spec->elastic;
  const int64_t settled_ms = look.since_ms.value_or(look.now_ms) + elastic.grow_delay_ms;
  const bool by_every = look.rested_ms > settled_ms;
  const int64_t due_ms = std::max(settled_ms, look.rested_ms);
  return absl::StrCat("may grow to ",
                      larger,
                      " in ",
                      FormatDuration(std::max<int64_t>(due_ms - look.now_ms, 0)),
                      by_every ? " (growEvery " : " (growDelay ",
                      FormatDurationExact(by_every ? elastic.grow_every_ms : elastic.grow_delay_ms),
                      ")");
}

}  // namespace

JobCondition WantedSize(const GrowthLook& look) {
  const int64_t larger = ChooseSize(*look.spec, look.world_size + look.free);
  JobCondition condition{.type = "WantedSize"};
  std::string why;
  if (look.queued > 0) {
    condition.reason = "JobsAreQueued";
    why = absl::StrCat(look.queued,
                       look.queued == 1 ? " job is" : " jobs are",
                       " queued, and free devices are for queued jobs first");
  } else if (larger <= look.world_size) {
    condition.reason = "NoFreeDevices";
    why = absl::StrCat("the next size ",
                       NextSize(look),
                       " needs ",
                       NextSize(look) - look.world_size,
                       " more; ",
                       look.free,
                       look.free == 1 ? " is" : " are",
                       " free that it may use");
  } else if (!look.since_ms ||
             look.now_ms <
                 std::max(*look.since_ms + look.spec->elastic.grow_delay_ms, look.rested_ms)) {
    condition.reason = "GrowthWaits";
    why = WaitText(look, larger);
  } else if (look.saving) {
    condition.reason = "SaveUnderWay";
    why = absl::StrCat("grows to ", larger, " after the save that is under way");
  } else {
    condition.reason = "Growing";
    why = absl::StrCat("grows to ", larger, " now");
  }
  condition.message =
      absl::StrCat("runs on ", look.world_size, " of ", look.spec->device_count, " devices: ", why);
  return condition;
}

}  // namespace ravel::coordinator
