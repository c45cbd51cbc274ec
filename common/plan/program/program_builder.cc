// Emits the instructions of each program in one walk over the calls of units. Gathers run ahead of
// their use as far as the gather window reaches, reduces follow backward, and the unit that is
// needed last is evicted first (Belady). Waits are added where another stream wrote what is read.

#include "common/plan/program/program_builder.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_handover.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/program/program_operands.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_steps.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

// Emits one program. Weights: a cache of gathered groups that evicts the one needed last (Belady);
// what an eviction frees is reused only after the evicted group's last use, by an explicit wait.
// Gradients: the same on the reduce stream.
class Builder {
 public:
  Builder(const ProgramRequest& request,
          const BufferIndex& index,
          const HostUpdates& on_host,
          const ProgramKind& kind,
          const HandOver& hand_over)
      : request_(request),
        index_(index),
        on_host_(on_host),
        model_(UsesOf(request.inventory, request.groups, kind.phase != Phase::kEval)),
        weights_(request.groups.size()),
        allocated_at_(model_.gradients.size()),
        reduced_at_(model_.gradients.size()),
        summed_(request.groups.size(), 0) {
    program_.phase = kind.phase;
    program_.part = kind.part;
    hands_over_ = HandsOver(kind);
    at_end_ = hand_over.at_end;
    for (size_t use = 0; use < model_.uses.size(); ++use) {
      for (const GroupId group : model_.uses[use].needs) {
        Weights(group).uses.push_back(use);
      }
    }
    for (const GroupId group : weights_.ids()) {
      weights_[group].resident = IsResident(request, group);
    }
    for (const GroupId group : hand_over.at_start) {
      Weights(group).live = true;
      program_.live_at_start.push_back(Buffer(BufferKind::kGathered, group));
    }
    std::sort(program_.live_at_start.begin(), program_.live_at_start.end());
  }

  StepProgram Build() {
    RenewWeights();
    for (size_t use = 0; use < model_.uses.size(); ++use) {
      PrepareWeights(use);
      PrepareStaging(use, Must::kFit);
      if (request_.options.prefetch && use + 1 < model_.uses.size() &&
          model_.uses[use].op == OpCode::kBackward) {
        PrepareStaging(use + 1, Must::kNotWait);
      }
      EmitUse(use);
      if (model_.uses[use].op == OpCode::kBackward && Closes()) {
        EmitReduces(use);
      }
    }
    FinishSums();
    FreeAll();
    if (Updates(program_.phase)) {
      EmitUpdate();
    }
    EmitEnd();
    AddOperands({.inventory = request_.inventory,
                 .groups = request_.groups,
                 .moves = request_.moves,
                 .lanes = request_.lanes,
                 .options = request_.options,
                 .index = index_,
                 .model = model_,
                 .on_host = on_host_.of,
                 .part = program_.part},
                program_);
    OrderSteps(program_);
    DropImpliedWaits(program_);
    return std::move(program_);
  }

 private:
  struct GroupWeights {
    bool resident = false;
    bool live = false;  // the gather of a resident group has been emitted
    InstructionId gather = {};
    InstructionId renewed = {};  // the last move before the gather
    InstructionId last_use = {};
    std::vector<size_t> uses;
  };
  enum class Must { kFit, kNotWait };

  InstructionId Emit(Instruction instruction) {
    InstructionId& last = last_on_stream_[StreamIndex(instruction.stream)];
    last = program_.instructions.Add(std::move(instruction));
    return last;
  }
  Instruction OfGroup(OpCode op, StreamId stream, GroupId group) const {
    return {.op = op, .stream = stream, .unit = request_.groups[group].unit, .group = group};
  }
  Instruction Collective(OpCode op, MoveId move, GroupId group) const {
    Instruction made = OfGroup(op, request_.moves.moves[move].stream, group);
    made.move = move;
    return made;
  }
  void EmitFree(BufferId buffer) {
    Instruction free = {.op = OpCode::kFree, .stream = StreamId::kHost};
    free.freed = buffer;
    Emit(free);
  }

