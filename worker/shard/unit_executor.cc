#include "worker/shard/unit_executor.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::shard {
namespace {

using plan::BufferKind;
using plan::Instruction;
using plan::OpCode;

comm::CollectiveTag TagOf(const Instruction& instruction) {
  return {.op = instruction.op, .unit = instruction.unit, .call = instruction.call};
}

}  // namespace

UnitExecutor::UnitExecutor(const Args& args)
    : args_(args),
      gathered_(args.plan.buffers.size()),
      staging_(args.plan.buffers.size(), StagingState::kIdle) {
  CHECK_EQ(args_.modules.size(), args_.plan.inventory.units.size());
  const int shared = args_.buffers.Find({.kind = BufferKind::kShared});
  shared_ = ActivationViews(args_.plan.inventory.shared, args_.buffers.bytes(shared));
  for (const plan::StepProgram& program : args_.plan.programs) {
    BoundProgram bound = {.phase = program.phase, .instructions = {}};
    for (const Instruction& instruction : program.instructions) {
      bound.instructions.push_back(Bind(instruction));
    }
    programs_.push_back(std::move(bound));
  }
}

UnitExecutor::BoundInstruction UnitExecutor::Bind(const Instruction& instruction) const {
  BoundInstruction bound = {.instruction = instruction, .memory = {}, .gradients = {}};
  if (instruction.op != OpCode::kForward && instruction.op != OpCode::kBackward) {
    return bound;
  }
  const plan::ShardingPlan& plan = args_.plan;
  const plan::UnitSpec& unit = plan.inventory.units[static_cast<size_t>(instruction.unit)];
  const auto bind_group = [&](int group, const std::vector<int>& tensors, int buffer) {
    return GroupViews(plan.inventory,
                      plan.groups[static_cast<size_t>(group)],
                      tensors,
                      args_.buffers.floats(buffer));
  };
  bound.memory.weights = bind_group(instruction.unit, unit.tensors, instruction.gathered);
  // The forward of a tied head is the norm alone: the table may not be gathered yet.
  if (!unit.borrowed.empty() && instruction.borrowed_gathered >= 0) {
    const std::vector<TensorView> borrowed =
        bind_group(instruction.borrowed_unit, unit.borrowed, instruction.borrowed_gathered);
    bound.memory.weights.insert(bound.memory.weights.end(), borrowed.begin(), borrowed.end());
  }
  const auto activations = [&](const std::vector<plan::ActivationSpec>& specs, int buffer) {
    return specs.empty() || buffer < 0 ? std::vector<TensorView>()
                                       : ActivationViews(specs, args_.buffers.bytes(buffer));
  };
  bound.memory.saved = activations(unit.saved, instruction.saved);
  bound.memory.workspace = activations(unit.workspace, instruction.workspace);
  bound.memory.shared = shared_;
  if (instruction.op == OpCode::kBackward) {
    for (const TensorView& view : bind_group(instruction.unit, unit.tensors, instruction.staging)) {
      bound.gradients.push_back({view});
    }
    if (!unit.borrowed.empty()) {
      for (const TensorView& view :
           bind_group(instruction.borrowed_unit, unit.borrowed, instruction.borrowed_staging)) {
        bound.gradients.push_back({view});
      }
    }
  }
  return bound;
}

const UnitExecutor::BoundProgram& UnitExecutor::ProgramOf(plan::Phase phase) const {
  for (const BoundProgram& program : programs_) {
    if (program.phase == phase) {
      return program;
    }
  }
  CheckFailed(__FILE__, __LINE__, "program of phase", plan::PhaseName(phase));
}

