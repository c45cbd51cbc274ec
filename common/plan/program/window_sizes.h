#pragma once

// Byte windows where the job does not say.

#include "common/plan/program/program_request.h"

namespace ravel::plan {

// Where a window is 0: the most bytes that two consecutive uses need together.
ProgramOptions ResolveWindows(const ProgramRequest& request);

}  // namespace ravel::plan
