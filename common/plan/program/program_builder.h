#pragma once

// Step programs: gather, use, free, reduce within two byte windows; what each group needs is read
// from its roles.

#include <vector>

#include "common/plan/program/program_request.h"

namespace ravel::plan {

// The distinct programs of a step, in the order in which it first runs them, and eval.
std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const ProgramBuffers& buffers);

}  // namespace ravel::plan
