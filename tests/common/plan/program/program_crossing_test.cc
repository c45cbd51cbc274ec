// Programs one after another on streams that nobody drains: the derived waits order all that must
// be ordered, none of them can be left out, and gathers run beside computation where programs meet.

#include "common/plan/program/program_crossing.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/plan/program/program_order.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

struct CrossingCase {
  Strategy strategy = Strategy::kOptimGradsParams;
  Strategy replicate = Strategy::kNoShard;
  int64_t replicas = 1;
  int64_t ranks = 2;
  int64_t lanes = 2;
  int64_t micro_batches = 1;
  RecomputePolicy recompute = RecomputePolicy::kNone;
  bool shared_memory = false;
  bool tied = false;
  int64_t gather_window_bytes = 0;
  // bf16 weights over fp32 main weights, and a bf16 wire.
  bool narrow = false;
  std::vector<std::string> freeze = {};
  std::vector<UnitStrategy> units = {};
  bool layers_twice = false;

  std::string name() const {
    return absl::StrCat("strategy ",
                        static_cast<int>(strategy),
                        ", replicas ",
                        replicas,
                        ", ",
                        ranks,
                        " ranks, ",
                        lanes,
                        " lanes, ",
                        micro_batches,
                        " micro-batches, ",
                        recompute == RecomputePolicy::kNone ? "" : "recompute, ",
                        shared_memory ? "in place, " : "",
                        tied ? "tied, " : "",
                        narrow ? "bf16, " : "",
                        freeze.empty() ? "" : "frozen parts, ",
                        units.empty() ? "" : "strategies by unit, ",
                        layers_twice ? "layers twice" : "");
  }
};

ShardingPlan PlanOf(const CrossingCase& tested) {
  ModelConfig config = testing::Llama(64, 3, 96, 257);
  config.tie_word_embeddings = tested.tied;
  config.layer_sharing = tested.layers_twice;
  JobSpec spec = testing::SpecOf(config, tested.lanes);
  spec.micro_batch = 1;
  spec.global_batch = tested.lanes * tested.micro_batches;
  spec.strategy = tested.strategy;
  spec.replicate_strategy = tested.replicate;
  spec.compute = tested.narrow ? ComputeType::kBF16 : ComputeType::kF32;
  spec.gradient_wire = tested.narrow ? WireType::kBF16 : WireType::kF32;
  spec.freeze = tested.freeze;
  spec.units = tested.units;
  spec.replicas = tested.replicas;
  spec.recompute = tested.recompute;
  spec.gather_window_bytes = tested.gather_window_bytes;
  auto plan = BuildShardingPlan(
      {.spec = spec, .ranks = tested.ranks, .shared_memory = tested.shared_memory});
  EXPECT_TRUE(plan.ok()) << tested.name() << ": " << plan.status();
  return *std::move(plan);
}

std::vector<CrossingCase> Cases() {
  std::vector<CrossingCase> cases;
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const int64_t micro_batches : {1, 3}) {
      cases.push_back({.strategy = strategy, .micro_batches = micro_batches});
      cases.push_back({.strategy = strategy, .lanes = 8, .micro_batches = micro_batches});
    }
  }
  cases.push_back({.ranks = 1, .lanes = 1});
  cases.push_back({.lanes = 4, .shared_memory = true});
  cases.push_back({.lanes = 4, .recompute = RecomputePolicy::kBlock, .tied = true});
  cases.push_back({.micro_batches = 2, .recompute = RecomputePolicy::kMlp});
  cases.push_back({.micro_batches = 2, .gather_window_bytes = 1});
  cases.push_back({.lanes = 8, .narrow = true});
  cases.push_back({.micro_batches = 2, .narrow = true});
  // Gathers of a frozen group wait for no update.
  cases.push_back({.lanes = 8, .freeze = {"*mlp*"}});
  cases.push_back({.micro_batches = 2, .layers_twice = true});
  const UnitStrategy embed = {.match = "embed", .strategy = Strategy::kOptim, .replicate = {}};
  cases.push_back({.lanes = 8, .units = {embed}});
  for (const Strategy replicate : {Strategy::kNoShard, Strategy::kOptim}) {
    cases.push_back({.replicate = replicate, .replicas = 2, .ranks = 4, .lanes = 8});
    cases.push_back({.replicate = replicate,
                     .replicas = 2,
                     .ranks = 4,
                     .lanes = 4,
                     .micro_batches = 2,
                     .shared_memory = true});
  }
  return cases;
}

size_t IndexOf(const ShardingPlan& plan, const StepSlot& slot) {
  const StepProgram* found = &plan.program(slot.phase, slot.part);
  return static_cast<size_t>(found - plan.programs.data());
}

void AddStep(const ShardingPlan& plan, std::vector<size_t>& sequence) {
  for (int64_t program = 0; program < plan.lanes.programs(); ++program) {
    sequence.push_back(IndexOf(plan, SlotOf(plan.lanes, program)));
  }
}

