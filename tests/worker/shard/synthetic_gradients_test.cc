// Gradients as whole numbers: which part counts how often is exact under every strategy. Tests are
// named after the faults that they would show; each says which guard or step it fails without.

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/mutex.h"
#include "tests/worker/shard/synthetic_ranks.h"

namespace ravel::shard {
namespace {

using plan::Strategy;

struct Mesh {
  Strategy shard = Strategy::kOptimGradsParams;
  Strategy replicate = Strategy::kNoShard;
  int64_t replicas = 1;
  int ranks = 1;
};

std::vector<Mesh> Meshes() {
  std::vector<Mesh> meshes;
  for (const Strategy shard :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      meshes.push_back({.shard = shard, .ranks = ranks});
    }
  }
  for (const Strategy replicate : {Strategy::kNoShard, Strategy::kOptim}) {
    for (const int ranks : {2, 4, 6, 8}) {
      meshes.push_back({.replicate = replicate, .replicas = 2, .ranks = ranks});
    }
  }
  return meshes;
}

SyntheticRun RunOn(const Mesh& mesh, int64_t micro_batches) {
  SyntheticRun run = {.spec = SyntheticJob(8, micro_batches), .ranks = mesh.ranks};
  run.spec.strategy = mesh.shard;
  run.spec.replicate_strategy = mesh.replicate;
  run.spec.replicas = mesh.replicas;
  run.executor.poison = true;
  return run;
}

// Every element that the optimizer reads; `expected` by unit.
auto ExpectSums(const std::function<double(const plan::ShardingPlan&, plan::UnitId unit)>& expected,
                const std::string& name) {
  return [expected, name](const plan::ShardingPlan& plan, int rank, ParameterGroups& groups) {
    for (const ParameterGroup& group : groups) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        for (int64_t i = 0; group.layout().trainable && i < piece.elements(); ++i) {
          ASSERT_EQ(static_cast<double>(group.optimizer_gradient()[piece.shard_offset + i]),
                    expected(plan, group.layout().unit))
              << name << ", rank " << rank << ", unit " << group.layout().unit << ", element " << i;
        }
      }
    }
  };
}

// The table of the embedding is also the head's: two gradient calls.
double TiedSum(const plan::ShardingPlan& plan, plan::UnitId unit) {
  return WholeSum(plan.lanes) * (unit == 0 ? 2 : 1);
}

std::string NameOf(const Mesh& mesh, int64_t micro_batches) {
  return absl::StrCat("strategy ",
                      static_cast<int>(mesh.shard),
                      " x ",
                      static_cast<int>(mesh.replicate),
                      ", ",
                      mesh.replicas,
                      " replicas, ",
                      mesh.ranks,
                      " ranks, ",
                      micro_batches,
                      " micro-batches");
}

// What the tests below look at one by one, on every mesh. Fails without: BeginReduce's order of
// turns; `accumulates` of kBackward; kJoinGradients.
TEST(SyntheticGradients, EveryLaneAndMicroBatchCountsOnceUnderEveryStrategy) {
  for (const Mesh& mesh : Meshes()) {
    for (const int64_t micro_batches : {1, 3}) {
      SyntheticRun run = RunOn(mesh, micro_batches);
      run.steps = 3;  // nothing of a step is left for the next
      run.inspect = ExpectSums(TiedSum, NameOf(mesh, micro_batches));
      EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, micro_batches);
    }
  }
}

// Only a step's last micro-batch would survive. Guard: a backward that accumulates adds.
TEST(SyntheticGradients, EveryMicroBatchCounts) {
  for (const int64_t micro_batches : {1, 2, 3}) {
    SyntheticRun run = RunOn({.ranks = 2}, micro_batches);
    const double lanes = 36;  // 1 + 2 + ... + 8
    const double of_lane[] = {1, 1 + 2, 1 + 2 + 3};
    run.inspect = ExpectSums(
        [&](const plan::ShardingPlan&, plan::UnitId unit) {
          return lanes * of_lane[micro_batches - 1] * (unit == 0 ? 2 : 1);
        },
        NameOf({.ranks = 2}, micro_batches));
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus());
  }
}

