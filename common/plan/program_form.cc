// What each instruction must look like.

#include <algorithm>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/plan/program_facts.h"

namespace ravel::plan {
namespace {

bool IsCompute(OpCode op) {
  return op == OpCode::kForward || op == OpCode::kBackward || op == OpCode::kRecompute;
}
bool IsOfGroup(OpCode op) {
  switch (op) {
    case OpCode::kGather:
    case OpCode::kAllocStaging:
    case OpCode::kReduceScatter:
    case OpCode::kOptimizerStep:
    case OpCode::kAccumulateGrad:
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      return true;
    default:
      return false;
  }
}
bool IsOfEvaluation(OpCode op) {
  return op == OpCode::kGather || op == OpCode::kOuterGather || op == OpCode::kForward ||
         op == OpCode::kFree || op == OpCode::kEndPhase;
}

class FormCheck {
 public:
  FormCheck(const ExpectedContext& context, const StepProgram& program)
      : context_(context), program_(program) {}

  absl::Status Run(std::vector<int>& use_at) {
    if (Count() == 0 || At(Count() - 1).op != OpCode::kEndPhase) {
      return absl::FailedPreconditionError("K8: a program ends with EndPhase");
    }
    for (int i = 0; i < Count(); ++i) {
      RETURN_IF_ERROR(CheckWaits(i));
      RETURN_IF_ERROR(CheckPlace(i));
      RETURN_IF_ERROR(CheckFields(i, use_at));
    }
    if (remade_at_ >= 0 || use_at.size() != context_.model.uses.size()) {
      return Fault("K1", Count() - 1, "ends before every unit has run");
    }
    return absl::OkStatus();
  }

 private:
  int Count() const { return static_cast<int>(program_.instructions.size()); }
  const Instruction& At(int i) const { return program_.instructions[static_cast<size_t>(i)]; }
  absl::Status Fault(const char* rule, int i, const std::string& what) const {
    return absl::FailedPreconditionError(
        absl::StrCat(rule, ": ", InstructionName(program_, i), ": ", what));
  }

