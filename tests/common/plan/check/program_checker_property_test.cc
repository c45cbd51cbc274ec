// Mutants of good programs: each that can change results must be caught.

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_request.h"
#include "tests/common/plan/layout/rank_check.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/sanitizer.h"

namespace ravel::plan {
namespace {

using ::testing::StartsWith;

struct Target {
  ShardingPlan plan;
  std::string name;
  JobSpec spec;
  bool shared_memory = false;
};

// Forms are tied or untied weights, copied or in place.
enum class Runs { kInEachForm, kInOne, kInTheSlowLabel };

struct Variant {
  const char* name;
  void (*change)(JobSpec&);
  int64_t ranks;
  Runs runs = Runs::kInEachForm;
};

// What each kind of instruction comes from, four layers each.
constexpr Variant kVariants[] = {
    {"zero0 in blocks", [](JobSpec& s) { s.strategy = Strategy::kNoShard; }, 4},
    {"zero0 by turns", [](JobSpec& s) { s.strategy = Strategy::kNoShard; }, 3},
    {"zero1", [](JobSpec& s) { s.strategy = Strategy::kOptim; }, 4},
    {"zero2", [](JobSpec& s) { s.strategy = Strategy::kOptimGrads; }, 4},
    {"zero0 in replicas",
     [](JobSpec& s) {
       s.strategy = Strategy::kNoShard;
       s.replicas = 2;
     },
     4},
    {"hsdp", [](JobSpec& s) { s.replicas = 2; }, 4},
    {"hfsdp",
     [](JobSpec& s) {
       s.replicas = 2;
       s.replicate_strategy = Strategy::kOptim;
     },
     4},
    {"hfsdp, three micro-batches, remade",
     [](JobSpec& s) {
       s.replicas = 2;
       s.replicate_strategy = Strategy::kOptim;
       s.micro_batch = 1;
       s.global_batch = 24;
       s.recompute = RecomputePolicy::kBlock;
     },
     4},
    {"three micro-batches in blocks",
     [](JobSpec& s) {
       s.strategy = Strategy::kOptim;
       s.micro_batch = 1;
       s.global_batch = 24;
     },
     4},
    {"frozen",
     [](JobSpec& s) {
       s.freeze = {"model.embed_tokens*", "model.layers.0.*", "*down_proj*"};
     },
     2},
    {"shared layers", [](JobSpec& s) { s.tensor = 2; }, 4, Runs::kInOne},
    {"shared layers, own tokens, three micro-batches, remade",
     [](JobSpec& s) {
       s.tensor = 2;
       s.sequence_parallel = true;
       s.micro_batch = 1;
       s.global_batch = 24;
       s.recompute = RecomputePolicy::kBlock;
     },
     4,
     Runs::kInTheSlowLabel},
    {"shared layers in chunks",
     [](JobSpec& s) {
       s.tensor = 2;
       s.tensor_chunks = 2;
       s.strategy = Strategy::kOptimGrads;
     },
     4,
     Runs::kInTheSlowLabel},
};

std::vector<Target> Targets() {
  const bool every_case = std::getenv("RAVEL_EVERY_CASE") != nullptr;
  std::vector<Target> targets;
  for (const bool tied : {false, true}) {
    for (const bool shared : {false, true}) {
      if (ravel::testing::kSanitized && !(tied && !shared)) {
        continue;  // one form of four; weights that are copied are handed from program to program
      }
      ModelConfig config = testing::Llama(64, 4, 96, 257);
      config.tie_word_embeddings = tied;
      const std::string suffix =
          std::string(tied ? ", tied" : ", untied") + (shared ? " in place" : " copied");
      for (const int64_t ranks : {1, 2, 4}) {
        targets.push_back({testing::PlanOf(config, ranks, 4, shared),
                           "zero3" + suffix + ", " + std::to_string(ranks),
                           testing::SpecOf(config, 4),
                           shared});
      }
      for (const Variant& variant : kVariants) {
        const bool one = tied && !shared;
        if (!every_case && variant.runs != Runs::kInEachForm &&
            !(variant.runs == Runs::kInOne && one)) {
          continue;
        }
        JobSpec spec = testing::SpecOf(config, 8);
        variant.change(spec);
        absl::StatusOr<ShardingPlan> plan =
            BuildShardingPlan({.spec = spec, .ranks = variant.ranks, .shared_memory = shared});
        EXPECT_TRUE(plan.ok()) << variant.name << ": " << plan.status();
        targets.push_back({*std::move(plan), variant.name + suffix, spec, shared});
      }
    }
  }
  return targets;
}

// For many programs of the same plan, each of which is a mutant.
ProgramChecker CheckerOf(const Target& target) {
  absl::StatusOr<ProgramChecker> checker = ProgramChecker::Create(target.plan);
  EXPECT_TRUE(checker.ok()) << target.name << ": " << checker.status();
  return *std::move(checker);
}

// Whether two programs allow the same executions: equal closures.
bool SameOrder(const StepProgram& a, const StepProgram& b) {
  const HappensBefore order_a(a);
  const HappensBefore order_b(b);
  const int count = static_cast<int>(a.instructions.size());
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < count; ++j) {
      if (order_a.Before(i, j) != order_b.Before(i, j)) {
        return false;
      }
    }
  }
  return true;
}

