#pragma once

// Rule K1.

#include "common/plan/check/program_facts.h"
#include "common/status.h"

namespace ravel::plan {

// K1: weights are gathered, newest, and not written while they are read.
absl::Status CheckWeights(const ProgramFacts& facts);

}  // namespace ravel::plan
