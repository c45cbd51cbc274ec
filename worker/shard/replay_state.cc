// State machines of weights, activations, staging and sums while programs are replayed. An
// instruction that reads what is not there, of an old generation, or already freed is an error that
// names both. It runs on the host, as instructions are issued.

#include "worker/shard/replay_state.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

using plan::BufferId;
using plan::BufferKind;
using plan::GroupId;
using plan::Instruction;
using plan::OpCode;
using plan::ProgramBuffer;
using plan::Role;

bool Overlap(const plan::ShardingPlan& plan, BufferId a, BufferId b) {
  const ProgramBuffer& first = plan.buffers[a];
  const ProgramBuffer& second = plan.buffers[b];
  return first.memory == second.memory && first.bytes > 0 && second.bytes > 0 &&
         plan.memory.offsets[a] < plan.memory.offsets[b] + second.bytes &&
         plan.memory.offsets[b] < plan.memory.offsets[a] + first.bytes;
}

bool Temporary(const ProgramBuffer& buffer) {
  return !buffer.persistent && buffer.inside < 0;
}

int64_t TemporaryBytes(const plan::ShardingPlan& plan, const std::vector<BufferId>& buffers) {
  int64_t bytes = 0;
  for (const BufferId id : buffers) {
    const ProgramBuffer& buffer = plan.buffers[id];
    bytes += Temporary(buffer) ? buffer.bytes : 0;
  }
  return bytes;
}

}  // namespace

ReplayState::ReplayState(const plan::ShardingPlan& plan)
    : plan_(plan),
      overlaps_(plan.buffers.size()),
      has_backward_(plan.buffers.size(), false),
      buffers_(plan.buffers.size()),
      groups_(plan.groups.size()) {
  CHECK_EQ(plan.moves.of_groups.size(), plan.groups.size());
  for (const BufferId a : plan.buffers.ids()) {
    for (const BufferId b : plan.buffers.ids()) {
      if (a != b && Temporary(plan.buffers[a]) && Temporary(plan.buffers[b]) &&
          Overlap(plan, a, b)) {
        overlaps_[a].push_back(b);
      }
    }
    const ProgramBuffer& buffer = plan.buffers[a];
    if (buffer.kind == BufferKind::kMainGrad) {
      std::vector<SumState>& sums = groups_[buffer.group].sums;
      sums.resize(std::max(sums.size(), Size(buffer.call) + 1));
    }
  }
  most_gathered_ = plan.options.gather_window_bytes;
  most_staged_ = plan.options.staging_window_bytes;
  for (const plan::StepProgram& program : plan.programs) {
    for (const Instruction& instruction : program.instructions) {
      if (plan::IsCompute(instruction.op)) {
        plan::SegmentId& last =
            last_steps_[{instruction.op, instruction.unit, program.phase == plan::Phase::kEval}];
        last = std::max(last, instruction.segment);
      }
      most_gathered_ = std::max(most_gathered_,
                                TemporaryBytes(plan, plan::BuffersOf(instruction, Role::kWeights)));
      most_staged_ = std::max(most_staged_,
                              TemporaryBytes(plan, plan::BuffersOf(instruction, Role::kGradient)));
      const BufferId saved = plan::BufferOf(instruction, Role::kSaved);
      if (instruction.op == OpCode::kBackward && saved >= 0) {
        has_backward_[saved] = true;
      }
    }
  }
}

absl::Status ReplayState::Fault(const char* what, BufferId buffer) const {
  return absl::InternalError(absl::StrCat(what, ": ", plan_.buffers[buffer].name));
}

absl::Status ReplayState::GroupFault(const char* what, GroupId group) const {
  const plan::UnitId unit = plan_.groups[group].unit;
  return absl::InternalError(
      absl::StrCat(what, ": group ", group.value(), " of ", plan_.inventory.units[unit].name));
}

void ReplayState::BeginProgram(const Pass& pass) {
  MutexLock lock(mutex_);
  pass_ = pass;
  ++pass_number_;
}

Generation ReplayState::generation(GroupId group) const {
  MutexLock lock(mutex_);
  return groups_[group].generation;
}

bool ReplayState::Busy(BufferId buffer) {
  const BufferState& state = buffers_[buffer];
  if (state.uses > 0 || state.content == Content::kFilling || state.content == Content::kDraining) {
    return true;
  }
  return state.content == Content::kFull && !state.freed;
}