TEST(CheckerMutants, EveryDeletedWaitIsCaught) {
  int mutants = 0;
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      StepProgram mutant = program;
      for (size_t i = 0; i < program.instructions.size(); ++i) {
        for (size_t w = 0; w < program.instructions[i].waits.size(); ++w) {
          std::vector<InstructionId>& waits = mutant.instructions[i].waits;
          waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(w));
          EXPECT_FALSE(SameOrder(program, mutant)) << "an implied wait was left";
          EXPECT_FALSE(checker.Check(mutant).ok())
              << target.name << ": " << InstructionName(program, static_cast<int>(i))
              << " without its wait for "
              << InstructionName(program, program.instructions[i].waits[w]);
          waits = program.instructions[i].waits;
          ++mutants;
        }
      }
      EXPECT_TRUE(checker.Check(mutant).ok()) << target.name << ": a mutant was kept";
    }
  }
  EXPECT_GT(mutants, ravel::testing::Fewer(500, 5));
}

TEST(CheckerMutants, EveryDroppedInstructionIsCaught) {
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      for (size_t drop = 0; drop < program.instructions.size(); ++drop) {
        StepProgram mutant = program;
        mutant.instructions.erase(mutant.instructions.begin() + static_cast<std::ptrdiff_t>(drop));
        for (Instruction& at : mutant.instructions) {
          std::vector<InstructionId> waits;
          for (const InstructionId wait : at.waits) {
            if (wait != static_cast<int>(drop)) {
              waits.push_back(wait > static_cast<int>(drop) ? wait.value() - 1 : wait);
            }
          }
          at.waits = waits;
        }
        EXPECT_FALSE(checker.Check(mutant).ok())
            << target.name << ": without " << InstructionName(program, static_cast<int>(drop));
      }
    }
  }
}

// Neighbours of one stream that may change places, on all ranks alike: sums of different gradients,
// each of which has its own memory; and statistics, which are measured on shards, with the gather
// of a whole gradient. These mutants survive.
bool Commute(const Instruction& a, const Instruction& b) {
  const auto gathers = [](const Instruction& at) {
    return at.op == OpCode::kGather && BufferOf(at, Role::kGradient) >= 0;
  };
  const auto sums = [&](const Instruction& at) {
    return at.op == OpCode::kReduce || at.op == OpCode::kAccumulateGrad || gathers(at) ||
           at.op == OpCode::kJoinGradients;
  };
  const auto whole = [&](const Instruction& at, const Instruction& other) {
    return gathers(at) && other.op == OpCode::kStatsReduce;
  };
  return (sums(a) && sums(b) && (a.group != b.group || a.call != b.call)) || whole(a, b) ||
         whole(b, a);
}

