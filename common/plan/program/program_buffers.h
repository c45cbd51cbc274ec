#pragma once

// The buffers of a step: how many bytes of which memory each group and unit needs.

#include "common/plan/program/program_request.h"

namespace ravel::plan {

// True if the group's gathered buffer stays: its weights are not cut, or gathers are in place.
bool IsResident(const ProgramRequest& request, GroupId group);

// Every buffer of every program.
ProgramBuffers BuildBuffers(const ProgramRequest& request);

}  // namespace ravel::plan