// Two steps, an evaluation of two batches, two more steps.
std::vector<size_t> SomeSteps(const ShardingPlan& plan) {
  std::vector<size_t> sequence;
  for (const bool evaluation : {false, false, true, false, false}) {
    if (!evaluation) {
      AddStep(plan, sequence);
      continue;
    }
    const size_t eval = IndexOf(plan, {.phase = Phase::kEval});
    sequence.insert(sequence.end(), {eval, eval});
  }
  return sequence;
}

// A sequence of programs as one. `runs`: which of the sequence each instruction belongs to.
struct Unrolled {
  StepProgram program;
  IdVector<InstructionId, size_t> runs;
};

Unrolled Unroll(const ShardingPlan& plan,
                const std::vector<size_t>& sequence,
                const CrossingWaits& crossing) {
  Unrolled made;
  // The latest run of each instruction of a stream.
  std::vector<std::map<InstructionId, InstructionId>> latest(plan.programs.size());
  for (size_t run = 0; run < sequence.size(); ++run) {
    const StepProgram& program = plan.programs[sequence[run]];
    for (const InstructionId i : program.instructions.ids()) {
      if (!RunsOnStream(program.instructions[i])) {
        continue;
      }
      Instruction copy = program.instructions[i];
      copy.waits.clear();
      // As an executor waits: before this instruction is given to its stream.
      for (const CrossingWait& wait : crossing[sequence[run]][i]) {
        const auto found = latest[wait.program].find(wait.instruction);
        if (found != latest[wait.program].end()) {
          copy.waits.push_back(found->second);
        }
      }
      for (const InstructionId wait : program.instructions[i].waits) {
        if (const InstructionId awaited = AwaitedBy(program, wait); awaited >= 0) {
          copy.waits.push_back(latest[sequence[run]].at(awaited));
        }
      }
      latest[sequence[run]][i] = made.program.instructions.Add(std::move(copy));
      made.runs.push_back(run);
    }
  }
  return made;
}

using Overlaps = IdVector<BufferId, std::vector<bool>>;
// From addresses alone.
Overlaps OverlapsOf(const ShardingPlan& plan) {
  const auto range = [&](BufferId buffer) {
    while (plan.buffers[buffer].inside >= 0) {
      buffer = plan.buffers[buffer].inside;
    }
    const int64_t begin = plan.memory.offsets[buffer];
    return std::tuple(plan.buffers[buffer].memory, begin, begin + plan.buffers[buffer].bytes);
  };
  Overlaps overlaps(plan.buffers.size(), std::vector<bool>(plan.buffers.size()));
  for (const BufferId a : plan.buffers.ids()) {
    for (const BufferId b : plan.buffers.ids()) {
      const auto [memory_a, begin_a, end_a] = range(a);
      const auto [memory_b, begin_b, end_b] = range(b);
      overlaps[a][static_cast<size_t>(b)] =
          memory_a == memory_b && begin_a < end_b && begin_b < end_a;
    }
  }
  return overlaps;
}

bool Conflict(const Overlaps& overlaps, const Instruction& a, const Instruction& b) {
  for (const Operand& first : a.operands) {
    for (const Operand& second : b.operands) {
      if ((first.writes() || second.writes()) &&
          overlaps[first.buffer][static_cast<size_t>(second.buffer)]) {
        return true;
      }
    }
  }
  return false;
}

// The first two instructions of different runs that must be ordered and are not, or "".
std::string FirstRace(const ShardingPlan& plan,
                      const Overlaps& overlaps,
                      const std::vector<size_t>& sequence,
                      const CrossingWaits& crossing) {
  const Unrolled all = Unroll(plan, sequence, crossing);
  const HappensBefore order(all.program);
  const auto& list = all.program.instructions;
  for (const InstructionId b : list.ids()) {
    for (const InstructionId a : list.ids()) {
      if (all.runs[a] < all.runs[b] && !order.Before(a, b) &&
          Conflict(overlaps, list[a], list[b])) {
        return absl::StrCat(OpName(LabelOf(plan.moves, list[a])),
                            " of unit ",
                            list[a].unit.value(),
                            ", run ",
                            all.runs[a],
                            ", races with ",
                            OpName(LabelOf(plan.moves, list[b])),
                            " of unit ",
                            list[b].unit.value(),
                            ", run ",
                            all.runs[b]);
      }
    }
  }
  return "";
}

CrossingWaits WaitsOf(const ShardingPlan& plan) {
  return CrossingWaitsOf(plan.programs, plan.buffers, plan.memory.offsets);
}

TEST(ProgramCrossing, EveryConflictBetweenProgramsIsOrdered) {
  for (const CrossingCase& tested : Cases()) {
    const ShardingPlan plan = PlanOf(tested);
    EXPECT_EQ(FirstRace(plan, OverlapsOf(plan), SomeSteps(plan), WaitsOf(plan)), "")
        << tested.name();
  }
}

