// The worst moment of programs, against the same search written down from the definition: what is
// alive is looked up lifetime by lifetime, whether an instruction may run beside others is asked of
// each two of them.

#include "common/plan/memory/peak_search.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

class Definition {
 public:
  Definition(const StepProgram& program,
             const std::vector<Lifetime>& lifetimes,
             const ProgramBuffers& buffers,
             MemoryKind memory)
      : program_(program), order_(program), buffers_(buffers) {
    std::copy_if(
        lifetimes.begin(), lifetimes.end(), std::back_inserter(lives_), [&](const Lifetime& life) {
          return buffers[static_cast<size_t>(life.buffer)].memory == memory;
        });
  }

  PeakCut Peak() const {
    PeakCut peak;
    for (const Lifetime& born : lives_) {
      if (born.begin >= 0) {
        const std::vector<InstructionId> running = Greedy(born.begin);
        if (BytesAt(running) > peak.bytes) {
          peak = {.bytes = BytesAt(running), .buffers = AliveAt(running)};
        }
      }
    }
    return peak;
  }

  std::vector<BufferId> AliveAt(const std::vector<InstructionId>& running) const {
    std::vector<BufferId> alive;
    for (const Lifetime& life : lives_) {
      const auto any = [&](auto holds) {
        return std::any_of(running.begin(), running.end(), holds);
      };
      const bool born =
          any([&](InstructionId at) { return life.begin == at || order_.Before(life.begin, at); });
      const bool done =
          any([&](InstructionId at) { return order_.Before(life.accesses.back(), at); });
      if (born && !done) {
        alive.push_back(life.buffer);
      }
    }
    return alive;
  }

 private:
  int64_t BytesAt(const std::vector<InstructionId>& running) const {
    int64_t bytes = 0;
    for (const BufferId buffer : AliveAt(running)) {
      bytes += ArenaBytes(buffers_[static_cast<size_t>(buffer)]);
    }
    return bytes;
  }
  bool MayJoin(const std::vector<InstructionId>& running, InstructionId instruction) const {
    const auto stream = [&](InstructionId at) {
      return program_.instructions[static_cast<size_t>(at)].stream;
    };
    return std::all_of(running.begin(), running.end(), [&](InstructionId other) {
      return stream(other) != stream(instruction) && !order_.Before(instruction, other) &&
             !order_.Before(other, instruction);
    });
  }
  std::vector<InstructionId> Greedy(InstructionId birth) const {
    std::vector<InstructionId> running = {birth};
    while (true) {
      std::vector<InstructionId> worst = running;
      for (const Lifetime& life : lives_) {
        if (life.begin >= 0 && MayJoin(running, life.begin)) {
          std::vector<InstructionId> more = running;
          more.push_back(life.begin);
          if (BytesAt(more) > BytesAt(worst)) {
            worst = more;
          }
        }
      }
      if (worst == running) {
        return running;
      }
      running = worst;
    }
  }

  const StepProgram& program_;
  const HappensBefore order_;
  const ProgramBuffers& buffers_;
  std::vector<Lifetime> lives_;
};

int64_t BytesOf(const ProgramBuffers& buffers, const std::vector<BufferId>& ids) {
  int64_t bytes = 0;
  for (const BufferId id : ids) {
    bytes += ArenaBytes(buffers[static_cast<size_t>(id)]);
  }
  return bytes;
}

// The programs of jobs that differ in strategy, recomputation and shared memory.
std::vector<ShardingPlan> PlansOfStrategies() {
  std::vector<ShardingPlan> plans;
  for (const auto& [strategy, replicas] : {std::pair(Strategy::kNoShard, 1),
                                           std::pair(Strategy::kOptim, 1),
                                           std::pair(Strategy::kOptimGrads, 1),
                                           std::pair(Strategy::kOptimGradsParams, 1),
                                           std::pair(Strategy::kOptimGradsParams, 2)}) {
    for (const RecomputePolicy recompute :
         {RecomputePolicy::kNone, RecomputePolicy::kNorm, RecomputePolicy::kBlock}) {
      for (const bool shared_memory : {false, true}) {
        JobSpec spec = testing::SpecOf(testing::Llama(64, 4, 96, 257), 8);
        spec.strategy = strategy;
        spec.replicas = replicas;
        spec.replicate_strategy = replicas == 1 ? Strategy::kNoShard : Strategy::kOptim;
        spec.recompute = recompute;
        absl::StatusOr<ShardingPlan> plan =
            BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = shared_memory});
        EXPECT_TRUE(plan.ok()) << plan.status();
        if (plan.ok()) {
          plans.push_back(*std::move(plan));
        }
      }
    }
  }
  return plans;
}