  const GroupMoves& Moves(GroupId group) const { return request_.moves.of_groups[group]; }
  int64_t Elements(GroupId group) const { return request_.groups[group].layout.total_elements(); }
  int64_t GatheredBytes(GroupId group) const {
    return WeightBytes(request_.groups[group], request_.options, Elements(group));
  }
  int64_t StagedBytes(const GradientCall& call) const {
    return Elements(call.group) * DTypeBytes(StagedType(request_.lanes, request_.options, call));
  }
  GroupWeights& Weights(GroupId group) { return weights_[group]; }
  BufferId Buffer(BufferKind kind, GroupId group, int call = 0) const {
    return index_.Find({.kind = kind, .owner = group, .call = call});
  }
  // Gradients of several micro-batches add up before they leave.
  bool Opens() const {
    return program_.part == LanePart::kWhole || program_.part == LanePart::kOpen;
  }
  bool Closes() const {
    return program_.part == LanePart::kWhole || program_.part == LanePart::kClose;
  }
  bool StagingStays() const { return program_.part != LanePart::kWhole; }

  // The first use at or after `from` that needs the group's weights.
  size_t NextUse(GroupId group, size_t from) const {
    const std::vector<size_t>& uses = weights_[group].uses;
    const auto next = std::lower_bound(uses.begin(), uses.end(), from);
    if (next != uses.end()) {
      return *next;
    }
    return hands_over_ && !uses.empty() ? model_.uses.size() + uses.front() : kNever;
  }

  // The moves of weights that are made once per step.
  void RenewWeights() {
    if (!RenewsWeights(program_.phase)) {
      return;
    }
    for (const GroupId group : weights_.ids()) {
      const std::vector<MoveId>& moves = Moves(group).weights;
      for (size_t i = 0; i + 1 < moves.size(); ++i) {
        weights_[group].renewed = Emit(Collective(OpCode::kGather, moves[i], group));
      }
    }
  }

  // Gathers what this use needs, then what later uses need as far as the window reaches.
  void PrepareWeights(size_t use) {
    const std::vector<UnitUse>& uses = model_.uses;
    const size_t next = std::min(uses.size(), use + (request_.options.prefetch ? 2 : 1));
    for (size_t ahead = use; ahead < next; ++ahead) {
      for (const GroupId group : uses[ahead].needs) {
        const bool renews = RenewsWeights(program_.phase) && !Moves(group).weights.empty();
        if (Weights(group).resident && renews && !Weights(group).live) {
          EmitGather(group, {});
        }
      }
    }
    const size_t end = request_.options.prefetch ? uses.size() : use + 1;
    for (size_t ahead = use; ahead < end; ++ahead) {
      for (const GroupId group : uses[ahead].needs) {
        const GroupWeights& weights = Weights(group);
        if (!weights.resident && !weights.live && !GatherWithin(group, use, ahead)) {
          return;
        }
      }
    }
  }

