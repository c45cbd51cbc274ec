// The order of operands is part of a plan: temporaries begin to live in that order, and buffers are
// packed in the order in which they begin.

#include "common/plan/program/program_operands.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/check.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_offload.h"

namespace ravel::plan {
namespace {

class OperandList {
 public:
  OperandList(const OperandContext& context, const Instruction& at) : context_(context), at_(at) {}

  std::vector<Operand> OfUse(const UnitUse& use, size_t position);
  std::vector<Operand> OfGroup();
  std::vector<Operand> OfStatistics();
  std::vector<Operand> OfAmaxes();

 private:
  void Add(BufferId buffer, Access access, Role role, When when = When::kAlways) {
    if (buffer >= 0) {
      operands_.push_back({.buffer = buffer, .access = access, .role = role, .when = when});
    }
  }
  BufferId Find(BufferKind kind, BufferIndex::Owner owner, int call = 0, int slot = 0) const {
    return context_.index.Find({.kind = kind, .owner = owner, .call = call, .slot = slot});
  }
  BufferId OfGroup(BufferKind kind) const { return Find(kind, at_.group); }
  BufferId OfCall(BufferKind kind) const { return Find(kind, at_.group, at_.call); }
  // The sum of a call over the lanes of a replica, and over all lanes.
  BufferId InnerSum(GroupId group, int call) const {
    return Find(BufferKind::kMainGrad, group, call, CounterRoot(context_.lanes.Inner()));
  }
  BufferId FinalSum(GroupId group, int call) const {
    return CutsSums(context_.moves, group) ? Find(BufferKind::kOuterGrad, group, call)
                                           : InnerSum(group, call);
  }
  const GroupMoves& moves() const { return context_.moves.of_groups[at_.group]; }

  // Every slot of the counter of a call: which ones a turn adds to depends on the turn.
  void AddCounter(BufferKind kind, Access access) {
    for (const BufferId slot : context_.index.OfCall(kind, at_.group, at_.call)) {
      Add(slot, access, Role::kSum);
    }
  }
  void AddGradients(const UnitUse& use, size_t position);
  void AddActivationMove(const SegmentStep& step, When when);
  void AddScales(const UnitUse& use, When when);
  void AddGatherSource() {
    const BufferId model_weight = OfGroup(BufferKind::kModelWeight);
    Add(model_weight >= 0 ? model_weight : OfGroup(BufferKind::kMainWeight),
        Access::kRead,
        Role::kStored);
  }
  void AddGather(const ProgramMove& move);
  void AddReduce(const ProgramMove& move);
  void AddReduceOfLanes();
  void AddUpdate();
  void AddOffload();
  void AddRefresh();
  bool Quantized(GroupId group) const { return context_.groups[group].recipe != Recipe::kNone; }
  BufferId OfAll(BufferKind kind, int slot = 0) const { return Find(kind, {}, 0, slot); }
  std::vector<Operand> OfStepBeside(const UnitUse& use, const SegmentStep& step);