void ExpectAsDefined(const ShardingPlan& plan, const StepProgram& program, MemoryKind memory) {
  const auto lifetimes = LifetimesOf(program, plan.buffers);
  ASSERT_TRUE(lifetimes.ok()) << lifetimes.status();
  PeakCut found;
  const HappensBefore order(program);
  PeakSearch(order, *lifetimes, plan.buffers, memory).Improve(found);
  const PeakCut expected = Definition(program, *lifetimes, plan.buffers, memory).Peak();
  EXPECT_EQ(found.bytes, expected.bytes);
  EXPECT_EQ(BytesOf(plan.buffers, found.buffers), found.bytes);
}

constexpr MemoryKind kMemories[] = {
    MemoryKind::kPrivate, MemoryKind::kSymmetric, MemoryKind::kCommon};

TEST(PeakSearch, FindsWhatTheDefinitionDoes) {
  int64_t compared = 0;
  for (const ShardingPlan& plan : PlansOfStrategies()) {
    for (const StepProgram& program : plan.programs) {
      for (const MemoryKind memory : kMemories) {
        ExpectAsDefined(plan, program, memory);
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 200);
}

// A program of nothing but streams and waits, and lifetimes in it.
struct Drawn {
  StepProgram program;
  ProgramBuffers buffers;
  std::vector<Lifetime> lifetimes;
};

Drawn Draw(std::mt19937_64& random) {
  const auto below = [&](size_t count) { return static_cast<int>(random() % count); };
  Drawn drawn;
  const int instructions = 8 + below(40);
  const size_t waits = 1 + random() % 8;
  for (int i = 0; i < instructions; ++i) {
    Instruction at;
    at.stream = static_cast<StreamId>(1 + below(kStreamCount));
    if (i > 0 && random() % waits == 0) {
      at.waits.push_back(below(static_cast<size_t>(i)));
    }
    drawn.program.instructions.push_back(std::move(at));
  }
  const HappensBefore order(drawn.program);
  for (int begin = -1; begin < instructions; ++begin) {
    for (int more = below(3); more > 0; --more) {
      const int last = begin < 0 ? below(static_cast<size_t>(instructions))
                                 : begin + below(static_cast<size_t>(instructions - begin));
      if (begin != last && !order.Before(begin, last)) {
        continue;
      }
      const auto buffer = static_cast<int>(drawn.buffers.size());
      drawn.buffers.push_back({});
      drawn.buffers.back().bytes = 256 * (1 + below(20));
      drawn.lifetimes.push_back(
          {.buffer = buffer, .begin = begin, .accesses = {begin, last}, .freed = -1});
    }
  }
  return drawn;
}

TEST(PeakSearch, FindsWhatTheDefinitionDoesInProgramsThatNobodyPlans) {
  for (uint64_t trial = 0; trial < 3000; ++trial) {
    std::mt19937_64 random(testing::kSeed + trial);
    const Drawn drawn = Draw(random);
    const MemoryKind memory =
        drawn.buffers.empty() ? MemoryKind::kPrivate : drawn.buffers[0].memory;
    PeakCut found;
    const HappensBefore order(drawn.program);
    PeakSearch(order, drawn.lifetimes, drawn.buffers, memory).Improve(found);
    const PeakCut expected =
        Definition(drawn.program, drawn.lifetimes, drawn.buffers, memory).Peak();
    ASSERT_EQ(found.bytes, expected.bytes) << "trial " << trial;
    ASSERT_EQ(BytesOf(drawn.buffers, found.buffers), found.bytes) << "trial " << trial;
  }
}

TEST(PeakSearch, RaisesOnlyWhatIsLower) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 4, true);
  const StepProgram& program = plan.programs.front();
  const auto lifetimes = LifetimesOf(program, plan.buffers);
  ASSERT_TRUE(lifetimes.ok());
  const HappensBefore order(program);
  const PeakSearch search(order, *lifetimes, plan.buffers, MemoryKind::kPrivate);
  PeakCut peak;
  search.Improve(peak);
  ASSERT_GT(peak.bytes, 0);
  PeakCut higher = {.bytes = peak.bytes, .buffers = {-1}};
  search.Improve(higher);
  EXPECT_EQ(higher.buffers, std::vector<BufferId>{-1});
  PeakCut lower = {.bytes = peak.bytes - 1, .buffers = {-1}};
  search.Improve(lower);
  EXPECT_EQ(lower.buffers, peak.buffers);
}

}  // namespace
}  // namespace ravel::plan
