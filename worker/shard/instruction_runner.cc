#include "worker/shard/instruction_runner.h"

#include <array>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace ravel::shard {
namespace {

using plan::BufferKind;
using plan::Instruction;
using plan::OpCode;

constexpr int64_t kBf16Bytes = 2;

template <typename Gradient>
std::vector<Gradient> Typed(const std::vector<TensorView>& views) {
  std::vector<Gradient> gradients;
  for (const TensorView& view : views) {
    gradients.push_back({view});
  }
  return gradients;
}

}  // namespace

bool InstructionRunner::HasLane(const ReplayTurn& turn) const {
  return args_.plan.lanes.LaneOf(turn.slot.turn, args_.communicators.world->rank()) >= 0;
}

comm::CollectiveTag InstructionRunner::TagOf(const Instruction& instruction,
                                             const ReplayTurn& turn) const {
  const int group = instruction.group;
  return {.op = instruction.op,
          .unit = instruction.unit,
          .call = instruction.call,
          .group = group,
          .phase = turn.slot.phase,
          .generation = group < 0 ? 0 : static_cast<int64_t>(state_.generation(group))};
}

absl::Status InstructionRunner::Run(const BoundInstruction& bound, const ReplayTurn& turn) {
  const Instruction& instruction = bound.instruction;
  switch (instruction.op) {
    case OpCode::kGather:
      return Gather(instruction, turn);
    case OpCode::kOuterGather:
      return OuterGather(instruction, turn);
    case OpCode::kForward:
    case OpCode::kRecompute:
    case OpCode::kBackward:
      return Compute(bound, turn);
    case OpCode::kAllocStaging:
      return state_.AllocStaging(instruction.staging);
    case OpCode::kAccumulateGrad:
      return AccumulateGrad(instruction, turn);
    case OpCode::kReduceScatter:
      return ReduceScatter(instruction, turn);
    case OpCode::kOuterReduce:
      return OuterReduce(instruction, turn);
    case OpCode::kJoinGradients:
      RETURN_IF_ERROR(state_.JoinGradients(instruction.group));
      Group(instruction).JoinCalls(args_.stream);
      return absl::OkStatus();
    case OpCode::kGatherGradient:
      return GatherGradient(instruction, turn);
    case OpCode::kStatsReduce:
      return ReduceStatistics(instruction, turn);
    case OpCode::kDecideStep:
      args_.actions->Decide();
      return absl::OkStatus();
    case OpCode::kOptimizerStep:
      return Update(instruction);
    case OpCode::kFree:
    case OpCode::kEndPhase:
      break;
  }
  CheckFailed(__FILE__, __LINE__, "op code", "not an instruction of a stream");
}