// Swapping neighbours is harmless only where the swap changes neither the order of a stream nor a
// lifetime.
TEST(CheckerMutants, SwappedNeighboursOfAStreamAreCaught) {
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      for (size_t i = 0; i + 1 < program.instructions.size(); ++i) {
        const Instruction& first = program.instructions[i];
        const Instruction& second = program.instructions[i + 1];
        const auto waits_for_first = std::find(second.waits.begin(), second.waits.end(), i);
        // Two frees in a row, two births in a row and two updates in a row commute.
        if (first.op == second.op || first.stream != second.stream ||
            first.op == OpCode::kAllocStaging || second.op == OpCode::kAllocStaging ||
            waits_for_first != second.waits.end()) {
          continue;
        }
        StepProgram mutant = program;
        std::swap(mutant.instructions[i], mutant.instructions[i + 1]);
        for (Instruction& at : mutant.instructions) {
          for (InstructionId& wait : at.waits) {
            if (wait == static_cast<int>(i)) {
              wait = static_cast<int>(i) + 1;
            } else if (wait == static_cast<int>(i) + 1) {
              wait = static_cast<int>(i);
            }
          }
        }
        EXPECT_TRUE(Commute(first, second) || !checker.Check(mutant).ok())
            << target.name << ": " << InstructionName(program, static_cast<int>(i)) << " swapped";
      }
    }
  }
}

// Every field of every instruction, apart from its waits and operands.
TEST(CheckerMutants, EveryChangedFieldIsCaught) {
  void (*const changes[])(Instruction&) = {
      [](Instruction& at) { ++at.call; },
      [](Instruction& at) { ++at.group; },
      [](Instruction& at) { ++at.unit; },
      [](Instruction& at) { ++at.freed; },
      [](Instruction& at) { at.operands.push_back({.buffer = 0}); },
      [](Instruction& at) { std::reverse(at.operands.begin(), at.operands.end()); },
  };
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      StepProgram mutant = program;
      for (size_t i = 0; i < program.instructions.size(); ++i) {
        for (const auto& change : changes) {
          change(mutant.instructions[i]);
          if (mutant.instructions[i] != program.instructions[i]) {
            EXPECT_FALSE(checker.Check(mutant).ok())
                << target.name << ": " << InstructionName(program, static_cast<int>(i));
            mutant.instructions[i] = program.instructions[i];
          }
        }
      }
      EXPECT_TRUE(checker.Check(mutant).ok()) << target.name << ": a mutant was kept";
    }
  }
}

// Every field of every operand.
TEST(CheckerMutants, EveryChangedOperandIsCaught) {
  void (*const changes[])(std::vector<Operand>&, size_t) = {
      [](std::vector<Operand>& all, size_t i) { ++all[i].buffer; },
      [](std::vector<Operand>& all, size_t i) { all[i].buffer = -1; },
      [](std::vector<Operand>& all, size_t i) { all[i].buffer = 100000; },
      [](std::vector<Operand>& all, size_t i) {
        all[i].access = all[i].access == Access::kAdd ? Access::kWrite : Access::kAdd;
      },
      [](std::vector<Operand>& all, size_t i) {
        all[i].role = all[i].role == Role::kScratch ? Role::kShared : Role::kScratch;
      },
      [](std::vector<Operand>& all, size_t i) {
        all[i].when = all[i].when == When::kLane ? When::kUsed : When::kLane;
      },
      [](std::vector<Operand>& all, size_t i) {
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      },
  };
  int mutants = 0;
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      StepProgram mutant = program;
      for (size_t i = 0; i < program.instructions.size(); ++i) {
        for (size_t operand = 0; operand < program.instructions[i].operands.size(); ++operand) {
          for (const auto& change : changes) {
            change(mutant.instructions[i].operands, operand);
            EXPECT_FALSE(checker.Check(mutant).ok())
                << target.name << ": " << InstructionName(program, static_cast<int>(i))
                << ", operand " << operand;
            mutant.instructions[i].operands = program.instructions[i].operands;
            ++mutants;
          }
        }
      }
      EXPECT_TRUE(checker.Check(mutant).ok()) << target.name << ": a mutant was kept";
    }
  }
  EXPECT_GT(mutants, ravel::testing::Fewer(10000, 5));
}

