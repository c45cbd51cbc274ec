#include "common/plan/program_builder.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/plan/buffer_index.h"
#include "common/plan/program_operands.h"
#include "common/plan/program_order.h"
#include "common/plan/program_uses.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

bool Updates(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kLast;
}
// What stays gathered, or is cut among replicas, is renewed where the optimizer may have run since
// the program before.
bool RenewsWeights(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kFirst || phase == Phase::kEval;
}

struct ProgramKind {
  Phase phase = Phase::kOnly;
  LanePart part = LanePart::kWhole;
  bool operator==(const ProgramKind&) const = default;
};

// Whether another program of the same step follows, or comes before.
bool HandsOver(const ProgramKind& kind) {
  return kind.phase == Phase::kFirst || kind.phase == Phase::kMiddle;
}
bool TakesOver(const ProgramKind& kind) {
  return kind.phase == Phase::kLast || kind.phase == Phase::kMiddle;
}

// Groups that stay gathered between the programs of a step. Without `at_end`: whatever is left.
struct HandOver {
  std::vector<int> at_start;
  std::optional<std::vector<int>> at_end;
};

// Emits one program. Weights: a cache of gathered groups that evicts the one needed last (Belady);
// what an eviction frees is reused only after the evicted group's last use, by an explicit wait.
// Gradients: the same on the reduce stream.
class Builder {
 public:
  Builder(const ProgramRequest& request,
          const BufferIndex& index,
          const ProgramKind& kind,
          const HandOver& hand_over)
      : request_(request),
        index_(index),
        model_(UsesOf(request.inventory, request.groups, kind.phase != Phase::kEval)),
        weights_(request.groups.size()),
        allocated_at_(model_.gradients.size(), -1),
        reduced_at_(model_.gradients.size(), -1),
        summed_(request.groups.size(), 0) {
    program_.phase = kind.phase;
    program_.part = kind.part;
    last_on_stream_.fill(-1);
    hands_over_ = HandsOver(kind);
    at_end_ = hand_over.at_end;
    for (size_t use = 0; use < model_.uses.size(); ++use) {
      for (const int group : model_.uses[use].needs) {
        Weights(group).uses.push_back(static_cast<int>(use));
      }
    }
    for (size_t group = 0; group < weights_.size(); ++group) {
      weights_[group].resident = IsResident(request, static_cast<int>(group));
    }
    for (const int group : hand_over.at_start) {
      Weights(group).live = true;
      program_.live_at_start.push_back(Buffer(BufferKind::kGathered, group));
    }
    std::sort(program_.live_at_start.begin(), program_.live_at_start.end());
  }

