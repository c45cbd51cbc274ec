// Every strategy on every width gives the bits of one rank: weights, moments and losses after 20
// steps.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/plan/plan_pieces.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

using plan::RecomputePolicy;

constexpr int64_t kMatrixSteps = 20;
// Tensors of the first lie whole on one rank each, those of the second are cut between ranks.
constexpr char kMatrixModel[] = "odd_tied";
constexpr char kCutModel[] = "bundled_rope_scaling";

std::string MatrixFolder() {
  return OwnFolder("ravel_strategy_matrix");
}

// One rank, ZeRO-3, nothing recomputed, everything in memory at once.
const Recording& Reference(int64_t micro_batches, const std::string& model = kMatrixModel) {
  static std::map<std::pair<int64_t, std::string>, Recording> references;
  Recording& reference = references[{micro_batches, model}];
  if (reference.steps.empty()) {
    const StrategyCase one = {.micro_batches = micro_batches, .in_place = true};
    RecordArgs args = ArgsOf(one, JobOf(one, model, MatrixFolder()));
    args.last_step = kMatrixSteps;
    reference = Record(args);
  }
  return reference;
}

void ExpectReferenceBits(const StrategyCase& tested, const std::string& model = kMatrixModel) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, MatrixFolder()));
  args.last_step = kMatrixSteps;
  const Recording run = Record(args);
  ASSERT_EQ(run.steps.size(), static_cast<size_t>(kMatrixSteps));
  EXPECT_EQ(FirstDifference(Reference(tested.micro_batches, model), run), "") << tested.name();
}

std::vector<StrategyCase> AllCases() {
  std::vector<StrategyCase> cases;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {1, 2, 3, 4, 8}) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const RecomputePolicy recompute : {RecomputePolicy::kNone, RecomputePolicy::kBlock}) {
          for (const bool small : {false, true}) {
            cases.push_back({.strategy = strategy.name,
                             .width = width,
                             .micro_batches = micro_batches,
                             .recompute = recompute,
                             .small_windows = small});
          }
        }
      }
    }
  }
  return cases;
}

// Cases that differ in one coordinate, one way.
std::vector<StrategyCase> Neighbours(const StrategyCase& tested) {
  std::vector<StrategyCase> neighbours;
  for (const StrategyCase& other : AllCases()) {
    const int differences = (other.strategy != tested.strategy) + (other.width != tested.width) +
                            (other.micro_batches != tested.micro_batches) +
                            (other.recompute != tested.recompute) +
                            (other.small_windows != tested.small_windows);
    if (differences == 1) {
      neighbours.push_back(other);
    }
  }
  return neighbours;
}

// Why two cases are one plan; empty: they must not be.
std::string WhyEqual(const StrategyCase& a, const StrategyCase& b) {
  const bool windows_only = a.small_windows != b.small_windows;
  const bool resident = a.strategy == "ZeRO0" || a.strategy == "ZeRO1" || a.strategy == "ZeRO2";
  if (windows_only && resident && a.micro_batches > 1) {
    return "weights are resident and staging outlives its micro-batch: no window is used";
  }
  const bool first_two = (a.strategy == "ZeRO1" && b.strategy == "ZeRO2") ||
                         (a.strategy == "ZeRO2" && b.strategy == "ZeRO1");
  if (first_two && (kMatrixLanes % a.width != 0 || a.width == 1)) {
    return "a width that is 1 or does not divide the lanes: both reduce in every turn";
  }
  return "";
}

class MatrixPlans : public ::testing::TestWithParam<const char*> {};

