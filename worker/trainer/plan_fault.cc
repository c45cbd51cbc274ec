#include "worker/trainer/plan_fault.h"

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/fault_point.h"
#include "common/logging.h"

namespace ravel::trainer {
namespace {

using plan::Instruction;
using plan::OpCode;

bool IsOfGroup(const Instruction& instruction) {
  return instruction.op == OpCode::kGather || instruction.op == OpCode::kReduce;
}

// The gather of a unit's weights.
bool FillsWeights(const Instruction& instruction) {
  return instruction.op == OpCode::kGather &&
         plan::BufferOf(instruction, plan::Role::kWeights) >= 0;
}

bool IsBookkeeping(const Instruction& instruction) {
  return instruction.op == OpCode::kFree || instruction.op == OpCode::kAllocStaging;
}

// The second goes before the first. A gather may go before computations, too: it only needs the
// weights of this step.
bool Exchange(const plan::MoveTable& moves, plan::StepProgram& program, bool same_stream) {
  std::vector<Instruction>& list = program.instructions;
  for (auto first = list.begin(); first != list.end(); ++first) {
    const auto second = std::find_if(first + 1, list.end(), IsOfGroup);
    if (second == list.end() || !IsOfGroup(*first) ||
        (first->stream == second->stream) != same_stream ||
        (!FillsWeights(*second) && !std::all_of(first + 1, second, IsBookkeeping))) {
      continue;
    }
    log::Warning(absl::StrCat("drill: ",
                              plan::OpName(plan::LabelOf(moves, *second)),
                              " of unit ",
                              second->unit.value(),
                              " goes before ",
                              plan::OpName(plan::LabelOf(moves, *first)),
                              " of unit ",
                              first->unit.value()));
    std::rotate(first, second, second + 1);
    return true;
  }
  return false;
}

}  // namespace

absl::Status ApplyPlanFaults(plan::ShardingPlan& plan) {
  const absl::Status fault = FaultPoint("plan.swap");
  if (fault.ok()) {
    return absl::OkStatus();
  }
  const bool same_stream = absl::StrContains(fault.message(), "same");
  bool swapped = false;
  for (plan::StepProgram& program : plan.programs) {
    swapped = Exchange(plan.moves, program, same_stream) || swapped;
  }
  return swapped ? absl::OkStatus()
                 : absl::NotFoundError("drill plan.swap: the plan has no such pair of collectives");
}

}  // namespace ravel::trainer