absl::Status UnitExecutor::Run(plan::Phase phase, int64_t turn) {
  for (const BoundInstruction& bound : ProgramOf(phase).instructions) {
    const absl::Status status = RunInstruction(bound, phase, turn);
    if (!status.ok()) {
      const int unit = bound.instruction.unit;
      return Annotate(
          status,
          absl::StrCat(
              plan::OpName(bound.instruction.op),
              " of ",
              unit < 0 ? "step" : args_.plan.inventory.units[static_cast<size_t>(unit)].name,
              " (",
              plan::PhaseName(phase),
              ", turn ",
              turn,
              ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status UnitExecutor::RunInstruction(const BoundInstruction& bound,
                                          plan::Phase phase,
                                          int64_t turn) {
  const Instruction& instruction = bound.instruction;
  const bool has_lane = args_.plan.lanes.LaneOf(turn, args_.communicator.rank()) >= 0;
  switch (instruction.op) {
    case OpCode::kGather:
      return Gather(instruction);
    case OpCode::kForward:
    case OpCode::kBackward:
      if (has_lane) {
        Compute(bound, phase);
      }
      return absl::OkStatus();
    case OpCode::kFree:
      Free(instruction.freed);
      return absl::OkStatus();
    case OpCode::kAllocStaging: {
      StagingState& state = staging_[static_cast<size_t>(instruction.staging)];
      CHECK_MSG(state == StagingState::kIdle, "staging memory is still in use");
      state = StagingState::kFresh;
      return absl::OkStatus();
    }
    case OpCode::kReduceScatter:
      return ReduceScatter(instruction, turn);
    case OpCode::kStatsReduce:
      return ReduceStatistics(instruction);
    case OpCode::kDecideStep:
      args_.actions->Decide();
      return absl::OkStatus();
    case OpCode::kOptimizerStep:
      args_.actions->UpdateUnit(instruction.unit);
      args_.groups[static_cast<size_t>(instruction.unit)].AdvanceGeneration();
      return absl::OkStatus();
    case OpCode::kEndPhase:
      CheckAtRest();
      return absl::OkStatus();
    case OpCode::kRecompute:
    case OpCode::kAccumulateGrad:
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      return absl::UnimplementedError("not executed yet");
  }
  CheckFailed(__FILE__, __LINE__, "op code", "unknown instruction");
}

absl::Status UnitExecutor::Gather(const Instruction& instruction) {
  const ParameterGroup& group = args_.groups[static_cast<size_t>(instruction.unit)];
  RETURN_IF_ERROR(
      args_.communicator.AllGather({.tag = TagOf(instruction),
                                    .shard = group.main_weight(),
                                    .gathered = args_.buffers.floats(instruction.gathered),
                                    .shard_elements = group.shard_elements()}));
  gathered_[static_cast<size_t>(instruction.gathered)] = {
      .unit = instruction.unit, .generation = group.generation(), .valid = true};
  return absl::OkStatus();
}

void UnitExecutor::CheckCurrent(int gathered, int unit) const {
  const GatheredState& state = gathered_[static_cast<size_t>(gathered)];
  CHECK_MSG(state.valid && state.unit == unit, "weights used before their gather");
  CHECK_MSG(state.generation == args_.groups[static_cast<size_t>(unit)].generation(),
            "weights of an older generation");
}

void UnitExecutor::Compute(const BoundInstruction& bound, plan::Phase phase) {
  const Instruction& instruction = bound.instruction;
  CheckCurrent(instruction.gathered, instruction.unit);
  if (instruction.borrowed_gathered >= 0) {
    CheckCurrent(instruction.borrowed_gathered, instruction.borrowed_unit);
  }
  const model::Module& module = *args_.modules[static_cast<size_t>(instruction.unit)];
  if (instruction.op == OpCode::kForward) {
    if (phase == plan::Phase::kEval) {
      module.ForwardOnly(args_.stream, bound.memory);
    } else {
      module.Forward(args_.stream, bound.memory);
    }
    return;
  }
  for (const int staging : {instruction.staging, instruction.borrowed_staging}) {
    if (staging >= 0) {
      StagingState& state = staging_[static_cast<size_t>(staging)];
      CHECK_MSG(state == StagingState::kFresh, "a second first write into staging memory");
      state = StagingState::kWritten;
    }
  }
  module.Backward(args_.stream, bound.memory, bound.gradients);
}

absl::Status UnitExecutor::ReduceScatter(const Instruction& instruction, int64_t turn) {
  const plan::LaneMap& lanes = args_.plan.lanes;
  const bool has_lane = lanes.LaneOf(turn, args_.communicator.rank()) >= 0;
  StagingState& state = staging_[static_cast<size_t>(instruction.staging)];
  CHECK_MSG(state == (has_lane ? StagingState::kWritten : StagingState::kFresh),
            "staging memory is reduced once, after its last write");
  ParameterGroup& group = args_.groups[static_cast<size_t>(instruction.unit)];
  ASSIGN_OR_RETURN(const comm::PieceViews views,
                   args_.communicator.ExchangePieces(
                       {.tag = TagOf(instruction),
                        .staging = has_lane ? args_.buffers.floats(instruction.staging) : nullptr,
                        .receive = args_.buffers.floats(instruction.receive),
                        .shard_elements = group.shard_elements(),
                        .contributors = static_cast<int>(lanes.LaneCount(turn))}));
  group.counter(instruction.call).AddTurn(args_.stream, turn, views.pieces);
  RETURN_IF_ERROR(args_.communicator.ReleasePieces(TagOf(instruction)));
  state = StagingState::kIdle;
  return absl::OkStatus();
}

absl::Status UnitExecutor::ReduceStatistics(const Instruction& instruction) {
  const std::vector<std::byte> mine = args_.actions->PackStatistics();
  std::vector<std::byte> all(mine.size() * static_cast<size_t>(args_.plan.ranks));
  RETURN_IF_ERROR(args_.communicator.AllGatherBytes(TagOf(instruction), mine, all));
  args_.actions->UnpackStatistics(all);
  return absl::OkStatus();
}

void UnitExecutor::Free(int buffer) {
  CHECK_GE(buffer, 0);
  gathered_[static_cast<size_t>(buffer)].valid = false;
  CHECK_MSG(staging_[static_cast<size_t>(buffer)] == StagingState::kIdle,
            "staging memory is freed before it is reduced");
}

void UnitExecutor::CheckAtRest() const {
  for (size_t i = 0; i < gathered_.size(); ++i) {
    CHECK_MSG(!gathered_[i].valid || args_.plan.buffers[i].persistent,
              "gathered weights outlive their program");
    CHECK_MSG(staging_[i] == StagingState::kIdle, "staging memory outlives its program");
  }
}

}  // namespace ravel::shard