TEST(CheckerMutants, WeightsThatAreNotHandedOverAreCaught) {
  int mutants = 0;
  for (const Target& target : Targets()) {
    for (size_t i = 0; i < target.plan.programs.size(); ++i) {
      for (auto member : {&StepProgram::live_at_start, &StepProgram::live_at_end}) {
        ShardingPlan less = target.plan;
        std::vector<BufferId>& live = less.programs[i].*member;
        if (!live.empty()) {
          live.pop_back();
          EXPECT_FALSE(CheckPlan(less).ok()) << target.name;
          ++mutants;
        }
        ShardingPlan more = target.plan;
        (more.programs[i].*member).push_back(0);
        EXPECT_FALSE(CheckPlan(more).ok()) << target.name;
      }
    }
  }
  EXPECT_GT(mutants, 10);
}

// True if a strategy of its own for the last unit plans exactly this: then it is a sound plan.
bool IsOfAnotherStrategy(const Target& target, const ShardingPlan& plan) {
  const UnitId unit = plan.groups.back().unit;
  for (const AxisStrategyRow& row : AxisStrategyRows()) {
    JobSpec spec = target.spec;
    spec.units = {
        {.match = plan.inventory.units[unit].name, .strategy = row.strategy, .replicate = {}}};
    const absl::StatusOr<ShardingPlan> other = BuildShardingPlan(
        {.spec = spec, .ranks = plan.ranks, .shared_memory = target.shared_memory});
    if (other.ok() && SerializePlan(*other) == SerializePlan(plan)) {
      return true;
    }
  }
  return false;
}

TEST(CheckerMutants, ChangedPlacementsAreCaught) {
  Placements GroupRoles::*const roles[] = {&GroupRoles::stored,
                                           &GroupRoles::parameter,
                                           &GroupRoles::used,
                                           &GroupRoles::staged,
                                           &GroupRoles::between,
                                           &GroupRoles::measured,
                                           &GroupRoles::at_step};
  for (const Target& target : Targets()) {
    for (Placements GroupRoles::*const role : roles) {
      for (const char* axis : {kShardAxis, kReplicateAxis}) {
        ShardingPlan mutant = target.plan;
        Placements& placements = mutant.roles.back().*role;
        if (mutant.mesh.AxisIndex(axis) < 0) {
          continue;
        }
        const bool cut = PlacementOn(placements, axis).in_flat_family();
        std::erase_if(placements, [&](const AxisPlacement& entry) { return entry.axis == axis; });
        placements.push_back({axis, cut ? Placement::Replicate() : Placement::Flat()});
        placements = Canonical(placements, mutant.mesh);
        EXPECT_TRUE(!CheckPlan(mutant).ok() || IsOfAnotherStrategy(target, mutant))
            << target.name << ", " << axis;
      }
    }
  }
}

// Each instruction's move is one of its group's; the table is what the placements need.
TEST(CheckerMutants, ChangedMovesAreCaught) {
  for (const Target& target : Targets()) {
    const ProgramChecker checker = CheckerOf(target);
    for (const StepProgram& program : target.plan.programs) {
      StepProgram mutant = program;
      for (size_t i = 0; i < program.instructions.size(); ++i) {
        MoveId& move = mutant.instructions[i].move;
        move = move < 0 ? MoveId(0) : MoveId();
        EXPECT_FALSE(checker.Check(mutant).ok()) << target.name << ": " << i;
        for (const MoveId other : target.plan.moves.moves.ids()) {
          move = other;
          EXPECT_TRUE(other == program.instructions[i].move || !checker.Check(mutant).ok())
              << target.name << ": " << i << " with move " << other;
        }
        move = program.instructions[i].move;
      }
      EXPECT_TRUE(checker.Check(mutant).ok()) << target.name << ": a mutant was kept";
    }
    for (const MoveId move : target.plan.moves.moves.ids()) {
      ShardingPlan mutant = target.plan;
      mutant.moves.moves[move].type = DType::kI16;
      EXPECT_FALSE(CheckPlan(mutant).ok()) << target.name;
    }
  }
}

