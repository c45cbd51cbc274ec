#include "common/plan/program_builder.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "common/check.h"
#include "common/plan/program_order.h"

namespace ravel::plan {
namespace {

constexpr int64_t kElementBytes = 4;  // everything is fp32 in this recipe
constexpr int kNever = std::numeric_limits<int>::max();

int64_t GatheredBytes(const GroupLayout& group) {
  return group.layout.total_elements() * kElementBytes;
}

bool Trains(Phase phase) {
  return phase != Phase::kEval;
}
bool Updates(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kLast;
}
// In-place gathers are needed where the weights may have changed since the program before.
bool GathersInPlace(Phase phase) {
  return phase != Phase::kMiddle && phase != Phase::kLast;
}

// Emits one program. Weights: a cache of gathered units that evicts the one needed last (Belady);
// what an eviction frees is reused only after the evicted unit's last use, by an explicit wait.
// Gradients: the same on the reduce stream.
class Builder {
 public:
  Builder(const ProgramRequest& request, const std::vector<ProgramBuffer>& buffers, Phase phase)
      : request_(request),
        index_(buffers),
        uses_(UsesOf(request.inventory, phase)),
        calls_(GradientCallsOf(request.inventory, uses_)),
        weights_(request.inventory.units.size()) {
    program_.phase = phase;
  }

  StepProgram Build() {
    for (size_t use = 0; use < uses_.size(); ++use) {
      PrepareWeights(use);
      PrepareStaging(use, Must::kFit);
      if (request_.options.prefetch && use + 1 < uses_.size() &&
          uses_[use].op == OpCode::kBackward) {
        PrepareStaging(use + 1, Must::kNotWait);
      }
      EmitUse(use);
      if (uses_[use].op == OpCode::kBackward) {
        EmitReduces(use);
      }
    }
    FreeAll();
    if (Updates(program_.phase)) {
      EmitUpdate();
    }
    EmitEnd();
    DropImpliedWaits(program_);
    return std::move(program_);
  }

 private:
  struct GatheredUnit {
    bool live = false;
    int gather = -1;    // instruction
    int last_use = -1;  // instruction
  };
  struct StagedGradient {
    GradientCall call;
    int reduce = -1;  // instruction, once emitted
  };
  enum class Must { kFit, kNotWait };

  int Emit(Instruction instruction) {
    program_.instructions.push_back(std::move(instruction));
    const int at = static_cast<int>(program_.instructions.size()) - 1;
    last_on_stream_[static_cast<size_t>(program_.instructions.back().stream) - 1] = at;
    return at;
  }

  int64_t UnitBytes(int unit) const {
    return GatheredBytes(request_.groups[static_cast<size_t>(unit)]);
  }
  GatheredUnit& Weights(int unit) { return weights_[static_cast<size_t>(unit)]; }
  int Buffer(BufferKind kind, int unit, int call = 0) const {
    return index_.Find({.kind = kind, .unit = unit, .call = call, .slot = 0});
  }
  void EmitFree(int buffer) {
    Instruction free = {.op = OpCode::kFree, .stream = StreamId::kHost};
    free.freed = buffer;
    Emit(free);
  }

  // The first use at or after `from` that needs the unit's weights.
  int NextUse(int unit, size_t from) const {
    for (size_t use = from; use < uses_.size(); ++use) {
      const std::vector<int>& needs = uses_[use].needs;
      if (std::find(needs.begin(), needs.end(), unit) != needs.end()) {
        return static_cast<int>(use);
      }
    }
    return kNever;
  }

  // Gathers what this use needs, then what later uses need as far as the window reaches.
  void PrepareWeights(size_t use) {
    if (request_.options.gather_in_place) {
      if (GathersInPlace(program_.phase)) {
        const size_t end = std::min(uses_.size(), use + (request_.options.prefetch ? 2 : 1));
        for (size_t ahead = use; ahead < end; ++ahead) {
          for (const int unit : uses_[ahead].needs) {
            if (!Weights(unit).live) {
              EmitGather(unit, {});
            }
          }
        }
      }
      return;
    }
    for (size_t ahead = use; ahead < uses_.size(); ++ahead) {
      for (const int unit : uses_[ahead].needs) {
        if (!Weights(unit).live && !GatherWithin(unit, use, ahead)) {
          return;
        }
      }
      if (!request_.options.prefetch) {
        return;
      }
    }
  }

