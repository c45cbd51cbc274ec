// What the executor refuses: each of these is a bug of ours that must not train on.

#include "worker/shard/unit_executor.h"

#include <gtest/gtest.h>

#include "worker/comm/local_communicator.h"

namespace ravel::shard {
namespace {

class NoActions final : public StepActions {
 public:
  std::vector<std::byte> PackStatistics() override { return std::vector<std::byte>(8); }
  void UnpackStatistics(std::span<const std::byte> all) override { exchanged += all.size(); }
  void Decide() override { ++decided; }
  void UpdateUnit(int unit) override { updated.push_back(unit); }

  size_t exchanged = 0;
  int decided = 0;
  std::vector<int> updated;
};

plan::JobSpec TinyJob(int64_t lanes) {
  plan::JobSpec spec;
  plan::ModelConfig model;
  model.vocab_size = 19;
  model.hidden_size = 10;
  model.intermediate_size = 13;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 2;
  model.head_dim = 6;
  model.max_position_embeddings = 8;
  spec.model = model;
  spec.data.sequence_length = 4;
  spec.global_batch = lanes;
  spec.virtual_ranks = lanes;
  spec.steps = 1;
  return spec;
}

// One rank with everything that an executor needs; all weights, ids and targets are zero.
class OneRank {
 public:
  explicit OneRank(int64_t lanes)
      : plan_(*plan::BuildShardingPlan({.spec = TinyJob(lanes), .ranks = 1})),
        communicators_(*comm::CreateLocalGroup(1)) {
    comm::Communicator& communicator = *communicators_[0];
    EXPECT_TRUE(communicator
                    .AllocateArena({.private_bytes = plan_.memory.private_bytes,
                                    .symmetric_bytes = plan_.memory.symmetric_bytes,
                                    .common_bytes = plan_.memory.common_bytes})
                    .ok());
    buffers_ = std::make_unique<ArenaBuffers>(plan_, communicator);
    for (size_t unit = 0; unit < plan_.inventory.units.size(); ++unit) {
      groups_.emplace_back(plan_, *buffers_, static_cast<int>(unit), 0);
    }
    modules_ = model::MakeModules(plan_.inventory, plan_.micro_batch);
    executor_ = std::make_unique<UnitExecutor>(UnitExecutor::Args{.plan = plan_,
                                                                  .communicator = communicator,
                                                                  .stream = stream_,
                                                                  .buffers = *buffers_,
                                                                  .groups = groups_,
                                                                  .modules = modules_,
                                                                  .actions = &actions_});
  }

  UnitExecutor& executor() { return *executor_; }
  std::vector<ParameterGroup>& groups() { return groups_; }
  comm::Communicator& communicator() { return *communicators_[0]; }
  const NoActions& actions() const { return actions_; }

 private:
  plan::ShardingPlan plan_;
  std::vector<std::unique_ptr<comm::Communicator>> communicators_;
  kernels::CpuStream stream_;
  NoActions actions_;
  std::unique_ptr<ArenaBuffers> buffers_;
  std::vector<ParameterGroup> groups_;
  std::vector<std::unique_ptr<model::Module>> modules_;
  std::unique_ptr<UnitExecutor> executor_;
};

TEST(UnitExecutor, AStepUpdatesEachUnitOnceAndAdvancesItsGeneration) {
  OneRank rank(1);
  ASSERT_TRUE(rank.executor().Run(plan::Phase::kOnly, 0).ok());
  EXPECT_EQ(rank.actions().decided, 1);
  EXPECT_EQ(rank.actions().exchanged, 8u);
  EXPECT_EQ(rank.actions().updated, (std::vector<int>{0, 1, 2, 3}));
  for (const ParameterGroup& group : rank.groups()) {
    EXPECT_EQ(group.generation(), Generation{1});
  }
}

TEST(UnitExecutor, EvaluationChangesNoGeneration) {
  OneRank rank(1);
  ASSERT_TRUE(rank.executor().Run(plan::Phase::kEval, 0).ok());
  ASSERT_TRUE(rank.executor().Run(plan::Phase::kEval, 0).ok());
  ASSERT_TRUE(rank.executor().Run(plan::Phase::kOnly, 0).ok());
  for (const ParameterGroup& group : rank.groups()) {
    EXPECT_EQ(group.generation(), Generation{1});
  }
}

TEST(UnitExecutor, AnErrorNamesInstructionUnitAndTurn) {
  OneRank rank(1);
  rank.communicator().Abort("a peer is lost");
  const absl::Status status = rank.executor().Run(plan::Phase::kOnly, 0);
  ASSERT_FALSE(status.ok());
  const std::string message(status.message());
  EXPECT_NE(message.find("embed"), std::string::npos) << message;
  EXPECT_NE(message.find("turn 0"), std::string::npos) << message;
  EXPECT_NE(message.find("a peer is lost"), std::string::npos) << message;
}

// The BLAS has a thread of its own, so the child starts afresh.
class UnitExecutorDeathTest : public ::testing::Test {
 protected:
  UnitExecutorDeathTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(UnitExecutorDeathTest, WeightsBeforeTheirGatherAreRefused) {
  OneRank rank(2);
  // The last turn's program counts on the first one's gathers.
  EXPECT_DEATH(rank.executor().Run(plan::Phase::kLast, 1).IgnoreError(),
               "weights used before their gather");
}

TEST_F(UnitExecutorDeathTest, WeightsOfAnOlderGenerationAreRefused) {
  OneRank rank(2);
  ASSERT_TRUE(rank.executor().Run(plan::Phase::kFirst, 0).ok());
  rank.groups()[1].AdvanceGeneration();
  EXPECT_DEATH(rank.executor().Run(plan::Phase::kLast, 1).IgnoreError(),
               "weights of an older generation");
}

}  // namespace
}  // namespace ravel::shard
