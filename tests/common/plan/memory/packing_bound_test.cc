// Arenas of every strategy are packed close to the most that is ever alive at once.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/memory/buffer_plan.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

constexpr double kMostOverBound = 1.05;

struct Strategies {
  const char* name;
  Strategy shard;
  Strategy replicate;
  int64_t replicas;
};
constexpr std::array<Strategies, 6> kStrategies = {{
    {"zero0", Strategy::kNoShard, Strategy::kNoShard, 1},
    {"zero1", Strategy::kOptim, Strategy::kNoShard, 1},
    {"zero2", Strategy::kOptimGrads, Strategy::kNoShard, 1},
    {"zero3", Strategy::kOptimGradsParams, Strategy::kNoShard, 1},
    {"hsdp", Strategy::kOptimGradsParams, Strategy::kNoShard, 2},
    {"hfsdp", Strategy::kOptimGradsParams, Strategy::kOptim, 2},
}};

// What else changes which buffers are alive together.
struct Rest {
  int64_t lanes = 16;
  int64_t micro_batches = 1;  // of each lane
  RecomputePolicy recompute = RecomputePolicy::kNone;
  bool narrow = false;  // bf16 weights and activations
};

// One of all, or all of them where RAVEL_ALL is set.
std::vector<Rest> Rests(size_t at) {
  std::vector<Rest> all;
  for (const auto recompute : {RecomputePolicy::kBlock,
                               RecomputePolicy::kNone,
                               RecomputePolicy::kNorm,
                               RecomputePolicy::kMlp}) {
    for (const int64_t micro_batches : {1, 3}) {
      for (const bool narrow : {false, true}) {
        for (const int64_t lanes : {16, 8}) {
          all.push_back({.lanes = lanes,
                         .micro_batches = micro_batches,
                         .recompute = recompute,
                         .narrow = narrow});
        }
      }
    }
  }
  return std::getenv("RAVEL_ALL") != nullptr ? all : std::vector<Rest>{all[at % all.size()]};
}

// A window of one unit at a time, of the planner's choice, and of the whole model.
constexpr int64_t kWindows[] = {1, 0, int64_t{1} << 40};

struct Cell {
  Strategies strategy;
  int64_t width = 1;
  int64_t window_bytes = 0;
  bool shared_memory = false;
};

std::vector<Cell> Cells() {
  std::vector<Cell> cells;
  for (const Strategies& strategy : kStrategies) {
    for (const int64_t width : {1, 2, 3, 4, 8}) {
      for (const int64_t window_bytes : kWindows) {
        for (const bool shared_memory : {false, true}) {
          cells.push_back({strategy, width, window_bytes, shared_memory});
        }
      }
    }
  }
  return cells;
}

PlanRequest RequestOf(const ModelConfig& config, const Cell& cell, const Rest& rest) {
  PlanRequest request;
  request.ranks = cell.width * cell.strategy.replicas;
  request.shared_memory = cell.shared_memory;
  request.spec = testing::SpecOf(config, std::max(rest.lanes, request.ranks));
  JobSpec& spec = request.spec;
  spec.strategy = cell.strategy.shard;
  spec.replicate_strategy = cell.strategy.replicate;
  spec.replicas = cell.strategy.replicas;
  spec.micro_batch = 1;
  spec.global_batch = spec.virtual_ranks * rest.micro_batches;
  spec.recompute = rest.recompute;
  spec.compute = rest.narrow ? ComputeType::kBF16 : ComputeType::kF32;
  spec.gather_window_bytes = cell.window_bytes;
  spec.staging_window_bytes = cell.window_bytes;
  return request;
}

class PackingBound : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(PackingBound, HoldsForEveryStrategyWidthAndWindow) {
  size_t plans = 0;
  double worst = 1;
  for (const Cell& cell : Cells()) {
    for (const Rest& rest : Rests(plans)) {
      const absl::StatusOr<ShardingPlan> plan =
          BuildShardingPlan(RequestOf(GetParam().config, cell, rest));
      ASSERT_TRUE(plan.ok()) << cell.strategy.name << ": " << plan.status();
      const double over = static_cast<double>(plan->memory.packed_bytes()) /
                          static_cast<double>(plan->memory.lower_bound_bytes);
      EXPECT_GE(over, 1);
      EXPECT_LE(over, kMostOverBound)
          << cell.strategy.name << ", width " << cell.width << ", window " << cell.window_bytes
          << ", shared " << cell.shared_memory << ", " << rest.lanes << " lanes, "
          << rest.micro_batches << " micro-batches, recompute " << static_cast<int>(rest.recompute)
          << ", narrow " << rest.narrow;
      worst = std::max(worst, over);
      ++plans;
    }
  }
  std::printf("%zu plans, packed over bound at most %.4f\n", plans, worst);
}

INSTANTIATE_TEST_SUITE_P(Models,
                         PackingBound,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

}  // namespace
}  // namespace ravel::plan
