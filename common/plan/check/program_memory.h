#pragma once

// Rules K2 and K3.

#include "common/plan/check/program_facts.h"
#include "common/status.h"

namespace ravel::plan {

// K2, K3: every two accesses of which one writes are ordered.
absl::Status CheckMemory(const ProgramFacts& facts);

}  // namespace ravel::plan