// Staging begins as NaN. Guard: a first backward does not add.
TEST(SyntheticGradients, FreshStagingIsOverwritten) {
  SyntheticRun run = RunOn({.ranks = 2}, 1);
  ASSERT_TRUE(run.executor.poison);
  run.steps = 2;
  run.inspect = ExpectSums(TiedSum, "fresh");
  EXPECT_EQ(RunSynthetic(run), absl::OkStatus());
}

// Two calls, one sum. Guard: JoinCalls adds each call once.
TEST(SyntheticGradients, TiedReducedOnce) {
  for (const Mesh& mesh : {Mesh{.ranks = 2}, Mesh{.shard = Strategy::kNoShard, .ranks = 2}}) {
    SyntheticRun run = RunOn(mesh, 1);
    run.inspect = [](const plan::ShardingPlan& plan, int rank, ParameterGroups& groups) {
      ASSERT_EQ(groups.front().layout().unit, 0);
      EXPECT_EQ(groups.front().calls(), 2);
      ExpectSums(TiedSum, "tied")(plan, rank, groups);
    };
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus());
  }
}

// A sum into its own input would double from turn to turn, or from step to step. Guard: the first
// block of a step is stored by LaneCounter, not added.
TEST(SyntheticGradients, OneRankGroupAccumulatesOnce) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const int replicas : {1, 2}) {  // of one rank each
      if (replicas > 1 && strategy != Strategy::kOptimGradsParams) {
        continue;
      }
      SyntheticRun run = RunOn({.shard = strategy, .replicas = replicas, .ranks = replicas}, 1);
      run.steps = 4;
      run.inspect = ExpectSums(TiedSum, NameOf({.shard = strategy, .ranks = replicas}, 1));
      EXPECT_EQ(RunSynthetic(run), absl::OkStatus());
    }
  }
}

// A factor on the way would be left out where there is nobody to send to. Guard: nothing is scaled
// before the optimizer's one multiplier, on one rank as on several.
TEST(SyntheticGradients, NoPremultipliedSumOnOneRank) {
  for (const int ranks : {1, 2, 3}) {
    SyntheticRun run = RunOn({.ranks = ranks}, 1);
    run.inspect = ExpectSums(
        [](const plan::ShardingPlan&, plan::UnitId unit) { return unit == 0 ? 72.0 : 36.0; },
        NameOf({.ranks = ranks}, 1));
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << ranks;
  }
}

// On a bf16 wire a lane has the type of the wire, what has been added up has not: 15 * (9 + 10) =
// 285 of two lanes and 15 * (9 + 10 + 11 + 12) = 630 of four take nine bits and wait for others.
// Guard: AddChunk takes older sums as they are.
TEST(SyntheticGradients, ScaleAppliesToIncomingOnly) {
  for (const int ranks : {1, 2, 4}) {
    SyntheticRun run = {.spec = SyntheticJob(16, 5), .ranks = ranks};
    run.spec.gradient_wire = plan::WireType::kBF16;
    run.inspect = ExpectSums(TiedSum, NameOf({.ranks = ranks}, 5));
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << ranks;
  }
}

// Values of a lane are below 2^8, so bf16 holds them. The last two lanes together do not fit: they
// make 21 * (7 + 8) = 315, which takes nine bits.
TEST(SyntheticGradients, Bf16WireRoundsLanesButNoSum) {
  constexpr int64_t kMicroBatches = 6;
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, kMicroBatches);
    run.spec.gradient_wire = plan::WireType::kBF16;
    run.inspect = ExpectSums(TiedSum, absl::StrCat("bf16, ", NameOf(mesh, kMicroBatches)));
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, kMicroBatches);
  }
}

