// Streams as real queues: whatever the times are, waits alone give the bits; and a wait that is
// missing is found.

#include <cstdio>
#include <cstdlib>

#include <absl/strings/str_cat.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "tests/testing/queued_replay.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

constexpr char kStreamModel[] = "odd_tied";
constexpr int64_t kStreamSteps = 2;
constexpr uint64_t kSchedules = 200;
constexpr uint64_t kMutantSchedules = 100;  // until the fault shows

std::string StreamFolder() {
  return OwnFolder("ravel_stream_order");
}

RecordArgs QueuedArgs(const StrategyCase& tested,
                      uint64_t schedule,
                      const char* model = kStreamModel) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, StreamFolder()));
  args.last_step = kStreamSteps;
  args.options = {.poison = true, .host_replay = shard::QueuedStreams(schedule)};
  return args;
}

Recording InlineRun(const StrategyCase& tested, const char* model = kStreamModel) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, StreamFolder()));
  args.last_step = kStreamSteps;
  return Record(args);
}

std::vector<StrategyCase> Cases() {
  using plan::RecomputePolicy;
  return {{.strategy = "ZeRO3", .width = 2, .small_windows = true},
          {.strategy = "ZeRO3", .width = 3, .in_place = true},
          {.strategy = "ZeRO3", .width = 8, .recompute = RecomputePolicy::kBlock},
          {.strategy = "ZeRO0", .width = 2},
          {.strategy = "ZeRO1", .width = 3, .micro_batches = 3},
          {.strategy = "ZeRO2", .width = 2, .recompute = RecomputePolicy::kBlock},
          {.strategy = "HSDP", .width = 2},
          {.strategy = "HFSDP", .width = 2, .micro_batches = 3}};
}

TEST(StreamOrder, TwoHundredSchedulesGiveTheSameBits) {
  const std::vector<StrategyCase> cases = Cases();
  std::vector<Recording> expected;
  for (const StrategyCase& tested : cases) {
    expected.push_back(InlineRun(tested));
  }
  for (uint64_t schedule = 0; schedule < kSchedules; ++schedule) {
    const size_t at = schedule % cases.size();
    const Recording run = Record(QueuedArgs(cases[at], schedule));
    ASSERT_EQ(run.steps.size(), static_cast<size_t>(kStreamSteps));
    ASSERT_EQ(FirstDifference(expected[at], run), "")
        << cases[at].name() << ", schedule " << schedule;
  }
}

// Sums over ranks of a tensor axis, beside products: of models whose sums read a bias, and of
// models without.
struct SumsCase {
  const char* model;
  StrategyCase tested;
};
std::vector<SumsCase> SumsCases() {
  using plan::RecomputePolicy;
  return {
      {"recipes_gpt2", {.width = 2, .tensor = 2, .chunks = 4}},
      {"bundled_rope_scaling", {.strategy = "ZeRO1", .tensor = 4, .sequence = true}},
      {"bundled_rope_scaling",
       {.width = 2, .recompute = RecomputePolicy::kBlock, .tensor = 2, .chunks = 2}},
      {"recipes_gpt2",
       {.micro_batches = 3, .small_windows = true, .tensor = 2, .sequence = true, .chunks = 2}}};
}

// Four schedules, or twelve with RAVEL_EVERY_CASE (label slow).
TEST(StreamOrder, SumsBesideProductsGiveTheBitsOfSumsInTurn) {
  const uint64_t schedules = std::getenv("RAVEL_EVERY_CASE") != nullptr ? 12 : 4;
  for (const SumsCase& sums : SumsCases()) {
    StrategyCase in_turn = sums.tested;
    in_turn.chunks = 1;
    const Recording expected = InlineRun(in_turn, sums.model);
    for (uint64_t schedule = 0; schedule < schedules; ++schedule) {
      const Recording run = Record(QueuedArgs(sums.tested, schedule, sums.model));
      ASSERT_EQ(run.steps.size(), static_cast<size_t>(kStreamSteps));
      ASSERT_EQ(FirstDifference(expected, run), "")
          << sums.model << " " << sums.tested.name() << ", schedule " << schedule;
    }
  }
}

// An edge of a program: instruction `to` waits for `from`.
struct Edge {
  size_t program = 0;
  size_t to = 0;
  size_t wait = 0;
};

