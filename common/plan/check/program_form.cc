// Checks each instruction of a program: stream, fields, operands, waits, and the order of units.

#include "common/plan/check/program_form.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/plan/check/program_facts.h"

namespace ravel::plan {
namespace {

bool IsOfGroup(OpCode op) {
  switch (op) {
    case OpCode::kGather:
    case OpCode::kAllocStaging:
    case OpCode::kReduce:
    case OpCode::kOptimizerStep:
    case OpCode::kAccumulateGrad:
    case OpCode::kJoinGradients:
    case OpCode::kRefreshWeights:
    case OpCode::kOffloadGradient:
      return true;
    default:
      return false;
  }
}
// Returns true if the op belongs to one gradient call of a group.
bool HasCall(OpCode op) {
  return op == OpCode::kAllocStaging || op == OpCode::kAccumulateGrad || op == OpCode::kReduce;
}
bool IsOfEvaluation(const MoveTable& table, const Instruction& at) {
  const bool weights = at.op == OpCode::kGather && table.moves[at.move].of == MoveOf::kWeights;
  return weights || at.op == OpCode::kForward || at.op == OpCode::kFree ||
         at.op == OpCode::kEndPhase;
}

class FormCheck {
 public:
  FormCheck(const ShardingPlan& plan,
            const OperandContext& context,
            const IdVector<GroupId, bool>& on_host,
            const StepProgram& program)
      : plan_(plan), context_(context), on_host_(on_host), program_(program) {}

  absl::Status Run(std::vector<InstructionId>& use_at, std::vector<InstructionId>& use_begins) {
    if (program_.instructions.empty() || At(Last()).op != OpCode::kEndPhase) {
      return absl::FailedPreconditionError("K8: a program ends with EndPhase");
    }
    for (const InstructionId i : program_.instructions.ids()) {
      RETURN_IF_ERROR(CheckWaits(i));
      RETURN_IF_ERROR(CheckPlace(i));
      RETURN_IF_ERROR(CheckFields(i, use_at, use_begins));
    }
    if (step_ != 0 || remade_ || use_at.size() != context_.model.uses.size()) {
      return Fault("K1", Last(), "ends before every unit has run");
    }
    return absl::OkStatus();
  }

 private:
  InstructionId Last() const { return program_.instructions.last_id(); }
  const Instruction& At(InstructionId i) const { return program_.instructions[i]; }
  absl::Status Fault(const char* rule, InstructionId i, const std::string& what) const {
    return absl::FailedPreconditionError(
        absl::StrCat(rule, ": ", InstructionName(program_, i), ": ", what));
  }

