// One communicator for each axes and stream of a plan's moves.

#include "worker/shard/mesh_communicators.h"

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/worker/shard/synthetic_ranks.h"
#include "worker/comm/local_communicator.h"

namespace ravel::shard {
namespace {

plan::ShardingPlan PlanOf(plan::Strategy shard, plan::Strategy replicate, int64_t replicas) {
  plan::JobSpec spec = SyntheticJob(8, 1);
  spec.strategy = shard;
  spec.replicate_strategy = replicate;
  spec.replicas = replicas;
  return *plan::BuildShardingPlan({.spec = spec, .ranks = 4});
}

// Calls `check` on every rank of the plan.
void OnRanks(const plan::ShardingPlan& plan,
             const std::function<void(int, const MeshCommunicators&)>& check) {
  const auto world = comm::CreateLocalGroup(static_cast<int>(plan.ranks));
  ASSERT_TRUE(world.ok()) << world.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const absl::StatusOr<MeshCommunicators> made =
          MeshCommunicators::Create(*(*world)[static_cast<size_t>(rank)], plan.mesh, plan.moves);
      ASSERT_TRUE(made.ok()) << made.status();
      check(rank, *made);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(MeshCommunicators, EveryMoveHasTheRanksOfItsAxes) {
  const plan::ShardingPlan plan =
      PlanOf(plan::Strategy::kOptimGradsParams, plan::Strategy::kOptim, 2);
  OnRanks(plan, [&](int rank, const MeshCommunicators& made) {
    for (const plan::ProgramMove& move : plan.moves.moves) {
      const comm::Communicator& group = made.Of(move);
      const std::vector<int64_t> members = plan.mesh.GroupOf(rank, move.axes);
      EXPECT_EQ(group.size(), static_cast<int>(members.size()));
      EXPECT_EQ(group.rank(), plan.mesh.GroupIndex(rank, move.axes));
    }
    EXPECT_EQ(&made.Of(plan.moves.moves[plan.moves.statistics]), &made.world());
  });
}

// Collectives of one communicator are serial: those of two streams need two.
TEST(MeshCommunicators, StreamsShareNoneAndMovesOfOneStreamDo) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kNoShard, plan::Strategy::kNoShard, 2);
  OnRanks(plan, [&](int, const MeshCommunicators& made) {
    for (const plan::ProgramMove& a : plan.moves.moves) {
      for (const plan::ProgramMove& b : plan.moves.moves) {
        const bool of_world = a.of == plan::MoveOf::kStatistics;
        const bool same = of_world == (b.of == plan::MoveOf::kStatistics) &&
                          (of_world || (a.axes == b.axes && a.stream == b.stream));
        EXPECT_EQ(&made.Of(a) == &made.Of(b), same);
      }
    }
    // The world, the shard axis for sums and their gather, the replicas. Weights never move.
    EXPECT_EQ(made.all().size(), 3U);
  });
}

}  // namespace
}  // namespace ravel::shard