TEST(CheckerMutants, EveryMovedOrShrunkArenaIsCaught) {
  for (const Target& target : Targets()) {
    ShardingPlan shrunk = target.plan;
    shrunk.memory.private_bytes -= 256;
    EXPECT_FALSE(CheckPlan(shrunk).ok()) << target.name;
    // Overlapping any two temporaries that are alive together.
    ShardingPlan moved = target.plan;
    std::vector<int64_t>& offsets = moved.memory.offsets;
    for (const StepProgram& program : target.plan.programs) {
      const HappensBefore order(program);
      const std::vector<Lifetime> lives = *LifetimesOf(program, target.plan.buffers);
      for (const Lifetime& a : lives) {
        for (const Lifetime& b : lives) {
          const ProgramBuffer& buffer_a = target.plan.buffers[static_cast<size_t>(a.buffer)];
          const ProgramBuffer& buffer_b = target.plan.buffers[static_cast<size_t>(b.buffer)];
          if (a.buffer >= b.buffer || buffer_a.memory != buffer_b.memory ||
              EndsBefore(order, a, b) || EndsBefore(order, b, a)) {
            continue;
          }
          offsets[static_cast<size_t>(b.buffer)] = offsets[static_cast<size_t>(a.buffer)];
          EXPECT_FALSE(CheckPlan(moved).ok())
              << target.name << ": " << buffer_a.name << " over " << buffer_b.name;
          offsets = target.plan.memory.offsets;
        }
      }
    }
    EXPECT_TRUE(CheckPlan(moved).ok()) << target.name << ": a mutant was kept";
  }
}

TEST(CheckerMutants, GrownAndShrunkBuffersAreCaught) {
  for (const Target& target : Targets()) {
    ShardingPlan mutant = target.plan;
    for (size_t i = 0; i < target.plan.buffers.size(); ++i) {
      ProgramBuffer& buffer = mutant.buffers[i];
      for (const int64_t change : {int64_t{-256}, int64_t{1} << 30}) {
        buffer.bytes = target.plan.buffers[i].bytes + change;
        EXPECT_FALSE(CheckPlan(mutant).ok()) << target.name << ": " << buffer.name << change;
      }
      buffer.bytes = target.plan.buffers[i].bytes;
    }
    EXPECT_TRUE(CheckPlan(mutant).ok()) << target.name << ": a mutant was kept";
  }
}

TEST(CheckerMutants, ADroppedCollectiveOnOneRankIsNamed) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 4, 96, 257), 2, 2, false);
  const StepProgram& good = plan.program(Phase::kOnly);
  for (size_t i = 0; i < good.instructions.size(); ++i) {
    const OpCode op = good.instructions[i].op;
    StepProgram mutant = good;
    mutant.instructions.erase(mutant.instructions.begin() + static_cast<std::ptrdiff_t>(i));
    const absl::Status status = CheckSameCollectives(good, mutant);
    if (op == OpCode::kGather || op == OpCode::kReduce || op == OpCode::kStatsReduce) {
      EXPECT_THAT(std::string(status.message()), StartsWith("K4"));
    } else {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

struct FieldMutant {
  const char* rule;
  OpCode op;
  void (*change)(Instruction&);
};

void Drop(Instruction& at, Role role) {
  std::erase_if(at.operands, [role](const Operand& operand) { return operand.role == role; });
}

TEST(CheckerMutants, WrongFieldsAreCaught) {
  const FieldMutant mutants[] = {
      {"K1",
       OpCode::kForward,
       [](Instruction& at) {
         at.operands.push_back({.buffer = 0, .access = Access::kWrite, .role = Role::kWeights});
         at.unit = 2;
       }},
      {"K1", OpCode::kBackward, [](Instruction& at) { Drop(at, Role::kSaved); }},
      {"K1", OpCode::kForward, [](Instruction& at) { at.unit = 99; }},
      {"K1", OpCode::kForward, [](Instruction& at) { at.operands.back().buffer = 100000; }},
      {"K1", OpCode::kBackward, [](Instruction& at) { Drop(at, Role::kGradient); }},
      {"K1", OpCode::kGather, [](Instruction& at) { Drop(at, Role::kWeights); }},
      {"K1", OpCode::kAllocStaging, [](Instruction& at) { at.call = 7; }},
      {"K1", OpCode::kReduce, [](Instruction& at) { at.call = 1; }},
      {"K1", OpCode::kReduce, [](Instruction& at) { Drop(at, Role::kReceive); }},
      {"K4", OpCode::kGather, [](Instruction& at) { at.stream = StreamId::kReduce; }},
      {"K4", OpCode::kReduce, [](Instruction& at) { at.stream = StreamId::kCompute; }},
      {"K5", OpCode::kForward, [](Instruction& at) { at.waits.push_back(1000); }},
      {"K5", OpCode::kForward, [](Instruction& at) { at.waits.push_back(-1); }},
  };
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 4, 96, 257), 2, 2, false);
  for (const FieldMutant& mutant : mutants) {
    StepProgram program = plan.program(Phase::kOnly);
    const auto at = std::find_if(program.instructions.begin(),
                                 program.instructions.end(),
                                 [&](const Instruction& i) { return i.op == mutant.op; });
    mutant.change(*at);
    EXPECT_THAT(std::string(CheckProgram(plan, program).message()), StartsWith(mutant.rule));
  }
}

