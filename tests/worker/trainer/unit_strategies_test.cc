// Units with strategies of their own, and every combination of strategies on two axes: the bits of
// one rank.

#include <bit>
#include <filesystem>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/strategy_table.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

using plan::Strategy;
using plan::UnitStrategy;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 6;
constexpr Strategy kParams = Strategy::kOptimGradsParams;
constexpr char kUnitsModel[] = "bundled_rope_scaling";

struct UnitsCase {
  std::string name;
  Strategy strategy = kParams;
  std::vector<UnitStrategy> units;
  int64_t replicas = 1;
  Strategy replicate = Strategy::kNoShard;
};

std::vector<UnitsCase> UnitsCases() {
  return {
      {.name = "ends_optim",
       .units = {{.match = "embed", .strategy = Strategy::kOptim, .replicate = {}},
                 {.match = "head", .strategy = Strategy::kOptim, .replicate = {}}}},
      {.name = "alternating",
       .units = {{.match = "layers.0", .strategy = Strategy::kOptim, .replicate = {}},
                 {.match = "layers.1", .strategy = kParams, .replicate = {}},
                 {.match = "*", .strategy = Strategy::kOptimGrads, .replicate = {}}}},
      {.name = "all_four",
       .strategy = Strategy::kOptimGrads,
       .units = {{.match = "embed", .strategy = Strategy::kNoShard, .replicate = {}},
                 {.match = "layers.0", .strategy = kParams, .replicate = {}},
                 {.match = "layers.1", .strategy = Strategy::kOptim, .replicate = {}}}},
      // Lanes in blocks.
      {.name = "nothing_cut_between",
       .units = {{.match = "layers.*", .strategy = Strategy::kNoShard, .replicate = {}},
                 {.match = "*", .strategy = Strategy::kOptim, .replicate = {}}}},
  };
}
std::vector<UnitsCase> ReplicaCases() {
  return {{.name = "hsdp_and_hfsdp",
           .units = {{.match = "layers.0", .strategy = kParams, .replicate = Strategy::kOptim}},
           .replicas = 2},
          {.name = "optim_and_hfsdp",
           .units = {{.match = "embed", .strategy = Strategy::kOptim, .replicate = {}},
                     {.match = "head",
                      .strategy = Strategy::kNoShard,
                      .replicate = Strategy::kNoShard}},
           .replicas = 2,
           .replicate = Strategy::kOptimGrads}};
}

class UnitsRun {
 public:
  UnitsRun(UnitsCase of, int64_t width) : case_(std::move(of)), width_(width) {}
  UnitsRun& MicroBatches(int64_t count) {
    shape_.micro_batches = count;
    return *this;
  }
  UnitsRun& InPlace(bool in_place) {
    shape_.in_place = in_place;
    return *this;
  }

  plan::JobSpec Job(const std::string& folder) const {
    plan::JobSpec spec = JobOf(shape_, kUnitsModel, folder);
    spec.strategy = case_.strategy;
    spec.units = case_.units;
    spec.replicas = case_.replicas;
    spec.replicate_strategy = case_.replicate;
    return spec;
  }
  RecordArgs Args(const std::string& folder) const {
    RecordArgs args = ArgsOf(shape_, Job(folder));
    args.ranks = ranks();
    args.last_step = kSteps;
    return args;
  }
  int ranks() const { return static_cast<int>(width_ * case_.replicas); }
  std::string name() const {
    return absl::StrCat(case_.name,
                        " on ",
                        ranks(),
                        ", ",
                        shape_.micro_batches,
                        shape_.in_place ? " in place" : "");
  }

 private:
  UnitsCase case_;
  int64_t width_;
  StrategyCase shape_;  // its strategy and width are not read
};

class UnitStrategies : public ::testing::Test {
 protected:
  UnitStrategies() { std::filesystem::remove_all(folder_); }
  ~UnitStrategies() override { std::filesystem::remove_all(folder_); }

  // One rank, one strategy.
  const Recording& Reference(int64_t micro_batches) {
    Recording& reference = references_[micro_batches];
    if (reference.steps.empty()) {
      reference = Record(UnitsRun({}, 1).MicroBatches(micro_batches).InPlace(true).Args(folder_));
    }
    return reference;
  }

  const std::string folder_ = OwnFolder(absl::StrCat(
      "ravel_unit_strategies_", ::testing::UnitTest::GetInstance()->current_test_info()->name()));
  std::map<int64_t, Recording> references_;
};

TEST_F(UnitStrategies, AnyAssignmentGivesTheBitsOfOneRank) {
  for (const UnitsCase& tested : UnitsCases()) {
    for (const int64_t width : {1, 2, 3, 4}) {
      const int64_t micro_batches = width == 3 ? 3 : 1;
      for (const bool in_place : {false, true}) {
        const UnitsRun run = UnitsRun(tested, width).MicroBatches(micro_batches).InPlace(in_place);
        EXPECT_EQ(FirstDifference(Reference(micro_batches), Record(run.Args(folder_))), "")
            << run.name();
      }
    }
  }
  for (const UnitsCase& tested : ReplicaCases()) {
    for (const int64_t width : {1, 2}) {
      const UnitsRun run = UnitsRun(tested, width).InPlace(width == 2);
      EXPECT_EQ(FirstDifference(Reference(1), Record(run.Args(folder_))), "") << run.name();
    }
  }
}