// Fails when a wait is derived that the data does not ask for.
TEST(ProgramCrossing, NoWaitCanBeLeftOut) {
  for (const CrossingCase& tested : Cases()) {
    const ShardingPlan plan = PlanOf(tested);
    const Overlaps overlaps = OverlapsOf(plan);
    const CrossingWaits waits = WaitsOf(plan);
    size_t count = 0;
    for (size_t later = 0; later < waits.size(); ++later) {
      for (const InstructionId i : plan.programs[later].instructions.ids()) {
        for (const CrossingWait& wait : waits[later][i]) {
          CrossingWaits fewer = waits;
          std::erase(fewer[later][i], wait);
          EXPECT_NE(FirstRace(plan, overlaps, {wait.program, later}, fewer), "")
              << tested.name() << ": wait " << count;
          ++count;
        }
      }
    }
    EXPECT_GT(count, 0u) << tested.name();
  }
}

// Of the third of four steps: gathers that no computation may run beside, and all gathers.
struct Exposure {
  int64_t exposed = 0;
  int64_t gathers = 0;
};
Exposure ExposureOf(const ShardingPlan& plan, const CrossingWaits& waits) {
  std::vector<size_t> sequence;
  for (int step = 0; step < 4; ++step) {
    AddStep(plan, sequence);
  }
  const size_t programs = sequence.size() / 4;
  const Unrolled all = Unroll(plan, sequence, waits);
  const HappensBefore order(all.program);
  const auto& list = all.program.instructions;
  const auto computes = [](const Instruction& at) {
    return IsCompute(at.op) || at.op == OpCode::kOptimizerStep;
  };
  Exposure exposure;
  for (const InstructionId gather : list.ids()) {
    if (list[gather].op != OpCode::kGather || all.runs[gather] / programs != 2) {
      continue;
    }
    ++exposure.gathers;
    bool beside = false;
    for (const InstructionId at : list.ids()) {
      beside =
          beside || (computes(list[at]) && !order.Before(at, gather) && !order.Before(gather, at));
    }
    exposure.exposed += beside ? 0 : 1;
  }
  return exposure;
}

// What a drain of all streams at the end of each program was: every first instruction of a stream
// waits for the last one of every other.
CrossingWaits Drained(const ShardingPlan& plan) {
  CrossingWaits waits;
  for (const StepProgram& program : plan.programs) {
    waits.emplace_back(program.instructions.size());
    std::map<StreamId, bool> begun;
    for (const InstructionId i : program.instructions.ids()) {
      const Instruction& at = program.instructions[i];
      if (!RunsOnStream(at) || std::exchange(begun[at.stream], true)) {
        continue;
      }
      for (size_t earlier = 0; earlier < plan.programs.size(); ++earlier) {
        std::map<StreamId, InstructionId> last;
        for (const InstructionId j : plan.programs[earlier].instructions.ids()) {
          if (RunsOnStream(plan.programs[earlier].instructions[j])) {
            last[plan.programs[earlier].instructions[j].stream] = j;
          }
        }
        for (const auto& [stream, j] : last) {
          if (stream != at.stream) {
            waits.back()[i].push_back({.program = earlier, .instruction = j});
          }
        }
      }
    }
  }
  return waits;
}

// With a window of several units every gather has something to run beside: the first one of a step
// the updates of later units. Drained streams leave that one, and one for each further program that
// gathers anew, to themselves.
TEST(ProgramCrossing, NoGatherIsExposedWhereProgramsMeet) {
  for (const int64_t micro_batches : {1, 2, 3}) {
    const ShardingPlan plan = PlanOf({.micro_batches = micro_batches});
    const Exposure derived = ExposureOf(plan, WaitsOf(plan));
    const Exposure drained = ExposureOf(plan, Drained(plan));
    EXPECT_GT(derived.gathers, 5);
    EXPECT_EQ(derived.gathers, drained.gathers);
    EXPECT_EQ(derived.exposed, 0) << micro_batches;
    EXPECT_GE(drained.exposed, 1) << micro_batches;
  }
}

// Fails when a wait for an update is that for all updates.
TEST(ProgramCrossing, TheFirstGatherOfAStepWaitsForItsOwnUpdateAlone) {
  const ShardingPlan plan = PlanOf({});
  const size_t only = IndexOf(plan, {.phase = Phase::kOnly});
  const auto& list = plan.programs[only].instructions;
  const CrossingWaits waits = WaitsOf(plan);
  for (const InstructionId i : list.ids()) {
    if (list[i].op == OpCode::kGather) {
      int updates = 0;
      for (const CrossingWait& wait : waits[only][i]) {
        const Instruction& awaited = list[wait.instruction];
        if (wait.program == only && awaited.op == OpCode::kOptimizerStep) {
          ++updates;
          EXPECT_EQ(awaited.group, list[i].group);
        }
      }
      EXPECT_EQ(updates, 1);
      break;
    }
  }
}

}  // namespace
}  // namespace ravel::plan
