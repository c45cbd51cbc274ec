#pragma once

// A plan as text for people: what `ravelctl plan` shows and a trainer logs at start.

#include <string>
#include <vector>

#include "common/plan/program/group_roles.h"
#include "common/plan/program/step_program.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

// The parameter-group table: a title, then a row per group.
std::vector<std::string> GroupTableLines(const ShardingPlan& plan);

// "1.5 KiB", "23.4 MiB": three or four digits.
std::string BytesText(int64_t bytes);

// Lists the strategies of units: a line per run of consecutive units with the same.
std::string StrategiesText(const ShardingPlan& plan, const UnitChoices& choices);

struct SummaryOptions {
  // Every group on a line of its own, with the addresses of its buffers; else equal groups of
  // consecutive units share a line.
  bool verbose = false;
};
// Ranks and lanes, bytes on the wire by axis, memory by category, one line per parameter group.
std::string PlanSummary(const ShardingPlan& plan, const SummaryOptions& options = {});

// One line per instruction: number, stream, what it does, what it waits for.
std::string ProgramListing(const ShardingPlan& plan, const StepProgram& program);

}  // namespace ravel::plan