  // K5: all that an instruction waits for is listed before it, so no order of streams is a circle.
  absl::Status CheckWaits(int i) const {
    for (const int wait : At(i).waits) {
      if (wait < 0 || wait >= i) {
        return Fault("K5", i, absl::StrCat("waits for instruction ", wait, ", not an earlier one"));
      }
      if (At(wait).op == OpCode::kFree) {
        return Fault("K5", i, "waits for a Free, which has no event");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckPlace(int i) const {
    const Instruction& at = At(i);
    if (at.stream != StreamOf(at.op)) {
      return Fault("K4", i, absl::StrCat("is on stream ", StreamName(at.stream)));
    }
    if (program_.phase == Phase::kEval && !IsOfEvaluation(at.op)) {
      return Fault("K14", i, "is not part of an evaluation");
    }
    if (at.op == OpCode::kEndPhase && i != Count() - 1) {
      return Fault("K8", i, "is not the last instruction");
    }
    return absl::OkStatus();
  }

  absl::Status CheckFields(int i, std::vector<int>& use_at) {
    const Instruction& at = At(i);
    Instruction expected = {.op = at.op, .stream = at.stream};
    if (IsCompute(at.op)) {
      const size_t use = use_at.size();
      if (use >= context_.model.uses.size()) {
        return Fault("K1", i, "is not the next unit in the model's order");
      }
      expected = ExpectedOfUse(context_, at.op, use);
      const bool first_part = at.op == OpCode::kRecompute;
      const UnitUse& next = context_.model.uses[use];
      if (expected.unit != at.unit || expected.call != at.call ||
          (first_part ? OpCode::kBackward : at.op) != next.op ||
          (first_part || next.remakes) !=
              (first_part ? next.remakes && remade_at_ < 0 : remade_at_ >= 0)) {
        return Fault("K1", i, "is not the next unit in the model's order");
      }
      remade_at_ = first_part ? i : -1;
      if (!first_part) {
        use_at.push_back(i);
      }
    } else if (IsOfGroup(at.op)) {
      if (at.group < 0 || static_cast<size_t>(at.group) >= context_.plan.groups.size()) {
        return absl::FailedPreconditionError(
            absl::StrCat("K1: instruction ", i, " ", OpName(at.op), " names no group"));
      }
      expected = ExpectedOfGroup(context_, at);
    } else if (at.op == OpCode::kFree) {
      expected.freed = at.freed;
    }
    expected.waits = at.waits;
    return expected == at ? absl::OkStatus()
                          : Fault("K1", i, "does not name the buffers of its group or unit");
  }

  const ExpectedContext& context_;
  const StepProgram& program_;
  int remade_at_ = -1;  // a Recompute whose Backward is still to come
};

}  // namespace

StreamId StreamOf(OpCode op) {
  switch (op) {
    case OpCode::kGather:
      return StreamId::kGather;
    case OpCode::kForward:
    case OpCode::kBackward:
    case OpCode::kRecompute:
    case OpCode::kOptimizerStep:
      return StreamId::kCompute;
    case OpCode::kAllocStaging:
    case OpCode::kReduceScatter:
    case OpCode::kStatsReduce:
    case OpCode::kDecideStep:
    case OpCode::kAccumulateGrad:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      return StreamId::kReduce;
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
      return StreamId::kOuter;
    case OpCode::kFree:
    case OpCode::kEndPhase:
      break;
  }
  return StreamId::kHost;
}

absl::Status ProgramFacts::Fault(const char* rule, int instruction, const std::string& what) const {
  return absl::FailedPreconditionError(
      absl::StrCat(rule, ": ", InstructionName(program, instruction), ": ", what));
}

Instruction ExpectedOfGroup(const ExpectedContext& context, const Instruction& at) {
  const auto find = [&](BufferKind kind, int call, int slot) {
    return context.index.Find({.kind = kind, .owner = at.group, .call = call, .slot = slot});
  };
  Instruction expected = {.op = at.op,
                          .stream = StreamOf(at.op),
                          .unit = context.plan.groups[static_cast<size_t>(at.group)].unit,
                          .group = at.group};
  const bool local = !context.plan.rules[static_cast<size_t>(at.group)].reduces_each_turn;
  switch (at.op) {
    case OpCode::kGather:
      expected.gathered = find(BufferKind::kGathered, 0, 0);
      break;
    case OpCode::kAllocStaging:
    case OpCode::kAccumulateGrad:
      expected.call = at.call;
      expected.staging = find(BufferKind::kStaging, at.call, 0);
      break;
    case OpCode::kReduceScatter:
      expected.call = at.call;
      expected.staging =
          local ? find(BufferKind::kLocalGrad, at.call, CounterRoot(context.plan.lanes.Local()))
                : find(BufferKind::kStaging, at.call, 0);
      expected.receive = find(BufferKind::kReceive, at.call, 0);
      break;
    case OpCode::kOuterReduce:
      expected.call = at.call;
      expected.receive = find(BufferKind::kOuterReceive, at.call, 0);
      break;
    default:
      break;
  }
  return expected;
}

Instruction ExpectedOfUse(const ExpectedContext& context, OpCode op, size_t use) {
  const UnitUse& model = context.model.uses[use];
  const auto find = [&](BufferKind kind, int owner, int call) {
    return context.index.Find({.kind = kind, .owner = owner, .call = call, .slot = 0});
  };
  Instruction expected = {.op = op, .stream = StreamId::kCompute, .unit = model.unit};
  expected.call = model.call;
  expected.saved = find(BufferKind::kSaved, model.unit, model.call);
  expected.remade = find(BufferKind::kRemade, model.unit, 0);
  expected.workspace = find(BufferKind::kWorkspace, model.unit, 0);
  for (const int group : model.needs) {
    expected.weights.push_back(find(BufferKind::kGathered, group, 0));
  }
  if (op != OpCode::kBackward) {
    return expected;
  }
  const bool opens = context.part == LanePart::kWhole || context.part == LanePart::kOpen;
  for (const int id : model.gradients) {
    const GradientCall& call = context.model.gradients[static_cast<size_t>(id)];
    expected.gradients.push_back(find(BufferKind::kStaging, call.group, call.call));
    expected.accumulates = !opens || call.first_use < use;
  }
  return expected;
}

absl::Status CheckForm(const ExpectedContext& context,
                       const StepProgram& program,
                       std::vector<int>& use_at) {
  return FormCheck(context, program).Run(use_at);
}

}  // namespace ravel::plan
