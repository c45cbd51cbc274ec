#pragma once

// Programs of one step that follow each other, and the weights that one leaves gathered for the
// next. Internal to the builder.

#include <optional>
#include <vector>

#include "common/plan/program/step_program.h"

namespace ravel::plan {

bool Updates(Phase phase);
// What stays gathered, or is cut among replicas, is renewed where the optimizer may have run since
// the program before.
bool RenewsWeights(Phase phase);

struct ProgramKind {
  Phase phase = Phase::kOnly;
  LanePart part = LanePart::kWhole;
  bool operator==(const ProgramKind&) const = default;
};

// True if another program of the same step follows, or comes before.
bool HandsOver(const ProgramKind& kind);
bool TakesOver(const ProgramKind& kind);

// Groups that stay gathered between the programs of a step. Without `at_end`: whatever is left.
struct HandOver {
  std::vector<GroupId> at_start;
  std::optional<std::vector<GroupId>> at_end;
};

// The groups that all programs which are followed by another one leave gathered, ascending.
std::vector<GroupId> CommonAtEnd(const ProgramBuffers& buffers,
                                 const std::vector<StepProgram>& programs,
                                 const std::vector<ProgramKind>& kinds);

}  // namespace ravel::plan