absl::Status ReplayState::Claim(BufferId buffer) {
  if (Busy(buffer)) {
    return Fault("memory is still in use", buffer);
  }
  for (const BufferId other : overlaps_[buffer]) {
    if (Busy(other)) {
      return Fault("memory is still in use by another buffer", other);
    }
    buffers_[other].content = Content::kNone;
  }
  buffers_[buffer] = {.content = Content::kFilling};
  return CheckWindow(buffer);
}

absl::Status ReplayState::CheckWindow(BufferId buffer) {
  const BufferKind kind = plan_.buffers[buffer].kind;
  const bool weights = kind == BufferKind::kGathered;
  if ((!weights && kind != BufferKind::kStaging) || !Temporary(plan_.buffers[buffer])) {
    return absl::OkStatus();
  }
  int64_t alive = 0;
  for (const BufferId i : buffers_.ids()) {
    if (plan_.buffers[i].kind == kind && Temporary(plan_.buffers[i]) && Busy(i)) {
      alive += plan_.buffers[i].bytes;
    }
  }
  return alive <= (weights ? most_gathered_ : most_staged_)
             ? absl::OkStatus()
             : Fault("more memory is alive than the window holds", buffer);
}

absl::Status ReplayState::BeginGather(const Instruction& gather) {
  MutexLock lock(mutex_);
  const GroupState& group = groups_[gather.group];
  if (group.updating || group.stale) {
    return GroupFault("weights are gathered while they are written", gather.group);
  }
  if (plan_.moves.of_groups[gather.group].weights.size() > 1 &&
      group.model_generation != group.generation) {
    return GroupFault("weights of an older generation are gathered", gather.group);
  }
  return Claim(plan::BufferOf(gather, Role::kWeights));
}

void ReplayState::EndGather(const Instruction& gather) {
  MutexLock lock(mutex_);
  const BufferId gathered = plan::BufferOf(gather, Role::kWeights);
  buffers_[gathered] = {.content = Content::kFull,
                        .freed = plan_.buffers[gathered].persistent,
                        .group = gather.group,
                        .generation = groups_[gather.group].generation};
}

void ReplayState::EndRenewal(GroupId group) {
  MutexLock lock(mutex_);
  groups_[group].model_generation = groups_[group].generation;
}

absl::Status ReplayState::CheckWeights(BufferId buffer) {
  const GroupId owner = plan_.buffers[buffer].group;
  const GroupState& group = groups_[owner];
  if (group.updating || group.stale) {
    return Fault("weights are used while they are written", buffer);
  }
  if (plan_.moves.of_groups[owner].weights.empty()) {
    return absl::OkStatus();  // the stored weights themselves
  }
  const BufferState& state = buffers_[buffer];
  if (state.content != Content::kFull || state.group != owner ||
      (state.freed && !plan_.buffers[buffer].persistent)) {
    return Fault("weights used before their gather or after their end", buffer);
  }
  return state.generation == group.generation ? absl::OkStatus()
                                              : Fault("weights of an older generation", buffer);
}

absl::Status ReplayState::BeginActivations(const Instruction& compute) {
  const bool forward = compute.op == OpCode::kForward;
  if (const BufferId saved = plan::BufferOf(compute, Role::kSaved); saved >= 0) {
    const BufferState& state = buffers_[saved];
    if (forward) {
      RETURN_IF_ERROR(Claim(saved));
    } else if (state.content != Content::kFull || state.call != compute.call ||
               state.pass != pass_number_) {
      return Fault("activations that no forward of this pass has saved", saved);
    }
  }
  if (const BufferId remade = plan::BufferOf(compute, Role::kRemade); remade >= 0) {
    const BufferState& state = buffers_[remade];
    if (compute.op != OpCode::kBackward) {
      RETURN_IF_ERROR(Claim(remade));
    } else if (state.content != Content::kFull || state.call != compute.call ||
               state.pass != pass_number_) {
      return Fault("activations that were not made again", remade);
    }
  }
  const BufferId scratch = plan::BufferOf(compute, Role::kScratch);
  return scratch >= 0 ? Claim(scratch) : absl::OkStatus();
}