absl::Status InstructionRunner::Gather(const Instruction& instruction, const ReplayTurn& turn) {
  const ParameterGroup& group = Group(instruction);
  RETURN_IF_ERROR(state_.BeginGather(instruction));
  RETURN_IF_ERROR(
      args_.communicators.gather->AllGather({.tag = TagOf(instruction, turn),
                                             .shard = group.model_weight(),
                                             .gathered = args_.buffers.floats(instruction.gathered),
                                             .shard_elements = group.slice_elements()}));
  state_.EndGather(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::OuterGather(const Instruction& instruction,
                                            const ReplayTurn& turn) {
  ParameterGroup& group = Group(instruction);
  RETURN_IF_ERROR(args_.communicators.outer->AllGather(
      {.tag = TagOf(instruction, turn),
       .shard = group.main_weight(),
       .gathered = group.model_weight(),
       .shard_elements = DivExact(group.slice_elements(), args_.plan.lanes.replicas)}));
  state_.EndOuterGather(instruction.group);
  return absl::OkStatus();
}

absl::Status InstructionRunner::GatherGradient(const Instruction& instruction,
                                               const ReplayTurn& turn) {
  ParameterGroup& group = Group(instruction);
  RETURN_IF_ERROR(state_.GatherGradient(instruction.group));
  return args_.communicators.reduce->AllGather({.tag = TagOf(instruction, turn),
                                                .shard = group.reduced(0),
                                                .gathered = group.full_gradient(),
                                                .shard_elements = group.slice_elements()});
}

absl::Status InstructionRunner::Compute(const BoundInstruction& bound, const ReplayTurn& turn) {
  const Instruction& instruction = bound.instruction;
  if (!HasLane(turn)) {
    return absl::OkStatus();
  }
  const auto unit = static_cast<size_t>(instruction.unit);
  if (!turn.used.empty() && !turn.used[unit]) {
    CHECK_MSG(args_.plan.inventory.units[unit].optional, "only an optional unit may be unused");
    return PassUnused(instruction);
  }
  RETURN_IF_ERROR(state_.BeginCompute(instruction));
  const model::Module& module = *args_.modules[unit];
  if (instruction.op == OpCode::kForward) {
    if (turn.slot.phase == plan::Phase::kEval) {
      module.ForwardOnly(args_.stream, bound.memory);
    } else {
      module.Forward(args_.stream, bound.memory);
    }
  } else if (instruction.op == OpCode::kRecompute) {
    module.Remake(args_.stream, bound.memory);
  } else if (instruction.accumulates) {
    module.Backward(
        args_.stream, bound.memory, Typed<model::AccumulatingGradient>(bound.gradients));
  } else {
    module.Backward(args_.stream, bound.memory, Typed<model::FreshGradient>(bound.gradients));
  }
  state_.EndCompute(instruction);
  return absl::OkStatus();
}

// The residual stream passes by; the lane's gradient of the unit is zero.
absl::Status InstructionRunner::PassUnused(const Instruction& instruction) {
  if (instruction.op != OpCode::kBackward) {
    return absl::OkStatus();
  }
  Instruction gradients = {.op = OpCode::kBackward, .unit = instruction.unit};
  gradients.gradients = instruction.gradients;
  gradients.accumulates = instruction.accumulates;
  RETURN_IF_ERROR(state_.BeginCompute(gradients));
  for (const int staging : instruction.gradients) {
    if (!instruction.accumulates) {
      const auto id = static_cast<size_t>(staging);
      std::memset(
          args_.buffers.bytes(staging), 0, static_cast<size_t>(args_.plan.buffers[id].bytes));
    }
  }
  state_.EndCompute(gradients);
  return absl::OkStatus();
}

absl::Status InstructionRunner::AccumulateGrad(const Instruction& instruction,
                                               const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginReduce(instruction));
  const std::array<const float*, 1> lane = {args_.buffers.floats(instruction.staging)};
  Group(instruction).local(instruction.call)->AddTurn(args_.stream, turn.slot.turn, lane);
  state_.EndReduce(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::ReduceScatter(const Instruction& instruction,
                                              const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginReduce(instruction));
  ParameterGroup& group = Group(instruction);
  LaneCounter& counter = group.inner(instruction.call);
  const auto source = static_cast<size_t>(instruction.staging);
  const bool sums = args_.plan.buffers[source].kind == BufferKind::kLocalGrad;
  const int64_t at = sums ? 0 : turn.slot.turn;
  comm::Communicator& communicator = *args_.communicators.reduce;
  const comm::CollectiveTag tag = TagOf(instruction, turn);
  float* staging = HasLane(turn) ? args_.buffers.floats(instruction.staging) : nullptr;
  if (args_.bf16_wire && staging != nullptr) {
    CHECK_MSG(!sums, "lanes in blocks have no wire to round on");
    PackBf16(staging, group.layout().layout.total_elements());
  }
  ASSIGN_OR_RETURN(const comm::PieceViews views,
                   communicator.ExchangePieces(
                       {.tag = tag,
                        .staging = staging,
                        .receive = args_.buffers.floats(instruction.receive),
                        .shard_elements = group.slice_elements(),
                        .contributors = static_cast<int>(counter.contributors(at)),
                        .element_bytes = args_.bf16_wire ? kBf16Bytes : comm::kElementBytes}));
  if (args_.bf16_wire) {
    std::vector<const uint16_t*> pieces;
    for (const float* piece : views.pieces) {
      pieces.push_back(reinterpret_cast<const uint16_t*>(piece));
    }
    counter.AddRoundedTurn(args_.stream, at, pieces);
  } else {
    counter.AddTurn(args_.stream, at, views.pieces);
  }
  RETURN_IF_ERROR(communicator.ReleasePieces(tag));
  state_.EndReduce(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::OuterReduce(const Instruction& instruction,
                                            const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginOuterReduce(instruction));
  ParameterGroup& group = Group(instruction);
  const int64_t replicas = args_.plan.lanes.replicas;
  const int64_t part = DivExact(group.slice_elements(), replicas);
  comm::Communicator& communicator = *args_.communicators.outer;
  const comm::CollectiveTag tag = TagOf(instruction, turn);
  float* replica_sum = group.inner(instruction.call).sum();
  LaneCounter& counter = *group.outer(instruction.call);
  ASSIGN_OR_RETURN(
      const comm::PieceViews views,
      communicator.ExchangePieces({.tag = tag,
                                   .staging = replica_sum,
                                   .receive = args_.buffers.floats(instruction.receive),
                                   .shard_elements = part,
                                   .contributors = static_cast<int>(replicas)}));
  counter.AddTurn(args_.stream, 0, views.pieces);
  RETURN_IF_ERROR(communicator.ReleasePieces(tag));
  if (!group.rules().outer_gradient_sharded) {
    RETURN_IF_ERROR(communicator.AllGather(
        {.tag = tag, .shard = counter.sum(), .gathered = replica_sum, .shard_elements = part}));
  }
  state_.EndOuterReduce(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::ReduceStatistics(const Instruction& instruction,
                                                 const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.CheckSumsComplete());
  const std::vector<std::byte> mine = args_.actions->PackStatistics();
  std::vector<std::byte> all(mine.size() * static_cast<size_t>(args_.plan.ranks));
  RETURN_IF_ERROR(args_.communicators.world->AllGatherBytes(TagOf(instruction, turn), mine, all));
  args_.actions->UnpackStatistics(all);
  return absl::OkStatus();
}

absl::Status InstructionRunner::Update(const Instruction& instruction) {
  RETURN_IF_ERROR(state_.BeginUpdate(instruction.group));
  args_.actions->UpdateGroup(instruction.group);
  state_.EndUpdate(instruction.group);
  return absl::OkStatus();
}

int64_t InstructionRunner::BytesOf(const Instruction& instruction, const ReplayTurn& turn) const {
  if (instruction.group < 0) {
    return 0;
  }
  const ParameterGroup& group = args_.groups[static_cast<size_t>(instruction.group)];
  const plan::LaneMap& lanes = args_.plan.lanes;
  const int64_t slice = group.slice_elements() * comm::kElementBytes;
  switch (instruction.op) {
    case OpCode::kGather:
    case OpCode::kGatherGradient:
      return slice * (lanes.width() - 1);
    case OpCode::kReduceScatter: {
      const plan::LaneMap inner = lanes.Inner();
      const int64_t lane_count = inner.LaneCount(lanes.blocks ? 0 : turn.slot.turn);
      const int64_t own = lanes.blocks || HasLane(turn) ? 1 : 0;
      return (args_.bf16_wire ? slice / 2 : slice) * (lane_count - own);
    }
    case OpCode::kOuterGather:
      return slice / lanes.replicas * (lanes.replicas - 1);
    case OpCode::kOuterReduce:
      return slice / lanes.replicas * (lanes.replicas - 1) *
             (group.rules().outer_gradient_sharded ? 1 : 2);
    default:
      return 0;
  }
}

}  // namespace ravel::shard