TEST(CheckerMutants, EvalMayNotTouchState) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 4, 96, 257), 2, 2, false);
  StepProgram program = plan.program(Phase::kOnly);
  program.phase = Phase::kEval;
  EXPECT_THAT(std::string(CheckProgram(plan, program).message()), StartsWith("K14"));
}

// Waits that serialise what should overlap are correct but refused.
TEST(CheckerMutants, PrefetchThatWaitsIsRefused) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 4, 96, 257), 2, 2, false);
  StepProgram program = plan.program(Phase::kOnly);
  int forward = -1;
  int refused = 0;
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    Instruction& at = program.instructions[i];
    if (at.op == OpCode::kForward) {
      forward = static_cast<int>(i);
    } else if (at.op == OpCode::kGather && forward >= 0) {
      StepProgram mutant = program;
      // The gather moves behind the next forward and waits for it.
      size_t next = i + 1;
      while (next < program.instructions.size() &&
             program.instructions[next].op != OpCode::kForward) {
        ++next;
      }
      if (next == program.instructions.size() || next != i + 1) {
        continue;
      }
      std::swap(mutant.instructions[i], mutant.instructions[next]);
      for (Instruction& other : mutant.instructions) {
        for (InstructionId& wait : other.waits) {
          wait = wait == static_cast<int>(i)      ? static_cast<int>(next)
                 : wait == static_cast<int>(next) ? static_cast<int>(i)
                                                  : wait;
        }
      }
      mutant.instructions[next].waits.push_back(static_cast<int>(i));
      EXPECT_THAT(std::string(CheckProgram(plan, mutant).message()), StartsWith("K10"));
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(CheckerProperty, RandomWindowsGiveCheckedPlans) {
  for (int trial = 0; trial < ravel::testing::Fewer(1000, 10); ++trial) {
    const uint64_t seed = testing::kSeed + static_cast<uint64_t>(trial);
    std::mt19937_64 random(seed);
    const auto pick = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    ModelConfig config = testing::Llama(16 * pick(1, 4), pick(1, 7), pick(1, 90), pick(2, 300));
    config.tie_word_embeddings = pick(0, 1) == 1;
    JobSpec spec = testing::SpecOf(config, 8);
    spec.data.sequence_length = pick(1, 40);
    spec.gather_window_bytes = pick(0, 2) == 0 ? 0 : pick(1, 400000);
    spec.staging_window_bytes = pick(0, 2) == 0 ? 0 : pick(1, 400000);
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = pick(1, 8), .shared_memory = pick(0, 1) == 1});
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.status();
  }
}

}  // namespace
}  // namespace ravel::plan