absl::Status ReplayState::BeginGradients(const Instruction& compute) {
  const bool accumulates = plan::Accumulates(compute);
  for (const BufferId staging : plan::BuffersOf(compute, Role::kGradient)) {
    BufferState& state = buffers_[staging];
    const Content expected = accumulates ? Content::kFull : Content::kFilling;
    if (state.content != expected || state.uses > 0) {
      return Fault(accumulates ? "gradients are added to memory without any"
                               : "a second first write into staging memory",
                   staging);
    }
    state.uses = 1;
  }
  return absl::OkStatus();
}

bool ReplayState::IsLastStep(const Instruction& compute) const {
  const auto last = last_steps_.find({compute.op, compute.unit, pass_.phase == plan::Phase::kEval});
  return last == last_steps_.end() || compute.segment >= last->second;
}

absl::Status ReplayState::BeginCompute(const Instruction& compute) {
  MutexLock lock(mutex_);
  const std::vector<BufferId> weights = plan::BuffersOf(compute, Role::kWeights);
  for (const BufferId buffer : weights) {
    RETURN_IF_ERROR(CheckWeights(buffer));
  }
  if (compute.segment <= 0) {
    RETURN_IF_ERROR(BeginActivations(compute));
    if (compute.op == OpCode::kBackward) {
      RETURN_IF_ERROR(BeginGradients(compute));
    }
  }
  for (const BufferId buffer : weights) {
    ++buffers_[buffer].uses;
  }
  return absl::OkStatus();
}

void ReplayState::EndCompute(const Instruction& compute) {
  MutexLock lock(mutex_);
  for (const BufferId buffer : plan::BuffersOf(compute, Role::kWeights)) {
    --buffers_[buffer].uses;
  }
  if (!IsLastStep(compute)) {
    return;
  }
  const bool backward = compute.op == OpCode::kBackward;
  const BufferState made = {
      .content = Content::kFull, .freed = false, .call = compute.call, .pass = pass_number_};
  const BufferId saved = plan::BufferOf(compute, Role::kSaved);
  if (saved >= 0 && compute.op == OpCode::kForward) {
    buffers_[saved] = made;
    // Nobody waits for what no backward reads.
    buffers_[saved].freed = pass_.phase == plan::Phase::kEval || !has_backward_[saved];
  } else if (saved >= 0 && backward) {
    buffers_[saved] = {};
  }
  if (const BufferId remade = plan::BufferOf(compute, Role::kRemade); remade >= 0) {
    buffers_[remade] = made;
    buffers_[remade].freed = compute.op != OpCode::kRecompute;
  }
  if (const BufferId scratch = plan::BufferOf(compute, Role::kScratch); scratch >= 0) {
    buffers_[scratch] = {};
  }
  for (const BufferId staging : plan::BuffersOf(compute, Role::kGradient)) {
    const GroupId group = plan_.buffers[staging].group;
    buffers_[staging] = {.content = Content::kFull,
                         .freed = false,
                         .addends = !plan_.moves.of_groups[group].each_lane.empty()};
  }
}

absl::Status ReplayState::BeginAddends(const Instruction& reduce) {
  MutexLock lock(mutex_);
  const BufferId staging = plan::BufferOf(reduce, Role::kSend);
  BufferState& state = buffers_[staging];
  if (state.content != Content::kFull || state.uses > 0 || !state.addends) {
    return Fault("addends are summed once, after their last write", staging);
  }
  state.uses = 1;
  RETURN_IF_ERROR(Claim(plan::BufferOf(reduce, Role::kSum)));
  return ClaimReceive(reduce);
}

void ReplayState::EndAddends(const Instruction& reduce) {
  MutexLock lock(mutex_);
  BufferState& state = buffers_[plan::BufferOf(reduce, Role::kSend)];
  state.uses = 0;
  state.addends = false;
  buffers_[plan::BufferOf(reduce, Role::kSum)] = {};
  LeaveReceive(reduce);
}

absl::Status ReplayState::AllocStaging(BufferId staging) {
  MutexLock lock(mutex_);
  if (plan_.buffers[staging].persistent &&
      (pass_.part == plan::LanePart::kMiddle || pass_.part == plan::LanePart::kClose)) {
    return absl::OkStatus();  // holds the lane's earlier micro-batches
  }
  return Claim(staging);
}

