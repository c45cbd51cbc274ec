#include "worker/trainer/plan_fault.h"

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/fault_point.h"
#include "common/logging.h"

namespace ravel::trainer {
namespace {

using plan::Instruction;
using plan::OpCode;

bool IsCollective(const Instruction& instruction) {
  switch (instruction.op) {
    case OpCode::kGather:
    case OpCode::kReduceScatter:
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
    case OpCode::kGatherGradient:
      return true;
    default:
      return false;
  }
}

bool Exchange(plan::StepProgram& program, bool same_stream) {
  std::vector<Instruction>& list = program.instructions;
  for (size_t i = 0; i + 1 < list.size(); ++i) {
    Instruction& a = list[i];
    Instruction& b = list[i + 1];
    if (IsCollective(a) && IsCollective(b) && (a.stream == b.stream) == same_stream) {
      log::Warning(absl::StrCat("drill: ",
                                plan::OpName(a.op),
                                " of unit ",
                                a.unit,
                                " and ",
                                plan::OpName(b.op),
                                " of unit ",
                                b.unit,
                                " change places"));
      std::swap(a, b);
      return true;
    }
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
    swapped = Exchange(program, same_stream) || swapped;
  }
  return swapped ? absl::OkStatus()
                 : absl::NotFoundError("drill plan.swap: the plan has no such pair of collectives");
}

}  // namespace ravel::trainer