TEST_P(MatrixPlans, EachCaseDiffersFromItsNeighbours) {
  std::map<std::string, std::string> hashes;
  for (const StrategyCase& tested : AllCases()) {
    hashes[tested.name()] = PlanHash(tested, JobOf(tested, GetParam(), MatrixFolder()));
  }
  std::set<std::string> listed;
  for (const StrategyCase& tested : AllCases()) {
    for (const StrategyCase& other : Neighbours(tested)) {
      const bool equal = hashes[tested.name()] == hashes[other.name()];
      const std::string reason = WhyEqual(tested, other);
      EXPECT_EQ(equal, !reason.empty()) << tested.name() << " and " << other.name();
      if (equal && listed.insert(std::min(tested.name(), other.name())).second) {
        std::printf("%s = %s: %s\n", tested.name().c_str(), other.name().c_str(), reason.c_str());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, MatrixPlans, ::testing::Values(kMatrixModel, kCutModel));

// Tensors that more than one rank stores a part of.
int CutTensors(const char* model, int64_t width) {
  const StrategyCase tested = {.width = width};
  auto plan =
      PlanLocalRanks({.spec = JobOf(tested, model, MatrixFolder()), .ranks = tested.ranks()});
  CHECK_MSG(plan.ok(), std::string(plan.status().message()).c_str());
  int cut = 0;
  for (int group = 0; group < static_cast<int>(plan->groups.size()); ++group) {
    std::map<plan::TensorId, int> owners;
    for (int rank = 0; rank < plan->ranks; ++rank) {
      for (const plan::OwnedPiece& piece : plan::StoredPieces(*plan, group, rank)) {
        cut += ++owners[piece.tensor] == 2 ? 1 : 0;
      }
    }
  }
  return cut;
}

TEST(StrategyMatrix, BothKindsOfShardsAreTried) {
  for (const int64_t width : {2, 3, 4, 8}) {
    EXPECT_EQ(CutTensors(kMatrixModel, width), 0) << width;
    EXPECT_GT(CutTensors(kCutModel, width), 0) << width;
  }
}

class StrategyMatrix : public ::testing::TestWithParam<std::tuple<StrategyCase, const char*>> {};

TEST_P(StrategyMatrix, GivesTheBitsOfOneRank) {
  ExpectReferenceBits(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

std::string MatrixCaseName(
    const ::testing::TestParamInfo<std::tuple<StrategyCase, const char*>>& tested) {
  return absl::StrCat(std::get<0>(tested.param).name(), "_", std::get<1>(tested.param));
}

// A diagonal through the matrix: every value of every coordinate with every strategy.
std::vector<StrategyCase> FewCases() {
  std::vector<StrategyCase> cases;
  int64_t turn = 0;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {2, 3}) {
      cases.push_back(
          {.strategy = strategy.name,
           .width = width,
           .micro_batches = turn % 2 == 0 ? 1 : 3,
           .recompute = turn % 3 == 0 ? RecomputePolicy::kBlock : RecomputePolicy::kNone,
           .small_windows = turn % 4 < 2,
           .in_place = turn % 3 == 1});
      ++turn;
    }
  }
  cases.push_back({.strategy = "ZeRO3", .width = 8, .recompute = RecomputePolicy::kMlp});
  cases.push_back({.strategy = "ZeRO1", .width = 4, .recompute = RecomputePolicy::kNorm});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Few,
                         StrategyMatrix,
                         ::testing::Combine(::testing::ValuesIn(FewCases()),
                                            ::testing::Values(kMatrixModel, kCutModel)),
                         MatrixCaseName);
INSTANTIATE_TEST_SUITE_P(All,
                         StrategyMatrix,
                         ::testing::Combine(::testing::ValuesIn(AllCases()),
                                            ::testing::Values(kMatrixModel, kCutModel)),
                         MatrixCaseName);

// Both kinds of shards.
class StrategyTransports : public ::testing::TestWithParam<const char*> {};
class StrategyResume : public ::testing::TestWithParam<const char*> {};
class StrategyEvaluation : public ::testing::TestWithParam<const char*> {};

// Widths take turns, other ones for the other model; both with RAVEL_EVERY_CASE (label slow).
TEST_P(StrategyTransports, SharedOrCopiedMemoryGivesTheSameBits) {
  int64_t turn = GetParam() == std::string(kMatrixModel) ? 0 : 1;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    ++turn;
    for (const int64_t width : {2, 3}) {
      if (width - 2 != turn % 2 && std::getenv("RAVEL_EVERY_CASE") == nullptr) {
        continue;
      }
      StrategyCase tested = {.strategy = strategy.name, .width = width};
      tested.in_place = true;
      ExpectReferenceBits(tested, GetParam());
      // Over TCP nothing is read in place.
      RecordArgs copied = {.spec = JobOf(tested, GetParam(), MatrixFolder()),
                           .ranks = tested.ranks(),
                           .shared_memory = false,
                           .last_step = 3};
      RecordArgs shared = ArgsOf(tested, copied.spec);
      shared.last_step = 3;
      EXPECT_EQ(FirstDifference(Record(shared), Record(copied)), "") << tested.name();
    }
  }
}

TEST_P(StrategyResume, AnyStepGoesOnWithAnotherWidthAndStrategyInTheSameBits) {
  const std::vector<StrategyCase> turns = {
      {.strategy = "ZeRO3", .width = 4, .in_place = true},
      {.strategy = "ZeRO0", .width = 3},
      {.strategy = "HFSDP", .width = 2, .recompute = RecomputePolicy::kBlock},
      {.strategy = "ZeRO1", .width = 8, .small_windows = true},
      {.strategy = "HSDP", .width = 3, .in_place = true},
      {.strategy = "ZeRO2", .width = 1}};
  const Recording& whole = Reference(1, GetParam());
  // A new strategy and width after every step.
  Recording state;
  std::vector<StepResult> steps;
  for (int64_t step = 0; step < kMatrixSteps; ++step) {
    const StrategyCase& tested = turns[static_cast<size_t>(step) % turns.size()];
    RecordArgs args = ArgsOf(tested, JobOf(tested, GetParam(), MatrixFolder()));
    args.first_step = step;
    args.last_step = step + 1;
    args.start = step == 0 ? nullptr : &state;
    Recording next = Record(args);
    steps.insert(steps.end(), next.steps.begin(), next.steps.end());
    state = std::move(next);
  }
  state.steps = steps;
  EXPECT_EQ(FirstDifference(whole, state), "");
}

TEST_P(StrategyEvaluation, AfterEveryStepChangesNoBit) {
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    const StrategyCase tested = {.strategy = strategy.name, .width = 2, .micro_batches = 3};
    RecordArgs args = ArgsOf(tested, JobOf(tested, GetParam(), MatrixFolder()));
    args.last_step = 5;
    const Recording without = Record(args);
    args.evaluate_every_step = true;
    EXPECT_EQ(FirstDifference(without, Record(args)), "") << tested.name();
  }
}

INSTANTIATE_TEST_SUITE_P(Models, StrategyTransports, ::testing::Values(kMatrixModel, kCutModel));
INSTANTIATE_TEST_SUITE_P(Models, StrategyResume, ::testing::Values(kMatrixModel, kCutModel));
INSTANTIATE_TEST_SUITE_P(Models, StrategyEvaluation, ::testing::Values(kMatrixModel, kCutModel));

}  // namespace
}  // namespace ravel::trainer