ReplayState::SumState& ReplayState::SumOf(const Instruction& reduce) {
  std::vector<SumState>& sums = groups_[reduce.group].sums;
  return At(sums, reduce.call);
}

absl::Status ReplayState::ClaimReceive(const Instruction& reduce) {
  const BufferId receive = plan::BufferOf(reduce, Role::kReceive);
  return receive >= 0 ? Claim(receive) : absl::OkStatus();
}

void ReplayState::LeaveReceive(const Instruction& reduce) {
  if (const BufferId receive = plan::BufferOf(reduce, Role::kReceive); receive >= 0) {
    buffers_[receive] = {};
  }
}

absl::Status ReplayState::BeginReduce(const Instruction& reduce) {
  MutexLock lock(mutex_);
  const bool local = reduce.op == OpCode::kAccumulateGrad;
  SumState& sum = SumOf(reduce);
  const plan::LaneMap& lanes = plan_.lanes;
  const BufferId sent = plan::BufferOf(reduce, Role::kSend);
  if (plan_.buffers[sent].kind == BufferKind::kLocalGrad) {
    if (sum.local_turns != lanes.Local().turns() || sum.inner_turns != 0) {
      return GroupFault("a sum over lanes is exchanged before it is complete", reduce.group);
    }
  } else {
    BufferState& state = buffers_[sent];
    const Content expected = pass_.has_lane ? Content::kFull : Content::kFilling;
    if (state.content != expected || state.uses > 0) {
      return Fault("staging memory is reduced once, after its last write", sent);
    }
    if (state.addends) {
      return Fault("a gradient leaves its rank before its addends are summed", sent);
    }
    state.content = Content::kDraining;
    if ((local ? sum.local_turns : sum.inner_turns) != pass_.turn) {
      return GroupFault("a turn's gradients are added out of order", reduce.group);
    }
  }
  return ClaimReceive(reduce);
}

void ReplayState::EndReduce(const Instruction& reduce) {
  MutexLock lock(mutex_);
  SumState& sum = SumOf(reduce);
  const BufferId sent = plan::BufferOf(reduce, Role::kSend);
  if (plan_.buffers[sent].kind != BufferKind::kLocalGrad) {
    buffers_[sent] = {};
  }
  LeaveReceive(reduce);
  ++(reduce.op == OpCode::kAccumulateGrad ? sum.local_turns : sum.inner_turns);
}

absl::Status ReplayState::BeginReduceOfSums(const Instruction& reduce) {
  MutexLock lock(mutex_);
  const SumState& sum = SumOf(reduce);
  if (sum.inner_turns != plan_.lanes.Inner().turns() || sum.outer) {
    return GroupFault("a replica's sum is exchanged once, when it is complete", reduce.group);
  }
  return ClaimReceive(reduce);
}

void ReplayState::EndReduceOfSums(const Instruction& reduce) {
  MutexLock lock(mutex_);
  LeaveReceive(reduce);
  SumOf(reduce).outer = true;
}

absl::Status ReplayState::CheckSums(GroupId group) {
  const GroupState& state = groups_[group];
  for (const SumState& sum : state.sums) {
    if (sum.inner_turns != plan_.lanes.Inner().turns() || sum.outer != (plan_.lanes.replicas > 1)) {
      return GroupFault("a gradient is used before it is summed over all lanes", group);
    }
  }
  return absl::OkStatus();
}

absl::Status ReplayState::JoinGradients(GroupId group) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckSums(group));
  if (groups_[group].joined) {
    return GroupFault("gradient calls are joined twice", group);
  }
  groups_[group].joined = true;
  return absl::OkStatus();
}

absl::Status ReplayState::GatherGradient(GroupId group) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckSums(group));
  if (groups_[group].sums.size() > 1 && !groups_[group].joined) {
    return GroupFault("a gradient is gathered before its calls are joined", group);
  }
  groups_[group].whole = true;
  return absl::OkStatus();
}

absl::Status ReplayState::CheckSumsComplete() {
  MutexLock lock(mutex_);
  for (const GroupId group : groups_.ids()) {
    if (!plan_.groups[group].trainable) {
      continue;
    }
    RETURN_IF_ERROR(CheckSums(group));
    if (groups_[group].sums.size() > 1 && !groups_[group].joined) {
      return GroupFault("gradients are measured before their calls are joined", group);
    }
  }
  return absl::OkStatus();
}