// Fails when measured pieces are counted on every replica, or with kGatherGradient's whole.
TEST(SyntheticGradients, NormCountsEachTensorOnce) {
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, 1);
    Mutex mutex;
    int64_t counted = 0;
    int64_t elements = 0;
    run.inspect = [&](const plan::ShardingPlan& plan, int, ParameterGroups& groups) {
      MutexLock lock(mutex);
      elements = plan.inventory.parameter_count();
      for (const ParameterGroup& group : groups) {
        for (const plan::OwnedPiece& piece : group.measured_pieces()) {
          counted += piece.elements();
          for (int64_t i = 0; i < piece.elements(); ++i) {
            ASSERT_EQ(static_cast<double>(group.reduced(0)[piece.shard_offset + i]),
                      TiedSum(plan, group.layout().unit));
          }
        }
      }
    };
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, 1);
    EXPECT_EQ(counted, elements) << NameOf(mesh, 1);
  }
}

// Fails without PassUnused's zero fill (staging is NaN), or when unused lanes skip their reduces.
TEST(SyntheticGradients, OptionalUnitZeroContribution) {
  for (const Mesh& mesh : Meshes()) {
    for (const int64_t micro_batches : {1, 3}) {
      SyntheticRun run = RunOn(mesh, micro_batches);
      run.adjust = [](plan::ShardingPlan& plan) { plan.inventory.units[1].optional = true; };
      run.used = [](plan::UnitId unit, int64_t lane, int64_t micro_batch) {
        return unit != 1 || (lane + micro_batch) % 3 == 0;
      };
      const auto expected = [](const plan::ShardingPlan& plan, plan::UnitId unit) {
        double sum = 0;
        for (int64_t lane = 0; lane < plan.lanes.lanes && unit == 1; ++lane) {
          for (int64_t m = 0; m < plan.lanes.micro_batches; ++m) {
            sum += (lane + m) % 3 == 0 ? static_cast<double>((lane + 1) * (m + 1)) : 0.0;
          }
        }
        return unit == 1 ? sum : TiedSum(plan, unit);
      };
      run.inspect = ExpectSums(expected, NameOf(mesh, micro_batches));
      EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, micro_batches);
    }
  }
}

// Fails when the second backward of the unit overwrites, or when each of them is reduced: there is
// one sum, as only the tied table has two.
TEST(SyntheticGradients, UnitCalledTwice) {
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, 1);
    run.adjust = [](plan::ShardingPlan& plan) { plan.inventory.order = {0, 1, 2, 1, 3}; };
    const auto expected = [](const plan::ShardingPlan& plan, plan::UnitId unit) {
      return unit == 1 ? 2 * WholeSum(plan.lanes) : TiedSum(plan, unit);
    };
    run.inspect = [&](const plan::ShardingPlan& plan, int rank, ParameterGroups& groups) {
      ExpectSums(expected, NameOf(mesh, 1))(plan, rank, groups);
      for (const ParameterGroup& group : groups) {
        EXPECT_EQ(group.calls(), group.layout().unit == 0 ? 2 : 1);
      }
    };
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, 1);
  }
}

// Trained tensors have their whole sums, frozen ones no state.
void ExpectFrozen(const std::string& pattern, plan::UnitId unit, bool whole_unit) {
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, 3);
    run.spec.freeze = {pattern};
    run.inspect = [&](const plan::ShardingPlan& plan, int rank, ParameterGroups& groups) {
      ExpectSums(TiedSum, NameOf(mesh, 3))(plan, rank, groups);
      int frozen = 0;
      int trained = 0;
      for (const ParameterGroup& group : groups) {
        const bool trains = group.layout().trainable;
        EXPECT_EQ(group.StoredAt(0, 0).states[0].data == nullptr, !trains);
        EXPECT_TRUE(trains || group.layout().unit == unit);
        frozen += trains ? 0 : 1;
        trained += trains && group.layout().unit == unit ? 1 : 0;
      }
      EXPECT_GE(frozen, 1);
      EXPECT_EQ(trained == 0, whole_unit);
    };
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, 3);
  }
}

// Fails when frozen tensors share a group with trained ones.
TEST(SyntheticGradients, PartlyFrozenUnit) {
  ExpectFrozen("model.layers.0.mlp.*", 1, false);
}

// Fails when the backward of a frozen unit is left out, and with it those below.
TEST(SyntheticGradients, FrozenUnitInMiddle) {
  ExpectFrozen("model.layers.1.*", 2, true);
}

}  // namespace
}  // namespace ravel::shard