  const OperandContext& context_;
  const Instruction& at_;
  std::vector<Operand> operands_;
};

// Scales of the weights that gemms read, and where they say what they have seen of activations.
void OperandList::AddScales(const UnitUse& use, When when) {
  if (std::none_of(use.needs.begin(), use.needs.end(), [&](GroupId id) { return Quantized(id); })) {
    return;
  }
  // Delayed scales stage the amaxes of activations, but in an evaluation.
  const bool stages = context_.options.amax_history > 0 && !context_.model.gradients.empty();
  Add(OfAll(BufferKind::kAmax), stages ? Access::kAdd : Access::kRead, Role::kAmax, when);
  Add(OfAll(BufferKind::kDelayedScales), Access::kRead, Role::kScales, when);
  if (!context_.model.gradients.empty()) {
    Add(OfAll(BufferKind::kAmaxFlags), Access::kAdd, Role::kFlags, when);
  }
}

// A step that runs beside others touches of the unit's buffers what its segments name alone.
std::vector<Operand> OperandList::OfStepBeside(const UnitUse& use, const SegmentStep& step) {
  const When when = context_.inventory.units[use.unit].optional ? When::kUsed : When::kLane;
  const auto has = [](const std::vector<ActivationList>& lists, ActivationList list) {
    return std::find(lists.begin(), lists.end(), list) != lists.end();
  };
  const auto add = [&](ActivationList list, BufferId buffer, Role role) {
    if (has(step.beside->changes, list)) {
      Add(buffer, Access::kAdd, role, when);
    } else if (has(step.beside->reads, list)) {
      Add(buffer, Access::kRead, role, when);
    }
  };
  for (size_t i = 0; step.beside->weights && i < use.needs.size(); ++i) {
    Add(Find(BufferKind::kGathered, use.needs[i]), Access::kRead, Role::kWeights, when);
  }
  if (step.beside->weights && step.move == SegmentMove::kNone) {  // a sum reads biases alone
    AddScales(use, when);
  }
  add(ActivationList::kSaved, Find(BufferKind::kSaved, use.unit, use.call), Role::kSaved);
  // A forward has there what its segments name as areas of the workspace.
  add(at_.op == OpCode::kForward ? ActivationList::kWorkspace : ActivationList::kRemade,
      Find(BufferKind::kRemade, use.unit),
      Role::kRemade);
  add(ActivationList::kWorkspace, Find(BufferKind::kWorkspace, use.unit), Role::kScratch);
  if (step.beside->gradients) {
    AddGradients(use, std::numeric_limits<size_t>::max());
  }
  add(ActivationList::kShared, Find(BufferKind::kShared, {}), Role::kShared);
  AddActivationMove(step, when);
  return std::move(operands_);
}

std::vector<Operand> OperandList::OfUse(const UnitUse& use, size_t position) {
  const SegmentStep* step = FindStep(use, at_);
  if (step != nullptr && step->beside.has_value()) {
    return OfStepBeside(use, *step);
  }
  const bool forward = at_.op == OpCode::kForward;
  const bool backward = at_.op == OpCode::kBackward;
  const bool later = at_.segment > 0;  // another step of the pass has begun them
  const bool optional = context_.inventory.units[use.unit].optional;
  const When when = optional ? When::kUsed : When::kLane;
  for (const GroupId group : use.needs) {
    Add(Find(BufferKind::kGathered, group), Access::kRead, Role::kWeights, when);
  }
  Add(Find(BufferKind::kSaved, use.unit, use.call),
      forward && !later     ? Access::kWrite
      : forward || backward ? Access::kAdd
                            : Access::kRead,
      Role::kSaved,
      when);
  Add(Find(BufferKind::kRemade, use.unit),
      backward || later ? Access::kAdd : Access::kWrite,
      Role::kRemade,
      when);
  Add(Find(BufferKind::kWorkspace, use.unit),
      later ? Access::kAdd : Access::kWrite,
      Role::kScratch,
      when);
  if (backward) {
    AddGradients(use, position);
  }
  Add(Find(BufferKind::kShared, {}), Access::kAdd, Role::kShared, when);
  AddScales(use, when);
  if (step != nullptr) {
    AddActivationMove(*step, when);
  }
  return std::move(operands_);
}

// Rows of the addends may be written step by step.
void OperandList::AddActivationMove(const SegmentStep& step, When when) {
  const bool sums = ExchangesAddends(step.move);
  if (sums || step.addend) {
    Add(OfAll(BufferKind::kAddend, step.addend_slot),
        sums ? Access::kRead : Access::kAdd,
        Role::kSend,
        when);
  }
  if (sums) {
    Add(OfAll(BufferKind::kAddendReceive), Access::kWrite, Role::kReceive, when);
  }
  if (GathersRows(step.move)) {
    Add(OfAll(BufferKind::kRows), Access::kWrite, Role::kSum, when);
  }
  if (step.input_gradient || step.sums_input_gradient) {
    Add(OfAll(BufferKind::kInputGradient),
        step.sums_input_gradient ? Access::kAdd : Access::kRead,
        Role::kInputGradient,
        when);
  }
}

// A unit that is not used has a gradient, too: zero.
void OperandList::AddGradients(const UnitUse& use, size_t position) {
  const bool opens = context_.part == LanePart::kWhole || context_.part == LanePart::kOpen;
  for (const GradientId id : use.gradients) {
    const GradientCall& call = context_.model.gradients[id];
    Add(Find(BufferKind::kStaging, call.group, call.call),
        opens && call.first_use >= position && at_.segment <= 0 ? Access::kWrite : Access::kAdd,
        Role::kGradient,
        When::kLane);
  }
  // Leaves are written anew where the unit's own gradient is.
  const BufferId leaves = Find(BufferKind::kLeaves, use.unit);
  for (const GradientId id : use.gradients) {
    const GradientCall& call = context_.model.gradients[id];
    if (context_.groups[call.group].unit == use.unit) {
      const bool fresh = opens && call.first_use >= position && at_.segment <= 0;
      Add(leaves, fresh ? Access::kWrite : Access::kAdd, Role::kLeaves, When::kLane);
      return;
    }
  }
}

void OperandList::AddReduceOfLanes() {
  if (!moves().each_turn.empty()) {
    // Rounded in place for the wire, where it is not staged so.
    const GradientCall* call = FindGradient(context_.model, at_.group, at_.call);
    const bool rounds =
        context_.options.gradient_wire == WireType::kBF16 && !context_.lanes.blocks &&
        (call == nullptr || StagedType(context_.lanes, context_.options, *call) == kGradientType);
    const Access access = rounds ? Access::kAdd : Access::kRead;
    Add(OfCall(BufferKind::kStaging), access, Role::kSend, When::kLane);
  } else {
    const int root = CounterRoot(context_.lanes.Local());
    Add(Find(BufferKind::kLocalGrad, at_.group, at_.call, root), Access::kRead, Role::kSend);
  }
  Add(OfCall(BufferKind::kReceive), Access::kWrite, Role::kReceive);
  AddCounter(BufferKind::kMainGrad, Access::kAdd);
}

void OperandList::AddGather(const ProgramMove& move) {
  if (move.of == MoveOf::kGradient) {
    Add(InnerSum(at_.group, 0), Access::kRead, Role::kSum);
    Add(OfGroup(BufferKind::kFullGrad), Access::kWrite, Role::kGradient);
  } else if (at_.move == moves().weights.back()) {
    AddGatherSource();
    Add(OfGroup(BufferKind::kGathered), Access::kWrite, Role::kWeights);
  } else {  // this rank's part of it stays
    Add(OfGroup(BufferKind::kModelWeight), Access::kAdd, Role::kStored);
  }
}

void OperandList::AddReduce(const ProgramMove& move) {
  if (SumsLanes(move)) {
    AddReduceOfLanes();
    return;
  }
  if (SumsAddends(move)) {
    Add(OfCall(BufferKind::kStaging), Access::kAdd, Role::kSend, When::kLane);
    Add(OfCall(BufferKind::kTensorReceive), Access::kWrite, Role::kReceive, When::kLane);
    Add(OfCall(BufferKind::kTensorSum), Access::kWrite, Role::kSum, When::kLane);
    return;
  }
  Add(OfCall(BufferKind::kOuterReceive), Access::kWrite, Role::kReceive);
  const bool back_to_all = move.move.to.kind == PlacementKind::kReplicate;
  Add(InnerSum(at_.group, at_.call), back_to_all ? Access::kAdd : Access::kRead, Role::kSum);
  Add(OfCall(BufferKind::kOuterGrad), Access::kWrite, Role::kSum);
}

// A device finds the amaxes of the weights that it writes, while these are in the caches. Codes of
// whole blocks are made there as well; a host knows the scales that this takes.
void OperandList::AddUpdate() {
  const BufferId whole = OfGroup(BufferKind::kFullGrad);
  Add(whole, Access::kRead, Role::kGradient);
  Add(whole < 0 ? FinalSum(at_.group, 0) : BufferId(), Access::kRead, Role::kSum);
  Add(OfGroup(BufferKind::kMainWeight), Access::kAdd, Role::kStored);
  const bool measures = Quantized(at_.group) && !context_.on_host[at_.group];
  const bool encodes = Quantized(at_.group) && EncodesInUpdate(context_.groups[at_.group].recipe);
  if (!Quantized(at_.group) || encodes) {
    Add(OfGroup(BufferKind::kModelWeight), Access::kAdd, Role::kStored);
  }
  for (const BufferId state : context_.index.OfCall(BufferKind::kState, at_.group, 0)) {
    Add(state, Access::kAdd, Role::kState);
  }
  for (const BufferId scale : context_.index.OfCall(BufferKind::kStateScale, at_.group, 0)) {
    Add(scale, Access::kAdd, Role::kState);
  }
  if (measures) {
    Add(OfAll(BufferKind::kAmax), Access::kAdd, Role::kAmax);
  }
  if (encodes && measures) {
    Add(OfAll(BufferKind::kDelayedScales), Access::kRead, Role::kScales);
  }
}

// Weights go down where the host keeps none that the update could read in their place.
void OperandList::AddOffload() {
  const BufferId whole = OfGroup(BufferKind::kFullGrad);
  Add(whole, Access::kRead, Role::kGradient);
  Add(whole < 0 ? FinalSum(at_.group, 0) : BufferId(), Access::kRead, Role::kSum);
  const HostChunkBytes bytes = HostChunkBytesOf(context_.groups[at_.group], context_.options);
  if (bytes.main > 0) {
    Add(OfGroup(BufferKind::kMainWeight), Access::kRead, Role::kStored);
  } else if (bytes.model_comes_down) {
    Add(OfGroup(BufferKind::kModelWeight), Access::kRead, Role::kStored);
  }
}

void OperandList::AddRefresh() {
  Add(OfGroup(BufferKind::kMainWeight), Access::kRead, Role::kStored);
  Add(OfAll(BufferKind::kAmax), Access::kRead, Role::kAmax);
  Add(OfAll(BufferKind::kDelayedScales), Access::kRead, Role::kScales);
  Add(OfGroup(BufferKind::kModelWeight), Access::kAdd, Role::kStored);
}

// What this rank stores of quantized weights, and the vector of all ranks.
std::vector<Operand> OperandList::OfAmaxes() {
  for (const GroupId group : context_.groups.ids()) {
    if (Quantized(group)) {
      Add(Find(BufferKind::kMainWeight, group), Access::kRead, Role::kStored);
    }
  }
  Add(OfAll(BufferKind::kAmax), Access::kAdd, Role::kAmax);
  Add(OfAll(BufferKind::kAmaxReceive), Access::kWrite, Role::kReceive);
  Add(OfAll(BufferKind::kAmaxPart), Access::kWrite, Role::kSum);
  Add(OfAll(BufferKind::kDelayedScales), Access::kAdd, Role::kScales);
  return std::move(operands_);
}

// Losses, and what this rank measures of the gradients.
std::vector<Operand> OperandList::OfStatistics() {
  Add(Find(BufferKind::kShared, {}), Access::kRead, Role::kShared);
  for (const GroupId group : context_.moves.of_groups.ids()) {
    const bool trains = GradientCallsOf(context_.model, group) > 0;
    Add(trains ? FinalSum(group, 0) : BufferId(), Access::kRead, Role::kSum);
  }
  Add(OfAll(BufferKind::kAmaxFlags), Access::kAdd, Role::kFlags);
  // Scales that codes had until now are compared.
  Add(OfAll(BufferKind::kAmax), Access::kRead, Role::kAmax);
  Add(OfAll(BufferKind::kDelayedScales), Access::kRead, Role::kScales);
  return std::move(operands_);
}

std::vector<Operand> OperandList::OfGroup() {
  switch (at_.op) {
    case OpCode::kGather:
      AddGather(context_.moves.moves[at_.move]);
      break;
    case OpCode::kReduce:
      AddReduce(context_.moves.moves[at_.move]);
      break;
    case OpCode::kAllocStaging:
      Add(OfCall(BufferKind::kStaging), Access::kWrite, Role::kGradient);
      break;
    case OpCode::kAccumulateGrad:
      Add(OfCall(BufferKind::kStaging), Access::kRead, Role::kSend, When::kLane);
      AddCounter(BufferKind::kLocalGrad, Access::kAdd);
      break;
    case OpCode::kJoinGradients:
      for (int call = 0; call < GradientCallsOf(context_.model, at_.group); ++call) {
        Add(FinalSum(at_.group, call), call == 0 ? Access::kAdd : Access::kRead, Role::kSum);
      }
      break;
    case OpCode::kOptimizerStep:
      AddUpdate();
      break;
    case OpCode::kOffloadGradient:
      AddOffload();
      break;
    case OpCode::kRefreshWeights:
      AddRefresh();
      break;
    default:
      break;
  }
  return std::move(operands_);
}

}  // namespace

std::vector<Operand> OperandsOf(const OperandContext& context, const Instruction& at, size_t use) {
  OperandList list(context, at);
  if (IsCompute(at.op)) {
    return use < context.model.uses.size() ? list.OfUse(context.model.uses[use], use)
                                           : std::vector<Operand>();
  }
  if (at.op == OpCode::kStatsReduce) {
    return list.OfStatistics();
  }
  if (at.op == OpCode::kAmaxReduce) {
    return list.OfAmaxes();
  }
  const bool complete =
      context.moves.of_groups.Has(at.group) && (!IsCollective(at.op) || HasMove(context.moves, at));
  return complete ? list.OfGroup() : std::vector<Operand>();
}

void AddOperands(const OperandContext& context, StepProgram& program) {
  size_t use = 0;
  for (Instruction& at : program.instructions) {
    at.operands = OperandsOf(context, at, use);
    const bool computes = IsCompute(at.op) && at.op != OpCode::kRecompute;
    use += computes && use < context.model.uses.size() && IsLastStep(context.model.uses[use], at)
               ? 1
               : 0;
  }
}

}  // namespace ravel::plan