absl::Status ReplayState::CheckGradient(GroupId group) {
  MutexLock lock(mutex_);
  return CheckFinal(group);
}

absl::Status ReplayState::CheckFinal(GroupId group) {
  RETURN_IF_ERROR(CheckSums(group));
  return plan_.moves.of_groups[group].whole.empty() || groups_[group].whole
             ? absl::OkStatus()
             : GroupFault("an update lacks the gradient of other ranks' shards", group);
}

absl::Status ReplayState::BeginUpdate(GroupId group) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckFinal(group));
  GroupState& state = groups_[group];
  for (const BufferId i : buffers_.ids()) {
    const BufferState& buffer = buffers_[i];
    const bool gathering = buffer.content == Content::kFilling && buffer.group == group;
    if (plan_.buffers[i].group == group && plan_.buffers[i].kind == BufferKind::kGathered &&
        (buffer.uses > 0 || gathering)) {
      return GroupFault("weights are written while they are read", group);
    }
  }
  state.updating = true;
  return absl::OkStatus();
}

void ReplayState::EndUpdate(GroupId group) {
  MutexLock lock(mutex_);
  GroupState& state = groups_[group];
  state.stale = plan_.groups[group].recipe != plan::Recipe::kNone;
  if (!state.stale) {
    state.generation = static_cast<Generation>(static_cast<int64_t>(state.generation) + 1);
  }
  state.updating = false;
  state.joined = false;
  state.whole = false;
  std::fill(state.sums.begin(), state.sums.end(), SumState{});
}

absl::Status ReplayState::CheckAmaxes() {
  MutexLock lock(mutex_);
  for (const GroupId group : groups_.ids()) {
    if (plan_.groups[group].recipe != plan::Recipe::kNone && !groups_[group].stale) {
      return GroupFault("amaxes are reduced before the update of weights", group);
    }
  }
  return absl::OkStatus();
}

absl::Status ReplayState::BeginRefresh(GroupId group) {
  MutexLock lock(mutex_);
  if (!groups_[group].stale) {
    return GroupFault("codes are written for weights that have not changed", group);
  }
  groups_[group].updating = true;
  return absl::OkStatus();
}

void ReplayState::EndRefresh(GroupId group) {
  MutexLock lock(mutex_);
  GroupState& state = groups_[group];
  state.generation = static_cast<Generation>(static_cast<int64_t>(state.generation) + 1);
  state.updating = false;
  state.stale = false;
}

absl::Status ReplayState::Free(BufferId buffer) {
  MutexLock lock(mutex_);
  BufferState& state = buffers_[buffer];
  if (plan_.buffers[buffer].kind == BufferKind::kStaging) {
    return state.content == Content::kNone
               ? absl::OkStatus()
               : Fault("staging memory is freed before it is reduced", buffer);
  }
  if (state.uses > 0 || state.content == Content::kFilling) {
    return Fault("memory is freed while it is used", buffer);
  }
  state.freed = true;
  return absl::OkStatus();
}

absl::Status ReplayState::EndPhase() {
  MutexLock lock(mutex_);
  const bool open = pass_.part == plan::LanePart::kOpen || pass_.part == plan::LanePart::kMiddle;
  const std::vector<BufferId>& stays = plan_.program(pass_.phase, pass_.part).live_at_end;
  for (const BufferId i : buffers_.ids()) {
    const ProgramBuffer& buffer = plan_.buffers[i];
    // Weights may stay gathered for the next program of the step.
    const bool kept = (buffer.persistent && (buffer.kind != BufferKind::kStaging || open)) ||
                      std::binary_search(stays.begin(), stays.end(), i);
    if (!kept && Busy(i)) {
      return Fault("outlives its program", i);
    }
  }
  const bool steps = pass_.phase == plan::Phase::kOnly || pass_.phase == plan::Phase::kLast;
  for (const GroupId group : groups_.ids()) {
    for (const SumState& sum : groups_[group].sums) {
      if (steps && (sum.local_turns != 0 || sum.inner_turns != 0 || sum.outer)) {
        return GroupFault("a gradient sum is left over", group);
      }
    }
    if (steps && groups_[group].stale) {
      return GroupFault("codes are left older than their main weights", group);
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::shard
