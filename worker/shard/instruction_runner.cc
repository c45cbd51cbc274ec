// Executes one instruction of a rank: collectives by the move's communicator, forward and backward
// by the unit's module, sums by the lane counter, updates by the optimizer's actions. Order and
// state are checked elsewhere (replay_state).

#include "worker/shard/instruction_runner.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/report/wire_table.h"
#include "common/signed_size.h"
#include "kernels/tree_reduce.h"

namespace ravel::shard {
namespace {

using plan::Access;
using plan::BufferKind;
using plan::Instruction;
using plan::OpCode;
using plan::Operand;
using plan::Role;
using plan::When;

// As collectives take memory of any type.
float* Floats(std::byte* data) {
  return reinterpret_cast<float*>(data);
}

template <typename Gradient>
std::vector<Gradient> Typed(const std::vector<TensorView>& views) {
  std::vector<Gradient> gradients;
  for (const TensorView& view : views) {
    gradients.push_back({view});
  }
  return gradients;
}

}  // namespace

InstructionRunner::InstructionRunner(const Args& args) : args_(args), state_(args.plan) {
  encoded_.resize(args.plan.groups.size());
  has_targets_.resize(args.plan.groups.size());
  const auto bytes = [&](BufferKind kind) {
    return args_.buffers.bytes(plan::FindBuffer(args_.plan.buffers, {.kind = kind}));
  };
  if (bytes(BufferKind::kAmax) != nullptr) {
    quant_ = std::make_unique<quant::QuantState>(
        args_.plan.inventory,
        args_.communicators.world().rank() % plan::TensorRanks(args_.plan.inventory),
        quant::QuantState::Gemms{
            .path = args_.plan.options.gemm_path,
            .fast = args_.plan.options.fast_accumulation,
            .amax_epsilon = static_cast<float>(args_.plan.options.amax_epsilon)},
        quant::QuantState::Memory{
            .amax = reinterpret_cast<uint32_t*>(bytes(BufferKind::kAmax)),
            .delayed_scales = reinterpret_cast<float*>(bytes(BufferKind::kDelayedScales)),
            .flags = reinterpret_cast<uint32_t*>(bytes(BufferKind::kAmaxFlags)),
            .history = args_.plan.options.amax_history,
            .margin = args_.plan.options.amax_margin,
            .algorithm = args_.plan.options.amax_algorithm,
            .first = args_.plan.options.first_scale});
  }
}

bool InstructionRunner::HasLane(const ReplayTurn& turn) const {
  return plan::LaneOf(args_.plan, turn.slot.turn, args_.communicators.world().rank()) >= 0;
}

float* InstructionRunner::FloatsOf(const Instruction& instruction, Role role) const {
  return args_.buffers.floats(plan::BufferOf(instruction, role));
}

comm::CollectiveTag InstructionRunner::TagOf(const Instruction& instruction,
                                             const ReplayTurn& turn) const {
  const plan::GroupId group = instruction.group;
  return {.op = plan::WorkLabelOf(args_.plan.moves, instruction),
          .unit = instruction.unit.value(),
          .call = instruction.call,
          .group = group.value(),
          .phase = turn.slot.phase,
          .generation = group < 0 ? 0 : static_cast<int64_t>(state_.generation(group))};
}

absl::Status InstructionRunner::Run(const BoundInstruction& bound, const ReplayTurn& turn) {
  const Instruction& instruction = bound.instruction;
  switch (instruction.op) {
    case OpCode::kGather:
      return Gather(instruction, turn);
    case OpCode::kForward:
    case OpCode::kRecompute:
    case OpCode::kBackward:
      return Compute(bound, turn);
    case OpCode::kAllocStaging:
      return state_.AllocStaging(plan::BufferOf(instruction, Role::kGradient));
    case OpCode::kAccumulateGrad:
      return AccumulateGrad(instruction, turn);
    case OpCode::kReduce:
      return plan::SumsAddends(MoveAt(instruction)) ? SumAddends(instruction, turn)
             : plan::SumsLanes(MoveAt(instruction)) ? ReduceLanes(instruction, turn)
                                                    : ReduceSums(instruction, turn);
    case OpCode::kJoinGradients:
      RETURN_IF_ERROR(state_.JoinGradients(instruction.group));
      Group(instruction).JoinCalls(StreamOf(instruction));
      return absl::OkStatus();
    case OpCode::kStatsReduce:
      return ReduceStatistics(instruction, turn);
    case OpCode::kDecideStep:
      return args_.actions->Decide(StreamOf(instruction));
    case OpCode::kOptimizerStep:
      return Update(instruction);
    case OpCode::kOffloadGradient:
      RETURN_IF_ERROR(state_.CheckGradient(instruction.group));
      args_.actions->OffloadGradient(instruction.group);
      return absl::OkStatus();
    case OpCode::kAmaxReduce:
      RETURN_IF_ERROR(state_.CheckAmaxes());
      RETURN_IF_ERROR(ReduceAmaxes(instruction, TagOf(instruction, turn)));
      FinishAmaxes(StreamOf(instruction), args_.actions->apply());
      return absl::OkStatus();
    case OpCode::kRefreshWeights:
      RETURN_IF_ERROR(state_.BeginRefresh(instruction.group));
      RETURN_IF_ERROR(Quantize(StreamOf(instruction), Group(instruction)));
      state_.EndRefresh(instruction.group);
      return absl::OkStatus();
    case OpCode::kFree:
    case OpCode::kEndPhase:
      break;
  }
  CheckFailed(__FILE__, __LINE__, "op code", "not an instruction of a stream");
}

absl::Status InstructionRunner::Gather(const Instruction& instruction, const ReplayTurn& turn) {
  if (MoveAt(instruction).of == plan::MoveOf::kGradient) {
    return GatherGradient(instruction, turn);
  }
  return plan::BufferOf(instruction, Role::kWeights) >= 0 ? GatherWeights(instruction, turn)
                                                          : RenewWeights(instruction, turn);
}

// Elements of a move's type that so many of a group's model weights are.
int64_t InstructionRunner::WireElements(const Instruction& instruction, int64_t elements) {
  return DivExact(Group(instruction).ModelWeightBytes(elements),
                  DTypeBytes(MoveAt(instruction).type));
}

absl::Status InstructionRunner::GatherWeights(const Instruction& instruction,
                                              const ReplayTurn& turn) {
  const ParameterGroup& group = Group(instruction);
  RETURN_IF_ERROR(state_.BeginGather(instruction));
  RETURN_IF_ERROR(
      RanksOf(instruction)
          .AllGather({.tag = TagOf(instruction, turn),
                      .shard = Floats(group.model_weight()),
                      .gathered = FloatsOf(instruction, Role::kWeights),
                      .shard_elements = WireElements(instruction, group.slice_elements()),
                      .element_bytes = DTypeBytes(MoveAt(instruction).type),
                      .stream = &StreamOf(instruction)}));
  state_.EndGather(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::RenewWeights(const Instruction& instruction,
                                             const ReplayTurn& turn) {
  ParameterGroup& group = Group(instruction);
  const plan::ProgramMove& move = MoveAt(instruction);
  RETURN_IF_ERROR(
      RanksOf(instruction)
          .AllGather({.tag = TagOf(instruction, turn),
                      .shard = Floats(group.stored_model_weight()),
                      .gathered = Floats(group.model_weight()),
                      .shard_elements = WireElements(
                          instruction, DivExact(group.slice_elements(), move.move.axis_size)),
                      .element_bytes = DTypeBytes(move.type),
                      .stream = &StreamOf(instruction)}));
  state_.EndRenewal(instruction.group);
  return absl::OkStatus();
}

absl::Status InstructionRunner::GatherGradient(const Instruction& instruction,
                                               const ReplayTurn& turn) {
  ParameterGroup& group = Group(instruction);
  RETURN_IF_ERROR(state_.GatherGradient(instruction.group));
  return RanksOf(instruction)
      .AllGather({.tag = TagOf(instruction, turn),
                  .shard = group.reduced(0),
                  .gathered = group.full_gradient(),
                  .shard_elements = group.slice_elements(),
                  .stream = &StreamOf(instruction)});
}

absl::Status InstructionRunner::Compute(const BoundInstruction& bound, const ReplayTurn& turn) {
  const Instruction& instruction = bound.instruction;
  if (!HasLane(turn)) {
    return absl::OkStatus();
  }
  const plan::UnitId unit = instruction.unit;
  if (!turn.used.empty() && !turn.used[unit]) {
    CHECK_MSG(args_.plan.inventory.units[unit].optional, "only an optional unit may be unused");
    return PassUnused(instruction);
  }
  RETURN_IF_ERROR(state_.BeginCompute(instruction));
  // Sums, which draw nothing, may run beside a step that does.
  if (!plan::ExchangesAddends(bound.move)) {
    draws_ = DrawsOf(turn);
    draws_.piece = static_cast<uint32_t>(instruction.call);
    loss_scale_ = static_cast<float>(turn.loss_scale);
  }
  if (bound.move != plan::SegmentMove::kNone) {
    RETURN_IF_ERROR(MoveActivation(bound, turn));
  } else {
    IssueCompute(bound, turn.slot.phase);
  }
  state_.EndCompute(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::MoveActivation(const BoundInstruction& bound,
                                               const ReplayTurn& turn) {
  const Instruction& instruction = bound.instruction;
  comm::Communicator& ranks = RanksOf(instruction);
  comm::CollectiveTag tag = TagOf(instruction, turn);
  model::UnitMemory memory = bound.memory;
  const bool sums = plan::ExchangesAddends(bound.move);
  if (sums) {
    ASSIGN_OR_RETURN(const comm::PieceViews views,
                     ranks.ExchangePieces({.tag = tag,
                                           .staging = FloatsOf(instruction, Role::kSend),
                                           .receive = FloatsOf(instruction, Role::kReceive),
                                           .shard_elements = memory.rows.elements(),
                                           .contributors = ranks.size(),
                                           .stream = &StreamOf(instruction)}));
    for (const float* piece : views.pieces) {
      TensorView& view = memory.pieces.emplace_back(memory.rows);
      view.dtype = DType::kF32;
      view.data = const_cast<float*>(piece);
    }
  }
  IssueCompute(bound, turn.slot.phase, memory);
  if (sums) {
    RETURN_IF_ERROR(ranks.ReleasePieces(tag));
  }
  if (!plan::GathersRows(bound.move)) {
    return absl::OkStatus();
  }
  tag.op = plan::OpLabel::kTensorGather;
  return ranks.AllGather({.tag = tag,
                          .shard = memory.rows.As<float>(),
                          .gathered = bound.target.As<float>(),
                          .shard_elements = memory.rows.elements(),
                          .element_bytes = DTypeBytes(memory.rows.dtype),
                          .stream = &StreamOf(instruction)});
}

kernels::ActivationDraws InstructionRunner::DrawsOf(const ReplayTurn& turn) const {
  const plan::LaneMap& lanes = args_.plan.lanes;
  const int64_t lane = plan::LaneOf(args_.plan, turn.slot.turn, args_.communicators.world().rank());
  const int64_t micro_batch = lane * lanes.micro_batches + turn.slot.micro_batch;
  // Where the step's number lies in memory, one graph serves all steps.
  const int64_t* step = args_.actions == nullptr ? nullptr : args_.actions->step_number();
  return {.seed = args_.seed,
          .step = step == nullptr ? static_cast<uint32_t>(turn.step) : 0,
          .device_step = step,
          .site = 0,
          .first_sample = static_cast<uint32_t>(micro_batch * args_.plan.micro_batch.sequences),
          .sequence_tokens = args_.plan.micro_batch.sequence_tokens};
}

void InstructionRunner::IssueCompute(const BoundInstruction& bound, plan::Phase phase) const {
  IssueCompute(bound, phase, bound.memory);
}

void InstructionRunner::IssueCompute(const BoundInstruction& bound,
                                     plan::Phase phase,
                                     const model::UnitMemory& memory) const {
  const Instruction& instruction = bound.instruction;
  const model::Module& module = *args_.modules[instruction.unit];
  kernels::Stream& stream = StreamOf(instruction);
  const auto backward = [&](const auto& gradients) {
    const bool all = bound.segments.empty();
    for (const plan::SegmentKind kind :
         all ? module.segments(plan::UnitPass::kBackward) : bound.segments) {
      module.RunSegment(stream, memory, kind, gradients);
    }
  };
  if (instruction.op == OpCode::kBackward) {
    bound.accumulates ? backward(Typed<model::AccumulatingGradient>(bound.gradients))
                      : backward(Typed<model::FreshGradient>(bound.gradients));
    return;
  }
  const plan::UnitPass pass = instruction.op == OpCode::kRecompute ? plan::UnitPass::kRecompute
                              : phase == plan::Phase::kEval        ? plan::UnitPass::kEvaluate
                                                                   : plan::UnitPass::kForward;
  for (const plan::SegmentKind kind :
       bound.segments.empty() ? module.segments(pass) : bound.segments) {
    module.RunSegment(stream, memory, pass, kind);
  }
}

// The residual stream passes by; the lane's gradient of the unit is zero.
absl::Status InstructionRunner::PassUnused(const Instruction& instruction) {
  if (instruction.op != OpCode::kBackward) {
    return absl::OkStatus();
  }
  Instruction gradients = {.op = OpCode::kBackward, .unit = instruction.unit};
  gradients.segment = instruction.segment;
  for (const Operand& operand : instruction.operands) {
    if (operand.when != When::kUsed) {
      gradients.operands.push_back(operand);
    }
  }
  RETURN_IF_ERROR(state_.BeginCompute(gradients));
  for (const Operand& operand : gradients.operands) {
    if (operand.access == Access::kWrite) {
      args_.backend.FillBytes(StreamOf(instruction),
                              args_.buffers.bytes(operand.buffer),
                              0,
                              args_.plan.buffers[operand.buffer].bytes);
    }
  }
  state_.EndCompute(gradients);
  return absl::OkStatus();
}

absl::Status InstructionRunner::AccumulateGrad(const Instruction& instruction,
                                               const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginReduce(instruction));
  const std::array<const float*, 1> lane = {FloatsOf(instruction, Role::kSend)};
  Group(instruction).local(instruction.call)->AddTurn(StreamOf(instruction), turn.slot.turn, lane);
  state_.EndReduce(instruction);
  return absl::OkStatus();
}

// Staging becomes the tree over the ranks' staging, in their order: each adds up its part of the
// elements, and the parts are gathered. Ranks of a tensor group have a lane all or none.
absl::Status InstructionRunner::SumAddends(const Instruction& instruction, const ReplayTurn& turn) {
  if (!HasLane(turn)) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(state_.BeginAddends(instruction));
  kernels::Stream& stream = StreamOf(instruction);
  comm::Communicator& ranks = RanksOf(instruction);
  const int64_t part =
      DivExact(Group(instruction).layout().layout.total_elements(), int64_t{ranks.size()});
  comm::CollectiveTag tag = TagOf(instruction, turn);
  float* staging = FloatsOf(instruction, Role::kSend);
  float* sum = FloatsOf(instruction, Role::kSum);
  ASSIGN_OR_RETURN(const comm::PieceViews views,
                   ranks.ExchangePieces({.tag = tag,
                                         .staging = staging,
                                         .receive = FloatsOf(instruction, Role::kReceive),
                                         .shard_elements = part,
                                         .contributors = ranks.size(),
                                         .stream = &stream}));
  kernels::TreeSum(stream, {.pieces = views.pieces, .out = VectorView(sum, part)});
  RETURN_IF_ERROR(ranks.ReleasePieces(tag));
  tag.op = plan::OpLabel::kTensorGather;
  RETURN_IF_ERROR(ranks.AllGather(
      {.tag = tag, .shard = sum, .gathered = staging, .shard_elements = part, .stream = &stream}));
  state_.EndAddends(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::ReduceLanes(const Instruction& instruction,
                                            const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginReduce(instruction));
  ParameterGroup& group = Group(instruction);
  LaneCounter& counter = group.inner(instruction.call);
  const plan::BufferId source = plan::BufferOf(instruction, Role::kSend);
  const bool sums = args_.plan.buffers[source].kind == BufferKind::kLocalGrad;
  const int64_t at = sums ? 0 : turn.slot.turn;
  comm::Communicator& communicator = RanksOf(instruction);
  const comm::CollectiveTag tag = TagOf(instruction, turn);
  ASSIGN_OR_RETURN(
      const comm::PieceViews views,
      communicator.ExchangePieces({.tag = tag,
                                   .staging = PackedStaging(instruction, turn),
                                   .receive = FloatsOf(instruction, Role::kReceive),
                                   .shard_elements = group.slice_elements(),
                                   .contributors = static_cast<int>(counter.contributors(at)),
                                   .element_bytes = DTypeBytes(MoveAt(instruction).type),
                                   .stream = &StreamOf(instruction)}));
  AddPieces(instruction, at, views);
  RETURN_IF_ERROR(communicator.ReleasePieces(tag));
  state_.EndReduce(instruction);
  return absl::OkStatus();
}

float* InstructionRunner::PackedStaging(const Instruction& instruction, const ReplayTurn& turn) {
  float* staging = HasLane(turn) ? FloatsOf(instruction, Role::kSend) : nullptr;
  const DType staged = args_.plan.buffers[plan::BufferOf(instruction, Role::kSend)].dtype;
  if (MoveAt(instruction).type == staged || staging == nullptr) {
    return staging;
  }
  return static_cast<float*>(args_.backend.PackForWire(
      StreamOf(instruction), staging, Group(instruction).layout().layout.total_elements()));
}

void InstructionRunner::AddPieces(const Instruction& instruction,
                                  int64_t turn,
                                  const comm::PieceViews& views) {
  LaneCounter& counter = Group(instruction).inner(instruction.call);
  if (MoveAt(instruction).type != DType::kBF16) {
    counter.AddTurn(StreamOf(instruction), turn, views.pieces);
    return;
  }
  std::vector<const uint16_t*> rounded;
  for (const float* piece : views.pieces) {
    rounded.push_back(reinterpret_cast<const uint16_t*>(piece));
  }
  counter.AddRoundedTurn(StreamOf(instruction), turn, rounded);
}

absl::Status InstructionRunner::ReduceSums(const Instruction& instruction, const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.BeginReduceOfSums(instruction));
  ParameterGroup& group = Group(instruction);
  const plan::Move& move = MoveAt(instruction).move;
  const int64_t part = DivExact(group.slice_elements(), move.axis_size);
  comm::Communicator& communicator = RanksOf(instruction);
  const comm::CollectiveTag tag = TagOf(instruction, turn);
  float* replica_sum = group.inner(instruction.call).sum();
  LaneCounter& counter = *group.outer(instruction.call);
  ASSIGN_OR_RETURN(const comm::PieceViews views,
                   communicator.ExchangePieces({.tag = tag,
                                                .staging = replica_sum,
                                                .receive = FloatsOf(instruction, Role::kReceive),
                                                .shard_elements = part,
                                                .contributors = static_cast<int>(move.axis_size),
                                                .stream = &StreamOf(instruction)}));
  counter.AddTurn(StreamOf(instruction), 0, views.pieces);
  RETURN_IF_ERROR(communicator.ReleasePieces(tag));
  if (move.to.kind == plan::PlacementKind::kReplicate) {
    RETURN_IF_ERROR(communicator.AllGather({.tag = tag,
                                            .shard = counter.sum(),
                                            .gathered = replica_sum,
                                            .shard_elements = part,
                                            .stream = &StreamOf(instruction)}));
  }
  state_.EndReduceOfSums(instruction);
  return absl::OkStatus();
}

absl::Status InstructionRunner::ReduceStatistics(const Instruction& instruction,
                                                 const ReplayTurn& turn) {
  RETURN_IF_ERROR(state_.CheckSumsComplete());
  const StatisticsMessages messages = args_.actions->Measure(StreamOf(instruction));
  if (quant_ != nullptr) {
    args_.actions->CountNonFinite(StreamOf(instruction), quant_->flags());
    DigestScales(StreamOf(instruction));
  }
  return args_.backend.ExchangeStatistics(
      RanksOf(instruction), TagOf(instruction, turn), messages, StreamOf(instruction));
}

comm::PeerWait InstructionRunner::TakePeerWait(const Instruction& instruction) {
  return instruction.move >= 0 ? RanksOf(instruction).TakePeerWait() : comm::PeerWait();
}

int64_t InstructionRunner::BytesOf(const Instruction& instruction, const ReplayTurn& turn) const {
  const plan::LaneMap& lanes = args_.plan.lanes;
  const int64_t lane_count = lanes.Inner().LaneCount(lanes.blocks ? 0 : turn.slot.turn);
  const bool own = lanes.blocks || HasLane(turn);
  return plan::ReceivedBytes(args_.plan, instruction, lane_count + (own ? 0 : 1));
}

}  // namespace ravel::shard