  // Gathers a group for use `ahead`, evicting groups that are needed later than that. False: no
  // room yet.
  bool GatherWithin(GroupId group, size_t use, size_t ahead) {
    const int64_t cap = request_.options.gather_window_bytes;
    int64_t live = GatheredBytes(group);
    std::vector<std::pair<size_t, GroupId>> candidates;  // by next use
    for (const GroupId other : weights_.ids()) {
      if (weights_[other].live && !weights_[other].resident) {
        live += GatheredBytes(other);
        const size_t next = NextUse(other, use);
        if (next > ahead) {
          candidates.emplace_back(next, other);
        }
      }
    }
    // Needed last first; of those never needed again, the one that has been idle longest.
    std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first
                                : Weights(a.second).last_use < Weights(b.second).last_use;
    });
    std::vector<GroupId> evicted;
    for (const auto& [next, other] : candidates) {
      if (live <= cap) {
        break;
      }
      live -= GatheredBytes(other);
      evicted.push_back(other);
    }
    if (live > cap && ahead != use) {
      return false;
    }
    // Keep whatever turned out not to be in the way.
    for (size_t i = 0; i < evicted.size();) {
      if (live + GatheredBytes(evicted[i]) <= cap) {
        live += GatheredBytes(evicted[i]);
        evicted.erase(evicted.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    EmitGather(group, evicted);
    return true;
  }

  void EmitGather(GroupId group, const std::vector<GroupId>& evicted) {
    Instruction gather = Collective(OpCode::kGather, Moves(group).weights.back(), group);
    for (const GroupId other : evicted) {
      EmitFree(Buffer(BufferKind::kGathered, other));
      GroupWeights& out = Weights(other);
      const InstructionId last = std::max(out.last_use, out.gather);
      if (last >= 0) {  // else it is of a program before and was not used in this one
        gather.waits.push_back(last);
      }
      out.live = false;
      out.gather = {};
      out.last_use = {};
    }
    GroupWeights& weights = Weights(group);
    if (weights.renewed >= 0) {
      gather.waits.push_back(weights.renewed);
    }
    weights.live = true;
    weights.gather = Emit(gather);
    weights.last_use = {};
  }

  // Opens the staging of the gradients that a use is the first to write. Room comes from gradients
  // that are already reduced; the allocation is on the reduce stream, after those reduces.
  // False: no room without waiting for a reduce that is not issued yet.
  bool PrepareStaging(size_t use, Must must) {
    if (!Opens()) {
      return true;
    }
    for (const GradientId id : model_.uses[use].gradients) {
      const GradientCall& call = model_.gradients[id];
      if (allocated_at_[id] >= 0) {
        continue;
      }
      Instruction alloc = OfGroup(OpCode::kAllocStaging, StreamId::kReduce, call.group);
      alloc.call = call.call;
      if (!StagingStays() && !MakeRoom(call, must, alloc.waits)) {
        return false;
      }
      staged_.push_back(id);
      allocated_at_[id] = Emit(alloc);
    }
    return true;
  }

  // Retires reduced gradients, oldest first, until another one fits.
  bool MakeRoom(const GradientCall& call, Must must, std::vector<InstructionId>& waits) {
    int64_t live = StagedBytes(call);
    for (const GradientId staged : staged_) {
      live += StagedBytes(model_.gradients[staged]);
    }
    std::vector<GradientId> stay;
    std::vector<InstructionId> reduces;
    for (const GradientId staged : staged_) {
      if (live > request_.options.staging_window_bytes && reduced_at_[staged] >= 0) {
        live -= StagedBytes(model_.gradients[staged]);
        reduces.push_back(reduced_at_[staged]);
      } else {
        stay.push_back(staged);
      }
    }
    if (live > request_.options.staging_window_bytes && must == Must::kNotWait) {
      return false;
    }
    staged_ = std::move(stay);
    waits = std::move(reduces);
    return true;
  }

  Instruction ComputeOf(OpCode op, const UnitUse& use, const SegmentStep& step) {
    Instruction run = {.op = op, .stream = StreamId::kCompute, .unit = use.unit, .call = use.call};
    run.segment = step.first;
    run.move = MoveOfStep(request_.moves, step.move);
    if (run.move >= 0) {
      run.stream = request_.moves.moves[run.move].stream;
    }
    for (const GroupId group : use.needs) {
      if (Weights(group).gather >= 0) {
        run.waits.push_back(Weights(group).gather);
      }
    }
    return run;
  }

  void EmitUse(size_t at) {
    const UnitUse& use = model_.uses[at];
    for (size_t step = 0; use.remakes && step < use.remake_steps.size(); ++step) {
      Emit(ComputeOf(OpCode::kRecompute, use, use.remake_steps[step]));
    }
    InstructionId instruction;
    for (const SegmentStep& step : use.steps) {
      Instruction run = ComputeOf(use.op, use, step);
      for (const GradientId id : use.gradients) {
        if (allocated_at_[id] >= 0) {
          run.waits.push_back(allocated_at_[id]);
        }
      }
      instruction = Emit(run);
    }
    for (const GroupId group : use.needs) {
      Weights(group).last_use = instruction;
    }
  }

  // Sends away the gradients that a backward was the last to write.
  void EmitReduces(size_t at) {
    const InstructionId backward = program_.instructions.last_id();
    std::vector<GroupId> unfinished = std::move(unfinished_);
    unfinished_.clear();
    for (const GradientId id : model_.uses[at].gradients) {
      if (model_.gradients[id].last_use != at) {
        continue;
      }
      EmitReduce(id, backward);
      // The next gradients' staging goes before the next reduce, so that it need not wait for that.
      for (size_t ahead = at + 1; ahead < std::min(model_.uses.size(), at + 3); ++ahead) {
        if (!request_.options.prefetch || !PrepareStaging(ahead, Must::kNotWait)) {
          break;
        }
      }
    }
    FinishSums(unfinished);
  }

  void EmitReduce(GradientId id, InstructionId backward) {
    const GradientCall& call = model_.gradients[id];
    const GroupMoves& moves = Moves(call.group);
    InstructionId reduced = backward;
    for (const MoveId move : moves.each_lane) {
      reduced = EmitReduce(move, call, reduced);
    }
    if (moves.each_turn.empty()) {
      Instruction sum = OfGroup(OpCode::kAccumulateGrad, StreamId::kReduce, call.group);
      sum.call = call.call;
      if (program_.instructions[reduced].stream != sum.stream) {
        sum.waits = {reduced};
      }
      reduced = Emit(sum);
    }
    for (const MoveId move : moves.each_turn) {
      reduced = EmitReduce(move, call, reduced);
    }
    reduced_at_[id] = reduced;
    EmitFree(Buffer(BufferKind::kStaging, call.group, call.call));
    if (!Updates(program_.phase)) {
      return;
    }
    for (const MoveId move : moves.each_step) {
      reduced = EmitReduce(move, call, reduced);
    }
    if (++summed_[call.group] == GradientCallsOf(model_, call.group)) {
      unfinished_.push_back(call.group);
      if (on_host_.of[call.group] && FinalWhenReduced(call.group)) {
        EmitOffload(call.group);
      }
    }
  }

  InstructionId EmitReduce(MoveId move, const GradientCall& call, InstructionId after) {
    Instruction reduce = Collective(OpCode::kReduce, move, call.group);
    reduce.call = call.call;
    if (program_.instructions[after].stream != reduce.stream) {
      reduce.waits = {after};
    }
    return Emit(reduce);
  }

  // Joins calls and brings whole gradients to where they are needed. One use later than the outer
  // reduces that it waits for, so that the reduce stream need not stand still.
  void FinishSums(const std::vector<GroupId>& groups) {
    const auto emit = [&](Instruction finish) {
      const InstructionId summed = LastOf(finish.group, OpCode::kReduce);
      if (program_.instructions[summed].stream != finish.stream) {
        finish.waits = {summed};
      }
      Emit(std::move(finish));
    };
    for (const GroupId group : groups) {
      if (GradientCallsOf(model_, group) > 1) {
        emit(OfGroup(OpCode::kJoinGradients, StreamId::kReduce, group));
      }
      for (const MoveId move : Moves(group).whole) {
        emit(Collective(OpCode::kGather, move, group));
      }
      if (on_host_.of[group] && !FinalWhenReduced(group)) {
        EmitOffload(group);
      }
    }
  }
  void FinishSums() {
    FinishSums(unfinished_);
    unfinished_.clear();
  }

  // True if nothing follows a gradient's reduces: it goes to the host at once.
  bool FinalWhenReduced(GroupId group) const {
    return GradientCallsOf(model_, group) == 1 && Moves(group).whole.empty();
  }
  void EmitOffload(GroupId group) {
    Instruction offload = OfGroup(OpCode::kOffloadGradient, StreamId::kDownload, group);
    offload.waits = {LastOf(group)};
    Emit(offload);
  }

  // The instruction of a group that was emitted last, of an op or of any.
  InstructionId LastOf(GroupId group, std::optional<OpCode> op = std::nullopt) const {
    for (InstructionId at = program_.instructions.last_id(); at >= 0; --at) {
      const Instruction& instruction = program_.instructions[at];
      if (instruction.group == group && (!op.has_value() || instruction.op == *op)) {
        return at;
      }
    }
    CheckFailed(__FILE__, __LINE__, "instruction", "a group without one");
  }

  void FreeAll() {
    for (const GroupId id : weights_.ids()) {
      if (!weights_[id].live || weights_[id].resident) {
        continue;
      }
      const bool stays =
          hands_over_ && (!at_end_.has_value() ||
                          std::find(at_end_->begin(), at_end_->end(), id) != at_end_->end());
      if (stays) {
        program_.live_at_end.push_back(Buffer(BufferKind::kGathered, id));
      } else {
        EmitFree(Buffer(BufferKind::kGathered, id));
      }
    }
    std::sort(program_.live_at_end.begin(), program_.live_at_end.end());
  }

  void EmitUpdate() {
    const MoveId of_all = request_.moves.statistics;
    Instruction stats = {.op = OpCode::kStatsReduce, .stream = request_.moves.moves[of_all].stream};
    stats.move = of_all;
    for (const StreamId stream : {StreamId::kOuter, StreamId::kCompute}) {
      const InstructionId last = last_on_stream_[StreamIndex(stream)];
      if (last >= 0) {
        stats.waits.push_back(last);
      }
    }
    Emit(stats);
    const InstructionId decide = Emit({.op = OpCode::kDecideStep, .stream = StreamId::kReduce});
    const auto update = [&](GroupId group, StreamId stream) {
      Instruction step = OfGroup(OpCode::kOptimizerStep, stream, group);
      step.waits = {decide};
      if (on_host_.of[group]) {
        step.waits.push_back(LastOf(group, OpCode::kOffloadGradient));
      }
      Emit(step);
    };
    for (const GroupId group : weights_.ids()) {
      if (request_.groups[group].trainable && !on_host_.of[group]) {
        update(group, StreamId::kCompute);
      }
    }
    for (const GroupId group : on_host_.order) {
      update(group, StreamId::kUpload);
    }
    EmitRefresh();
  }

  void EmitRefresh() {
    if (request_.moves.amax < 0) {
      return;
    }
    Instruction amax = {.op = OpCode::kAmaxReduce, .stream = StreamId::kReduce};
    amax.move = request_.moves.amax;
    for (const StreamId stream : {StreamId::kCompute, StreamId::kUpload}) {
      const InstructionId last = last_on_stream_[StreamIndex(stream)];
      if (last >= 0) {
        amax.waits.push_back(last);
      }
    }
    const InstructionId reduced = Emit(amax);
    for (const GroupId group : weights_.ids()) {
      if (request_.groups[group].recipe != Recipe::kNone) {
        const StreamId stream = on_host_.of[group] ? StreamId::kUpload : StreamId::kCompute;
        Instruction refresh = OfGroup(OpCode::kRefreshWeights, stream, group);
        refresh.waits = {reduced};
        Emit(refresh);
      }
    }
  }

  void EmitEnd() {
    Instruction end = {.op = OpCode::kEndPhase, .stream = StreamId::kHost};
    for (const InstructionId last : last_on_stream_) {
      if (last >= 0) {
        end.waits.push_back(last);
      }
    }
    Emit(end);
  }

  const ProgramRequest& request_;
  const BufferIndex& index_;
  const HostUpdates& on_host_;
  const ModelUses model_;
  bool hands_over_ = false;
  std::optional<std::vector<GroupId>> at_end_;
  IdVector<GroupId, GroupWeights> weights_;
  IdVector<GradientId, InstructionId> allocated_at_;
  IdVector<GradientId, InstructionId> reduced_at_;  // what ends its staging
  IdVector<GroupId, int> summed_;                   // calls
  std::vector<GradientId> staged_;   // in order of allocation, until their room is needed
  std::vector<GroupId> unfinished_;  // whose sums wait for their last steps
  std::array<InstructionId, kStreamCount> last_on_stream_;
  StepProgram program_;
};

std::vector<StepProgram> BuildKinds(const ProgramRequest& request,
                                    const BufferIndex& index,
                                    const HostUpdates& on_host,
                                    const std::vector<ProgramKind>& kinds,
                                    const std::optional<std::vector<GroupId>>& kept) {
  std::vector<StepProgram> programs;
  programs.reserve(kinds.size());
  for (const ProgramKind& kind : kinds) {
    const HandOver hand_over = {
        .at_start = TakesOver(kind) && kept.has_value() ? *kept : std::vector<GroupId>(),
        .at_end = kept};
    programs.push_back(Builder(request, index, on_host, kind, hand_over).Build());
  }
  return programs;
}

}  // namespace

std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const ProgramBuffers& buffers) {
  const BufferIndex index(buffers);
  const HostUpdates on_host = HostUpdatesOf(buffers, request.groups, request.options);
  std::vector<ProgramKind> kinds;
  for (int64_t at = 0; at < request.lanes.programs(); ++at) {
    const StepSlot slot = SlotOf(request.lanes, at);
    const ProgramKind kind = {.phase = slot.phase, .part = slot.part};
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  kinds.push_back({.phase = Phase::kEval, .part = LanePart::kWhole});
  // What stays gathered from one program to the next must be the same everywhere. It only shrinks,
  // so this ends.
  std::optional<std::vector<GroupId>> kept;
  while (true) {
    std::vector<StepProgram> programs = BuildKinds(request, index, on_host, kinds, kept);
    std::vector<GroupId> common = CommonAtEnd(buffers, programs, kinds);
    if (kept.has_value() && common == *kept) {
      return programs;
    }
    kept = std::move(common);
  }
}

}  // namespace ravel::plan