  // Gathers a unit for use `ahead`, evicting units that are needed later than that. False: no room
  // yet.
  bool GatherWithin(int unit, size_t use, size_t ahead) {
    const int64_t cap = request_.options.gather_window_bytes;
    int64_t live = UnitBytes(unit);
    std::vector<std::pair<int, int>> candidates;  // (next use, unit)
    for (size_t other = 0; other < weights_.size(); ++other) {
      if (weights_[other].live) {
        live += UnitBytes(static_cast<int>(other));
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
      live -= UnitBytes(other);
      evicted.push_back(other);
    }
    if (live > cap && ahead != use) {
      return false;
    }
    // Keep whatever turned out not to be in the way.
    for (size_t i = 0; i < evicted.size();) {
      if (live + UnitBytes(evicted[i]) <= cap) {
        live += UnitBytes(evicted[i]);
        evicted.erase(evicted.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    EmitGather(unit, evicted);
    return true;
  }

  void EmitGather(int unit, const std::vector<int>& evicted) {
    Instruction gather = {.op = OpCode::kGather, .stream = StreamId::kGather, .unit = unit};
    gather.gathered = Buffer(BufferKind::kGathered, unit);
    for (const int other : evicted) {
      EmitFree(Buffer(BufferKind::kGathered, other));
      gather.waits.push_back(Weights(other).last_use >= 0 ? Weights(other).last_use
                                                          : Weights(other).gather);
      Weights(other) = {};
    }
    Weights(unit) = {.live = true, .gather = Emit(gather), .last_use = -1};
  }

  // Opens the staging of the gradients of a use. Room comes from gradients that are already
  // reduced; the allocation is on the reduce stream, after those reduces.
  // False: no room without waiting for a reduce that is not issued yet.
  bool PrepareStaging(size_t use, Must must) {
    for (const GradientCall& call : calls_[use]) {
      if (allocated_at_.count({call.unit, call.call}) > 0) {
        continue;
      }
      int64_t live = UnitBytes(call.unit);
      for (const StagedGradient& staged : staged_) {
        live += UnitBytes(staged.call.unit);
      }
      size_t retired = 0;  // oldest first
      while (live > request_.options.staging_window_bytes && retired < staged_.size() &&
             staged_[retired].reduce >= 0) {
        live -= UnitBytes(staged_[retired].call.unit);
        ++retired;
      }
      if (live > request_.options.staging_window_bytes && must == Must::kNotWait) {
        return false;
      }
      Instruction alloc = {
          .op = OpCode::kAllocStaging, .stream = StreamId::kReduce, .unit = call.unit};
      alloc.call = call.call;
      alloc.staging = Buffer(BufferKind::kStaging, call.unit, call.call);
      for (size_t i = 0; i < retired; ++i) {
        alloc.waits.push_back(staged_[i].reduce);
      }
      staged_.erase(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(retired));
      staged_.push_back({.call = call, .reduce = -1});
      allocated_at_[{call.unit, call.call}] = Emit(alloc);
    }
    return true;
  }

  void EmitUse(size_t at) {
    const UnitUse& use = uses_[at];
    Instruction run = {.op = use.op, .stream = StreamId::kCompute, .unit = use.unit};
    run.gathered = Buffer(BufferKind::kGathered, use.unit);
    run.saved = Buffer(BufferKind::kSaved, use.unit);
    run.workspace = Buffer(BufferKind::kWorkspace, use.unit);
    for (const int unit : use.needs) {
      if (Weights(unit).gather >= 0) {
        run.waits.push_back(Weights(unit).gather);
      }
      if (unit != use.unit) {
        run.borrowed_unit = unit;
        run.borrowed_gathered = Buffer(BufferKind::kGathered, unit);
      }
    }
    for (const GradientCall& call : calls_[at]) {
      run.waits.push_back(allocated_at_.at({call.unit, call.call}));
      const int staging = Buffer(BufferKind::kStaging, call.unit, call.call);
      if (call.unit == use.unit) {
        run.call = call.call;
        run.staging = staging;
      } else {
        run.borrowed_staging = staging;
      }
    }
    const int instruction = Emit(run);
    for (const int unit : use.needs) {
      Weights(unit).last_use = instruction;
    }
  }

  void EmitReduces(size_t at) {
    const int backward = static_cast<int>(program_.instructions.size()) - 1;
    std::vector<int> freed;
    for (const GradientCall& call : calls_[at]) {
      Instruction reduce = {
          .op = OpCode::kReduceScatter, .stream = StreamId::kReduce, .unit = call.unit};
      reduce.call = call.call;
      reduce.staging = Buffer(BufferKind::kStaging, call.unit, call.call);
      reduce.receive = Buffer(BufferKind::kReceive, call.unit, call.call);
      reduce.waits = {backward};
      const int instruction = Emit(reduce);
      for (StagedGradient& staged : staged_) {
        if (staged.call.unit == call.unit && staged.call.call == call.call) {
          staged.reduce = instruction;
        }
      }
      EmitFree(reduce.staging);
      // The next gradients' staging goes before the next reduce, so that it need not wait for that.
      for (size_t ahead = at + 1; ahead < std::min(uses_.size(), at + 3); ++ahead) {
        if (!request_.options.prefetch || !PrepareStaging(ahead, Must::kNotWait)) {
          break;
        }
      }
    }
  }

  void FreeAll() {
    if (request_.options.gather_in_place) {
      return;
    }
    for (size_t unit = 0; unit < weights_.size(); ++unit) {
      if (weights_[unit].live) {
        EmitFree(Buffer(BufferKind::kGathered, static_cast<int>(unit)));
      }
    }
  }

  void EmitUpdate() {
    Emit({.op = OpCode::kStatsReduce, .stream = StreamId::kReduce});
    const int decide = Emit({.op = OpCode::kDecideStep, .stream = StreamId::kReduce});
    for (size_t unit = 0; unit < weights_.size(); ++unit) {
      Instruction step = {.op = OpCode::kOptimizerStep,
                          .stream = StreamId::kCompute,
                          .unit = static_cast<int>(unit)};
      step.waits = {decide};
      Emit(step);
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
  const BufferIndex index_;
  const std::vector<UnitUse> uses_;
  const std::vector<std::vector<GradientCall>> calls_;
  std::vector<GatheredUnit> weights_;
  std::vector<StagedGradient>
      staged_;  // in order of allocation; reduced ones stay until their room is needed
  std::map<std::pair<int, int>, int> allocated_at_;
  std::array<int, HappensBefore::kStreams> last_on_stream_ = {-1, -1, -1, -1};
  StepProgram program_;
};

}  // namespace

std::vector<UnitUse> UsesOf(const ModelInventory& inventory, Phase phase) {
  std::vector<UnitUse> uses;
  for (size_t unit = 0; unit < inventory.units.size(); ++unit) {
    UnitUse use = {.op = OpCode::kForward, .unit = static_cast<int>(unit), .needs = {}};
    use.needs.push_back(use.unit);
    for (const int tensor : inventory.units[unit].borrowed) {
      const int owner = inventory.tensors[static_cast<size_t>(tensor)].unit;
      if (std::find(use.needs.begin(), use.needs.end(), owner) == use.needs.end()) {
        use.needs.push_back(owner);
      }
    }
    CHECK_MSG(use.needs.size() <= 2, "a unit borrows from at most one other");
    uses.push_back(std::move(use));
  }
  if (Trains(phase)) {
    for (size_t unit = inventory.units.size(); unit-- > 0;) {
      uses.push_back(uses[unit]);
      uses.back().op = OpCode::kBackward;
    }
  }
  return uses;
}

std::vector<std::vector<GradientCall>> GradientCallsOf(const ModelInventory& inventory,
                                                       const std::vector<UnitUse>& uses) {
  std::vector<std::vector<GradientCall>> calls(uses.size());
  std::vector<int> count(inventory.units.size(), 0);
  for (size_t use = 0; use < uses.size(); ++use) {
    if (uses[use].op == OpCode::kBackward) {
      for (const int unit : uses[use].needs) {
        calls[use].push_back({.unit = unit, .call = count[static_cast<size_t>(unit)]++});
      }
    }
  }
  return calls;
}

ProgramOptions ResolveWindows(const ProgramRequest& request) {
  ProgramOptions options = request.options;
  const std::vector<UnitUse> uses = UsesOf(request.inventory, Phase::kOnly);
  const std::vector<std::vector<GradientCall>> calls = GradientCallsOf(request.inventory, uses);
  int64_t gather_bytes = 0;
  int64_t staging_bytes = 0;
  for (size_t use = 0; use < uses.size(); ++use) {
    std::set<int> units(uses[use].needs.begin(), uses[use].needs.end());
    std::vector<GradientCall> staged = calls[use];
    if (use + 1 < uses.size()) {
      units.insert(uses[use + 1].needs.begin(), uses[use + 1].needs.end());
      staged.insert(staged.end(), calls[use + 1].begin(), calls[use + 1].end());
    }
    int64_t gathered = 0;
    for (const int unit : units) {
      gathered += GatheredBytes(request.groups[static_cast<size_t>(unit)]);
    }
    int64_t stage = 0;
    for (const GradientCall& call : staged) {
      stage += GatheredBytes(request.groups[static_cast<size_t>(call.unit)]);
    }
    gather_bytes = std::max(gather_bytes, gathered);
    staging_bytes = std::max(staging_bytes, stage);
  }
  if (options.gather_window_bytes == 0) {
    options.gather_window_bytes = gather_bytes;
  }
  if (options.staging_window_bytes == 0) {
    options.staging_window_bytes = staging_bytes;
  }
  return options;
}

std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const std::vector<ProgramBuffer>& buffers) {
  std::vector<Phase> phases;
  if (request.lanes.turns() == 1) {
    phases = {Phase::kOnly};
  } else if (request.lanes.turns() == 2) {
    phases = {Phase::kFirst, Phase::kLast};
  } else {
    phases = {Phase::kFirst, Phase::kMiddle, Phase::kLast};
  }
  phases.push_back(Phase::kEval);
  std::vector<StepProgram> programs;
  for (const Phase phase : phases) {
    programs.push_back(Builder(request, buffers, phase).Build());
  }
  return programs;
}

}  // namespace ravel::plan
