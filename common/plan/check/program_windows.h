#pragma once

// Rules K6 and K10.

#include "common/plan/check/program_facts.h"
#include "common/status.h"

namespace ravel::plan {

// K6, K10: byte windows as caps, and prefetch that overlaps.
absl::Status CheckWindows(const ProgramFacts& facts);

}  // namespace ravel::plan