  StepProgram Build() {
    EmitOuterGathers();
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
                 .rules = request_.rules,
                 .lanes = request_.lanes,
                 .options = request_.options,
                 .index = index_,
                 .model = model_,
                 .part = program_.part},
                program_);
    DropImpliedWaits(program_);
    return std::move(program_);
  }

 private:
  struct GroupWeights {
    bool resident = false;
    bool live = false;  // the gather of a resident group has been emitted
    int gather = -1;    // instruction
    int renewed = -1;   // instruction: outer gather
    int last_use = -1;  // instruction
    std::vector<int> uses;
  };
  enum class Must { kFit, kNotWait };

  int Emit(Instruction instruction) {
    program_.instructions.push_back(std::move(instruction));
    const int at = static_cast<int>(program_.instructions.size()) - 1;
    last_on_stream_[StreamIndex(program_.instructions.back().stream)] = at;
    return at;
  }
  Instruction OfGroup(OpCode op, StreamId stream, int group) const {
    return {.op = op,
            .stream = stream,
            .unit = request_.groups[static_cast<size_t>(group)].unit,
            .group = group};
  }
  void EmitFree(int buffer) {
    Instruction free = {.op = OpCode::kFree, .stream = StreamId::kHost};
    free.freed = buffer;
    Emit(free);
  }

  const GroupRules& Rules(int group) const { return request_.rules[static_cast<size_t>(group)]; }
  int64_t Elements(int group) const {
    return request_.groups[static_cast<size_t>(group)].layout.total_elements();
  }
  int64_t GatheredBytes(int group) const {
    return Elements(group) * DTypeBytes(request_.options.weight_type);
  }
  int64_t StagedBytes(int group) const { return Elements(group) * kGradientElementBytes; }
  GroupWeights& Weights(int group) { return weights_[static_cast<size_t>(group)]; }
  int Buffer(BufferKind kind, int owner, int call = 0) const {
    return index_.Find({.kind = kind, .owner = owner, .call = call});
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
  int NextUse(int group, size_t from) const {
    const std::vector<int>& uses = weights_[static_cast<size_t>(group)].uses;
    const auto next = std::lower_bound(uses.begin(), uses.end(), static_cast<int>(from));
    if (next != uses.end()) {
      return *next;
    }
    return hands_over_ && !uses.empty() ? static_cast<int>(model_.uses.size()) + uses.front()
                                        : kNever;
  }

  void EmitOuterGathers() {
    if (!RenewsWeights(program_.phase)) {
      return;
    }
    for (size_t group = 0; group < weights_.size(); ++group) {
      if (request_.rules[group].outer_gradient_sharded) {
        weights_[group].renewed =
            Emit(OfGroup(OpCode::kOuterGather, StreamId::kOuter, static_cast<int>(group)));
      }
    }
  }

  // Gathers what this use needs, then what later uses need as far as the window reaches.
  void PrepareWeights(size_t use) {
    const std::vector<UnitUse>& uses = model_.uses;
    const size_t next = std::min(uses.size(), use + (request_.options.prefetch ? 2 : 1));
    for (size_t ahead = use; ahead < next; ++ahead) {
      for (const int group : uses[ahead].needs) {
        const bool renews = RenewsWeights(program_.phase) && Rules(group).optimizer_sharded;
        if (Weights(group).resident && renews && !Weights(group).live) {
          EmitGather(group, {});
        }
      }
    }
    const size_t end = request_.options.prefetch ? uses.size() : use + 1;
    for (size_t ahead = use; ahead < end; ++ahead) {
      for (const int group : uses[ahead].needs) {
        const GroupWeights& weights = Weights(group);
        if (!weights.resident && !weights.live && !GatherWithin(group, use, ahead)) {
          return;
        }
      }
    }
  }

  // Gathers a group for use `ahead`, evicting groups that are needed later than that. False: no
  // room yet.
  bool GatherWithin(int group, size_t use, size_t ahead) {
    const int64_t cap = request_.options.gather_window_bytes;
    int64_t live = GatheredBytes(group);
    std::vector<std::pair<int, int>> candidates;  // (next use, group)
    for (size_t other = 0; other < weights_.size(); ++other) {
      if (weights_[other].live && !weights_[other].resident) {
        live += GatheredBytes(static_cast<int>(other));
        const int next = NextUse(static_cast<int>(other), use);
        if (next > static_cast<int>(ahead)) {
          candidates.emplace_back(next, static_cast<int>(other));
        }
      }
    }
    // Needed last first; of those never needed again, the one that has been idle longest.
    std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first
                                : Weights(a.second).last_use < Weights(b.second).last_use;
    });
    std::vector<int> evicted;
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

  void EmitGather(int group, const std::vector<int>& evicted) {
    Instruction gather = OfGroup(OpCode::kGather, StreamId::kGather, group);
    for (const int other : evicted) {
      EmitFree(Buffer(BufferKind::kGathered, other));
      GroupWeights& out = Weights(other);
      const int last = std::max(out.last_use, out.gather);
      if (last >= 0) {  // else it is of a program before and was not used in this one
        gather.waits.push_back(last);
      }
      out.live = false;
      out.gather = -1;
      out.last_use = -1;
    }
    GroupWeights& weights = Weights(group);
    if (weights.renewed >= 0) {
      gather.waits.push_back(weights.renewed);
    }
    weights.live = true;
    weights.gather = Emit(gather);
    weights.last_use = -1;
  }

  // Opens the staging of the gradients that a use is the first to write. Room comes from gradients
  // that are already reduced; the allocation is on the reduce stream, after those reduces.
  // False: no room without waiting for a reduce that is not issued yet.
  bool PrepareStaging(size_t use, Must must) {
    if (!Opens()) {
      return true;
    }
    for (const int id : model_.uses[use].gradients) {
      const GradientCall& call = model_.gradients[static_cast<size_t>(id)];
      if (allocated_at_[static_cast<size_t>(id)] >= 0) {
        continue;
      }
      Instruction alloc = OfGroup(OpCode::kAllocStaging, StreamId::kReduce, call.group);
      alloc.call = call.call;
      if (!StagingStays() && !MakeRoom(call, must, alloc.waits)) {
        return false;
      }
      staged_.push_back(id);
      allocated_at_[static_cast<size_t>(id)] = Emit(alloc);
    }
    return true;
  }

  // Retires reduced gradients, oldest first, until another one fits.
  bool MakeRoom(const GradientCall& call, Must must, std::vector<int>& waits) {
    int64_t live = StagedBytes(call.group);
    for (const int staged : staged_) {
      live += StagedBytes(model_.gradients[static_cast<size_t>(staged)].group);
    }
    std::vector<int> stay;
    std::vector<int> reduces;
    for (const int staged : staged_) {
      const auto id = static_cast<size_t>(staged);
      if (live > request_.options.staging_window_bytes && reduced_at_[id] >= 0) {
        live -= StagedBytes(model_.gradients[id].group);
        reduces.push_back(reduced_at_[id]);
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

  Instruction ComputeOf(const UnitUse& use) {
    Instruction run = {
        .op = use.op, .stream = StreamId::kCompute, .unit = use.unit, .call = use.call};
    for (const int group : use.needs) {
      if (Weights(group).gather >= 0) {
        run.waits.push_back(Weights(group).gather);
      }
    }
    return run;
  }

  void EmitUse(size_t at) {
    const UnitUse& use = model_.uses[at];
    if (use.remakes) {
      Instruction remake = ComputeOf(use);
      remake.op = OpCode::kRecompute;
      Emit(remake);
    }
    Instruction run = ComputeOf(use);
    for (const int id : use.gradients) {
      if (allocated_at_[static_cast<size_t>(id)] >= 0) {
        run.waits.push_back(allocated_at_[static_cast<size_t>(id)]);
      }
    }
    const int instruction = Emit(run);
    for (const int group : use.needs) {
      Weights(group).last_use = instruction;
    }
  }

  // Sends away the gradients that a backward was the last to write.
  void EmitReduces(size_t at) {
    const int backward = static_cast<int>(program_.instructions.size()) - 1;
    std::vector<int> unfinished = std::move(unfinished_);
    unfinished_.clear();
    for (const int id : model_.uses[at].gradients) {
      if (model_.gradients[static_cast<size_t>(id)].last_use != at) {
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

  void EmitReduce(int id, int backward) {
    const GradientCall& call = model_.gradients[static_cast<size_t>(id)];
    const bool local = !Rules(call.group).reduces_each_turn;
    Instruction leave = OfGroup(
        local ? OpCode::kAccumulateGrad : OpCode::kReduceScatter, StreamId::kReduce, call.group);
    leave.call = call.call;
    leave.waits = {backward};
    int reduced = Emit(leave);
    reduced_at_[static_cast<size_t>(id)] = reduced;
    EmitFree(Buffer(BufferKind::kStaging, call.group, call.call));
    if (!Updates(program_.phase)) {
      return;
    }
    if (local) {
      Instruction reduce = leave;
      reduce.op = OpCode::kReduceScatter;
      reduce.waits.clear();
      reduced = Emit(reduce);
    }
    if (request_.lanes.replicas > 1) {
      Instruction outer = OfGroup(OpCode::kOuterReduce, StreamId::kOuter, call.group);
      outer.call = call.call;
      outer.waits = {reduced};
      Emit(outer);
    }
    if (++summed_[static_cast<size_t>(call.group)] == GradientCallsOf(model_, call.group)) {
      unfinished_.push_back(call.group);
    }
  }

  // Joins calls and brings whole gradients to where they are needed. One use later than the outer
  // reduces that it waits for, so that the reduce stream need not stand still.
  void FinishSums(const std::vector<int>& groups) {
    const int outer = last_on_stream_[StreamIndex(StreamId::kOuter)];
    const auto emit = [&](OpCode op, int group) {
      Instruction finish = OfGroup(op, StreamId::kReduce, group);
      if (request_.lanes.replicas > 1) {
        finish.waits = {LastOuterOf(group, outer)};
      }
      Emit(finish);
    };
    for (const int group : groups) {
      if (GradientCallsOf(model_, group) > 1) {
        emit(OpCode::kJoinGradients, group);
      }
      if (!Rules(group).gradient_sharded) {
        emit(OpCode::kGatherGradient, group);
      }
    }
  }
  void FinishSums() {
    FinishSums(unfinished_);
    unfinished_.clear();
  }

  // The last outer reduce of the group, at or before `from`.
  int LastOuterOf(int group, int from) const {
    for (int at = from; at >= 0; --at) {
      const Instruction& instruction = program_.instructions[static_cast<size_t>(at)];
      if (instruction.op == OpCode::kOuterReduce && instruction.group == group) {
        return at;
      }
    }
    CHECK_MSG(false, "a group without an outer reduce");
    return -1;
  }

  void FreeAll() {
    for (size_t group = 0; group < weights_.size(); ++group) {
      const int id = static_cast<int>(group);
      if (!weights_[group].live || weights_[group].resident) {
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
    Instruction stats = {.op = OpCode::kStatsReduce, .stream = StreamId::kReduce};
    for (const StreamId stream : {StreamId::kOuter, StreamId::kCompute}) {
      const int last = last_on_stream_[StreamIndex(stream)];
      if (last >= 0) {
        stats.waits.push_back(last);
      }
    }
    Emit(stats);
    const int decide = Emit({.op = OpCode::kDecideStep, .stream = StreamId::kReduce});
    for (size_t group = 0; group < weights_.size(); ++group) {
      if (request_.rules[group].trainable) {
        Instruction step =
            OfGroup(OpCode::kOptimizerStep, StreamId::kCompute, static_cast<int>(group));
        step.waits = {decide};
        Emit(step);
      }
    }
  }

  void EmitEnd() {
    Instruction end = {.op = OpCode::kEndPhase, .stream = StreamId::kHost};
    for (const int last : last_on_stream_) {
      if (last >= 0) {
        end.waits.push_back(last);
      }
    }
    Emit(end);
  }

  const ProgramRequest& request_;
  const BufferIndex& index_;
  const ModelUses model_;
  bool hands_over_ = false;
  std::optional<std::vector<int>> at_end_;
  std::vector<GroupWeights> weights_;
  std::vector<int> allocated_at_;  // per gradient: instruction, or -1
  std::vector<int> reduced_at_;    // per gradient: what ends its staging
  std::vector<int> summed_;        // per group: calls
  std::vector<int> staged_;        // gradients in order of allocation, until their room is needed
  std::vector<int> unfinished_;    // groups whose sums wait for their last steps
  std::array<int, kStreamCount> last_on_stream_;
  StepProgram program_;
};

std::vector<StepProgram> BuildKinds(const ProgramRequest& request,
                                    const BufferIndex& index,
                                    const std::vector<ProgramKind>& kinds,
                                    const std::optional<std::vector<int>>& kept) {
  std::vector<StepProgram> programs;
  programs.reserve(kinds.size());
  for (const ProgramKind& kind : kinds) {
    const HandOver hand_over = {
        .at_start = TakesOver(kind) && kept.has_value() ? *kept : std::vector<int>(),
        .at_end = kept};
    programs.push_back(Builder(request, index, kind, hand_over).Build());
  }
  return programs;
}

// The groups that all programs which are followed by another one leave gathered, ascending.
std::vector<int> CommonAtEnd(const std::vector<ProgramBuffer>& buffers,
                             const std::vector<StepProgram>& programs,
                             const std::vector<ProgramKind>& kinds) {
  std::vector<int> common;
  bool first = true;
  for (size_t i = 0; i < programs.size(); ++i) {
    if (!HandsOver(kinds[i])) {
      continue;
    }
    std::vector<int> left;
    for (const int buffer : programs[i].live_at_end) {
      const int group = buffers[static_cast<size_t>(buffer)].group;
      if (first || std::binary_search(common.begin(), common.end(), group)) {
        left.push_back(group);
      }
    }
    std::sort(left.begin(), left.end());
    common = std::move(left);
    first = false;
  }
  return common;
}

}  // namespace

std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const std::vector<ProgramBuffer>& buffers) {
  const BufferIndex index(buffers);
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
  std::optional<std::vector<int>> kept;
  while (true) {
    std::vector<StepProgram> programs = BuildKinds(request, index, kinds, kept);
    std::vector<int> common = CommonAtEnd(buffers, programs, kinds);
    if (kept.has_value() && common == *kept) {
      return programs;
    }
    kept = std::move(common);
  }
}

}  // namespace ravel::plan