// Over TCP nothing is read in place.
TEST_F(UnitStrategies, CopiedMemoryGivesTheSameBits) {
  RecordArgs args = UnitsRun(UnitsCases()[2], 3).InPlace(true).Args(folder_);
  args.shared_memory = false;
  EXPECT_EQ(FirstDifference(Reference(1), Record(args)), "");
}

TEST_F(UnitStrategies, AnyStepGoesOnUnderAnotherAssignment) {
  std::vector<UnitsRun> turns;
  for (const UnitsCase& tested : UnitsCases()) {
    turns.emplace_back(tested, 1 + static_cast<int64_t>(turns.size()) % 4);
  }
  for (const UnitsCase& tested : ReplicaCases()) {
    turns.emplace_back(tested, 2);
  }
  Recording state;
  std::vector<StepResult> steps;
  for (int64_t step = 0; step < kSteps; ++step) {
    RecordArgs args = turns[static_cast<size_t>(step) % turns.size()].Args(folder_);
    args.first_step = step;
    args.last_step = step + 1;
    args.start = step == 0 ? nullptr : &state;
    Recording next = Record(args);
    steps.insert(steps.end(), next.steps.begin(), next.steps.end());
    state = std::move(next);
  }
  state.steps = steps;
  EXPECT_EQ(FirstDifference(Reference(1), state), "");
}

std::vector<uint32_t> UnitsLossBits(const std::vector<StepReport>& steps, size_t from = 0) {
  std::vector<uint32_t> bits;
  for (size_t i = from; i < steps.size(); ++i) {
    bits.push_back(std::bit_cast<uint32_t>(steps[i].loss));
  }
  return bits;
}

// Files have no strategies: what one assignment saves, every other reads.
TEST_F(UnitStrategies, ACheckpointOfOneAssignmentGoesOnUnderAnother) {
  int64_t epoch = 1;
  const auto run = [&](const UnitsRun& tested, const std::string& from, int64_t first_step) {
    EpochArgs args;
    args.spec = tested.Job(folder_);
    args.spec.steps = kSteps;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 1;
    args.ranks = tested.ranks();
    args.epoch = epoch;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch++);
    args.restore_path = from;
    args.first_step = first_step;
    EpochOutcome outcome = RunEpoch(args);
    for (const absl::Status& result : outcome.results) {
      EXPECT_TRUE(result.ok()) << tested.name() << ": " << result;
    }
    EXPECT_TRUE(outcome.commit_errors.empty()) << tested.name();
    return outcome;
  };
  const EpochOutcome reference = run(UnitsRun({}, 1), "", 0);
  ASSERT_EQ(reference.steps.size(), static_cast<size_t>(kSteps));
  const std::vector<UnitsRun> turns = {UnitsRun(UnitsCases()[0], 3),
                                       UnitsRun(ReplicaCases()[0], 2),
                                       UnitsRun(UnitsCases()[2], 2),
                                       UnitsRun(ReplicaCases()[1], 1)};
  for (size_t i = 0; i < turns.size(); ++i) {
    const EpochOutcome whole = run(turns[i], "", 0);
    EXPECT_EQ(UnitsLossBits(whole.steps), UnitsLossBits(reference.steps)) << turns[i].name();
    const UnitsRun& next = turns[(i + 1) % turns.size()];
    const auto step = static_cast<int64_t>(i + 1);
    ASSERT_EQ(whole.committed.count(step), 1u);
    const EpochOutcome resumed = run(next, whole.committed.at(step), step);
    EXPECT_EQ(UnitsLossBits(resumed.steps),
              UnitsLossBits(reference.steps, static_cast<size_t>(step)))
        << turns[i].name() << ", then " << next.name();
  }
}

// 2 x 2 ranks.
TEST_F(UnitStrategies, EveryCombinationOfTwoAxesTrainsOrIsRefused) {
  constexpr Strategy kAll[] = {
      Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, kParams};
  std::vector<std::string> trained;
  for (const Strategy outer : kAll) {
    for (const Strategy inner : kAll) {
      const std::string names = absl::StrCat(
          std::string(plan::RowOf(outer).name), "/", std::string(plan::RowOf(inner).name));
      const UnitsRun run(
          {.name = names, .strategy = inner, .units = {}, .replicas = 2, .replicate = outer}, 2);
      const absl::StatusOr<Recording> made = TryRecord(run.Args(folder_));
      if (made.ok()) {
        EXPECT_EQ(FirstDifference(Reference(1), *made), "") << names;
        trained.push_back(names);
        continue;
      }
      EXPECT_THAT(std::string(made.status().message()),
                  AllOf(HasSubstr("parallelism.replicateStrategy: "),
                        HasSubstr("tensor model.embed_tokens"),
                        HasSubstr("axis "),
                        HasSubstr("from "),
                        HasSubstr(" to ")))
          << names;
    }
  }
  EXPECT_THAT(trained,
              ::testing::ElementsAre("no_shard/no_shard",
                                     "no_shard/optim",
                                     "no_shard/optim_grads",
                                     "no_shard/optim_grads_params",
                                     "optim/optim",
                                     "optim/optim_grads",
                                     "optim/optim_grads_params",
                                     "optim_grads/optim",
                                     "optim_grads/optim_grads",
                                     "optim_grads/optim_grads_params"));
}

}  // namespace
}  // namespace ravel::trainer