  // K5: all that an instruction waits for is listed before it, so no order of streams is a circle.
  absl::Status CheckWaits(InstructionId i) const {
    for (const InstructionId wait : At(i).waits) {
      if (wait < 0 || wait >= i) {
        return Fault(
            "K5", i, absl::StrCat("waits for instruction ", wait.value(), ", not an earlier one"));
      }
      if (At(wait).op == OpCode::kFree) {
        return Fault("K5", i, "waits for a Free, which has no event");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckPlace(InstructionId i) const {
    const Instruction& at = At(i);
    if (!IsCompute(at.op) && (IsCollective(at.op) ? !HasMove(plan_.moves, at) : at.move >= 0)) {
      return Fault("K1", i, "has a move that is none of its group");
    }
    if (IsOfGroup(at.op) && !plan_.groups.Has(at.group)) {
      return absl::FailedPreconditionError(absl::StrCat("K1: instruction ",
                                                        i.value(),
                                                        " ",
                                                        OpName(static_cast<OpLabel>(at.op)),
                                                        " names no group"));
    }
    if (at.stream != StreamOf(plan_.moves, on_host_, at)) {
      return Fault("K4", i, absl::StrCat("is on stream ", StreamName(at.stream)));
    }
    if (program_.phase == Phase::kEval && !IsOfEvaluation(plan_.moves, at)) {
      return Fault("K14", i, "is not part of an evaluation");
    }
    if (at.op == OpCode::kEndPhase && i != Last()) {
      return Fault("K8", i, "is not the last instruction");
    }
    return absl::OkStatus();
  }

  // The next step of the next use; a recomputation comes before its backward. Fills `expected`.
  bool IsNextStep(const Instruction& at, const UnitUse& next, Instruction& expected) {
    const bool first_part = next.remakes && !remade_;
    const std::vector<SegmentStep>& steps = first_part ? next.remake_steps : next.steps;
    if (at.op != (first_part ? OpCode::kRecompute : next.op) || step_ >= steps.size()) {
      return false;
    }
    const SegmentStep& step = steps[step_];
    expected.unit = next.unit;
    expected.call = next.call;
    expected.segment = step.first;
    expected.move = MoveOfStep(plan_.moves, step.move);
    ++step_;
    if (step_ == steps.size()) {
      step_ = 0;
      remade_ = first_part;
    }
    return expected.unit == at.unit && expected.call == at.call && expected.segment == at.segment &&
           expected.move == at.move;
  }

  absl::Status CheckFields(InstructionId i,
                           std::vector<InstructionId>& use_at,
                           std::vector<InstructionId>& use_begins) {
    const Instruction& at = At(i);
    Instruction expected = {.op = at.op, .stream = at.stream};
    expected.move = IsCompute(at.op) ? MoveId() : at.move;
    const size_t use = use_at.size();
    if (IsCompute(at.op)) {
      if (use >= context_.model.uses.size()) {
        return Fault("K1", i, "is not the next unit in the model's order");
      }
      const bool begins = step_ == 0;
      if (!IsNextStep(at, context_.model.uses[use], expected)) {
        return Fault("K1", i, "is not the next unit in the model's order");
      }
      if (at.op != OpCode::kRecompute) {
        if (begins) {
          use_begins.push_back(i);
        }
        if (step_ == 0) {
          use_at.push_back(i);
        }
      }
    } else if (IsOfGroup(at.op)) {
      expected.unit = plan_.groups[at.group].unit;
      expected.group = at.group;
      expected.call = HasCall(at.op) ? at.call : 0;
    } else if (at.op == OpCode::kFree) {
      expected.freed = at.freed;
    }
    expected.operands = OperandsOf(context_, expected, use);
    expected.waits = at.waits;
    return expected == at ? absl::OkStatus()
                          : Fault("K1", i, "does not name the buffers of its group or unit");
  }

  const ShardingPlan& plan_;
  const OperandContext& context_;
  const IdVector<GroupId, bool>& on_host_;
  const StepProgram& program_;
  size_t step_ = 0;      // the next one of a pass
  bool remade_ = false;  // a Recompute is done whose Backward is still to come
};

}  // namespace

StreamId StreamOf(const MoveTable& table,
                  const IdVector<GroupId, bool>& on_host,
                  const Instruction& instruction) {
  switch (instruction.op) {
    case OpCode::kGather:
    case OpCode::kReduce:
    case OpCode::kStatsReduce:
    case OpCode::kAmaxReduce:
      return table.moves[instruction.move].stream;
    case OpCode::kForward:
    case OpCode::kBackward:
    case OpCode::kRecompute:
      return table.moves.Has(instruction.move) ? table.moves[instruction.move].stream
                                               : StreamId::kCompute;
    case OpCode::kRefreshWeights:
    case OpCode::kOptimizerStep:
      return on_host[instruction.group] ? StreamId::kUpload : StreamId::kCompute;
    case OpCode::kOffloadGradient:
      return StreamId::kDownload;
    case OpCode::kAllocStaging:
    case OpCode::kDecideStep:
    case OpCode::kAccumulateGrad:
    case OpCode::kJoinGradients:
      return StreamId::kReduce;
    case OpCode::kFree:
    case OpCode::kEndPhase:
      break;
  }
  return StreamId::kHost;
}

absl::Status CheckForm(const ShardingPlan& plan,
                       const OperandContext& context,
                       const IdVector<GroupId, bool>& on_host,
                       const StepProgram& program,
                       std::vector<InstructionId>& use_at,
                       std::vector<InstructionId>& use_begins) {
  return FormCheck(plan, context, on_host, program).Run(use_at, use_begins);
}

}  // namespace ravel::plan
