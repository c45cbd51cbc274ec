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
auto ExpectSums(const std::function<double(const plan::ShardingPlan&, int unit)>& expected,
                const std::string& name) {
  return [expected, name](
             const plan::ShardingPlan& plan, int rank, std::vector<ParameterGroup>& groups) {
    for (const ParameterGroup& group : groups) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        for (int64_t i = 0; group.rules().trainable && i < piece.end - piece.begin; ++i) {
          ASSERT_EQ(static_cast<double>(group.optimizer_gradient()[piece.shard_offset + i]),
                    expected(plan, group.layout().unit))
              << name << ", rank " << rank << ", unit " << group.layout().unit << ", element " << i;
        }
      }
    }
  };
}

// The table of the embedding is also the head's: two gradient calls.
double TiedSum(const plan::ShardingPlan& plan, int unit) {
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

// EveryMicroBatchCounts, FreshStagingIsOverwritten (staging begins as NaN), TiedReducedOnce,
// OneRankGroupAccumulatesOnce, NoPremultipliedSumOnOneRank and ScaleAppliesToIncomingOnly in one
// number. Fails without: BeginReduce's order of turns; `accumulates` of kBackward; kJoinGradients.
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
    run.inspect = [&](const plan::ShardingPlan& plan, int, std::vector<ParameterGroup>& groups) {
      MutexLock lock(mutex);
      elements = plan.inventory.parameter_count();
      for (const ParameterGroup& group : groups) {
        for (const plan::OwnedPiece& piece : group.measured_pieces()) {
          counted += piece.end - piece.begin;
          for (int64_t i = 0; i < piece.end - piece.begin; ++i) {
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
      run.used = [](int unit, int64_t lane, int64_t micro_batch) {
        return unit != 1 || (lane + micro_batch) % 3 == 0;
      };
      const auto expected = [](const plan::ShardingPlan& plan, int unit) {
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

// Fails when the second backward of the unit overwrites, or when each of them is reduced.
TEST(SyntheticGradients, UnitCalledTwice) {
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, 1);
    run.adjust = [](plan::ShardingPlan& plan) { plan.inventory.order = {0, 1, 2, 1, 3}; };
    const auto expected = [](const plan::ShardingPlan& plan, int unit) {
      return unit == 1 ? 2 * WholeSum(plan.lanes) : TiedSum(plan, unit);
    };
    run.inspect = ExpectSums(expected, NameOf(mesh, 1));
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, 1);
  }
}

// Half of a unit, and a whole unit between trained ones.
TEST(SyntheticGradients, PartlyFrozenUnitAndFrozenUnitInMiddle) {
  for (const Mesh& mesh : Meshes()) {
    SyntheticRun run = RunOn(mesh, 3);
    run.spec.freeze = {"model.layers.0.mlp.*", "model.layers.1.*"};
    run.inspect =
        [&](const plan::ShardingPlan& plan, int rank, std::vector<ParameterGroup>& groups) {
          ExpectSums(TiedSum, NameOf(mesh, 3))(plan, rank, groups);
          int frozen = 0;
          for (const ParameterGroup& group : groups) {
            frozen += group.rules().trainable ? 0 : 1;
            EXPECT_EQ(group.exp_avg() == nullptr, !group.rules().trainable);
          }
          EXPECT_GE(frozen, 2);
        };
    EXPECT_EQ(RunSynthetic(run), absl::OkStatus()) << NameOf(mesh, 3);
  }
}

}  // namespace
}  // namespace ravel::shard