std::vector<Edge> EdgesOf(const plan::ShardingPlan& plan) {
  std::vector<Edge> edges;
  for (size_t p = 0; p < plan.programs.size(); ++p) {
    const plan::StepProgram& program = plan.programs[p];
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      const plan::Instruction& instruction = program.instructions[i];
      // The end of a program waits for everything by itself, evaluation is not run here.
      if (instruction.op == plan::OpCode::kEndPhase || program.phase == plan::Phase::kEval) {
        continue;
      }
      for (size_t wait = 0; wait < instruction.waits.size(); ++wait) {
        edges.push_back({.program = p, .to = i, .wait = wait});
      }
    }
  }
  return edges;
}

std::string EdgeName(const plan::ShardingPlan& plan, const Edge& edge) {
  const plan::StepProgram& program = plan.programs[edge.program];
  const plan::Instruction& to = program.instructions[edge.to];
  const auto at = static_cast<size_t>(to.waits[edge.wait]);
  const plan::Instruction& from = program.instructions[at];
  return absl::StrCat(plan::PhaseName(program.phase),
                      ": ",
                      edge.to,
                      " ",
                      plan::OpName(plan::LabelOf(plan.moves, to)),
                      " of unit ",
                      to.unit.value(),
                      " waits for ",
                      at,
                      " ",
                      plan::OpName(plan::LabelOf(plan.moves, from)),
                      " of unit ",
                      from.unit.value());
}

// Whether some schedule of the plan without the edge fails or gives other bits.
bool Found(const StrategyCase& tested,
           const Edge& edge,
           const Recording& expected,
           const char* model = kStreamModel) {
  for (uint64_t schedule = 0; schedule < kMutantSchedules; ++schedule) {
    RecordArgs args = QueuedArgs(tested, schedule, model);
    const auto adjust = args.adjust;
    args.adjust = [&](plan::ShardingPlan& plan) -> absl::Status {
      if (adjust != nullptr) {
        RETURN_IF_ERROR(adjust(plan));
      }
      std::vector<plan::InstructionId>& waits =
          plan.programs[edge.program].instructions[edge.to].waits;
      waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(edge.wait));
      return absl::OkStatus();
    };
    // Ranks that disagree are a failure of the run that is looked for.
    ::testing::TestPartResultArray failures;
    const auto run = [&] {
      const ::testing::ScopedFakeTestPartResultReporter reporter(
          ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
      return TryRecord(args);
    }();
    if (failures.size() > 0) {
      return true;
    }
    if (!run.ok()) {
      EXPECT_TRUE(absl::IsInternal(run.status()) || absl::IsAborted(run.status())) << run.status();
      return true;
    }
    if (!FirstDifference(expected, *run).empty()) {
      return true;
    }
  }
  return false;
}

TEST(StreamOrder, EveryWaitThatIsDroppedIsFoundByBitsOrStateMachine) {
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 8, .small_windows = true};
  const RecordArgs args = QueuedArgs(tested, 0);
  const auto plan = PlanLocalRanks({.spec = args.spec, .ranks = args.ranks, .adjust = args.adjust});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Recording expected = InlineRun(tested);
  int found = 0;
  const std::vector<Edge> edges = EdgesOf(*plan);
  for (const Edge& edge : edges) {
    if (Found(tested, edge, expected)) {
      ++found;
    } else {
      std::printf("not found: %s\n", EdgeName(*plan, edge).c_str());
    }
  }
  EXPECT_EQ(found, static_cast<int>(edges.size()));
}

// Waits of sums, or for one, in the first program: every third, or with RAVEL_ALL every one.
TEST(StreamOrder, EveryWaitOfASumThatIsDroppedIsFound) {
  const SumsCase sums = {"recipes_gpt2", {.tensor = 2, .chunks = 4}};
  const RecordArgs args = QueuedArgs(sums.tested, 0, sums.model);
  const auto plan = PlanLocalRanks({.spec = args.spec, .ranks = args.ranks, .adjust = args.adjust});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Recording expected = InlineRun(sums.tested, sums.model);
  const int every = std::getenv("RAVEL_ALL") != nullptr ? 1 : 3;
  int seen = 0;
  for (const Edge& edge : EdgesOf(*plan)) {
    const auto& list = plan->programs[edge.program].instructions;
    const plan::Instruction& to = list[edge.to];
    const bool of_sum = to.stream == plan::StreamId::kTensor ||
                        list[to.waits[edge.wait]].stream == plan::StreamId::kTensor;
    if (edge.program == 0 && of_sum && ++seen % every == 0) {
      EXPECT_TRUE(Found(sums.tested, edge, expected, sums.model)) << EdgeName(*plan, edge);
    }
  }
  EXPECT_GT(seen, 20);
}

}  // namespace
}  // namespace ravel::trainer
