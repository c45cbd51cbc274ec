// What the executor refuses: each of these is a bug of ours that must not train on.

#include "worker/shard/unit_executor.h"

#include <gtest/gtest.h>

#include "worker/comm/local_communicator.h"
#include "worker/shard/host_replay.h"

namespace ravel::shard {
namespace {

class NoActions final : public StepActions {
 public:
  StatisticsMessages Measure(kernels::Stream&) override {
    return {.mine = &mine, .all = &all, .words = 1};
  }
  absl::Status Decide(kernels::Stream&) override {
    ++decided;
    return absl::OkStatus();
  }
  absl::Status UpdateGroup(kernels::Stream&, plan::GroupId group, const QuantizedUpdate&) override {
    updated.push_back(group);
    return absl::OkStatus();
  }

  int64_t mine = 7;
  int64_t all = 0;  // of one rank
  int decided = 0;
  std::vector<plan::GroupId> updated;
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
    mesh_ = *MeshCommunicators::Create(communicator, plan_.mesh, plan_.moves);
    buffers_ = std::make_unique<ArenaBuffers>(plan_, communicator);
    for (size_t group = 0; group < plan_.groups.size(); ++group) {
      groups_.emplace_back(plan_, *buffers_, static_cast<int>(group), 0);
    }
    modules_ = model::MakeModules(plan_.inventory, plan_.micro_batch);
    executor_ = std::make_unique<UnitExecutor>(UnitExecutor::Args{.plan = plan_,
                                                                  .communicators = mesh_,
                                                                  .backend = backend_,
                                                                  .buffers = *buffers_,
                                                                  .groups = groups_,
                                                                  .modules = modules_,
                                                                  .actions = &actions_});
    EXPECT_TRUE(executor_->Prepare().ok());
  }

  absl::Status Run(int64_t program) {
    return executor_->Run({.slot = plan::SlotOf(plan_.lanes, program)});
  }
  absl::Status Evaluate() { return executor_->Run({.slot = {.phase = plan::Phase::kEval}}); }
  UnitExecutor& executor() { return *executor_; }
  size_t groups() const { return groups_.size(); }
  comm::Communicator& communicator() { return *communicators_[0]; }
  const NoActions& actions() const { return actions_; }

 private:
  plan::ShardingPlan plan_;
  std::vector<std::unique_ptr<comm::Communicator>> communicators_;
  MeshCommunicators mesh_;
  HostReplay backend_;
  NoActions actions_;
  std::unique_ptr<ArenaBuffers> buffers_;
  ParameterGroups groups_;
  model::Modules modules_;
  std::unique_ptr<UnitExecutor> executor_;
};

TEST(UnitExecutor, AStepUpdatesEachGroupOnceAndAdvancesItsGeneration) {
  OneRank rank(1);
  ASSERT_EQ(rank.Run(0), absl::OkStatus());
  EXPECT_EQ(rank.actions().decided, 1);
  EXPECT_EQ(rank.actions().all, rank.actions().mine);
  ASSERT_EQ(rank.actions().updated.size(), rank.groups());
  for (size_t group = 0; group < rank.groups(); ++group) {
    EXPECT_EQ(rank.actions().updated[group], static_cast<int>(group));
    EXPECT_EQ(rank.executor().generation(static_cast<int>(group)), Generation{1});
  }
}

TEST(UnitExecutor, EvaluationChangesNoGeneration) {
  OneRank rank(1);
  ASSERT_EQ(rank.Evaluate(), absl::OkStatus());
  ASSERT_EQ(rank.Evaluate(), absl::OkStatus());
  ASSERT_EQ(rank.Run(0), absl::OkStatus());
  for (size_t group = 0; group < rank.groups(); ++group) {
    EXPECT_EQ(rank.executor().generation(static_cast<int>(group)), Generation{1});
  }
}

TEST(UnitExecutor, AnErrorNamesInstructionUnitAndTurn) {
  OneRank rank(1);
  rank.communicator().Abort("a peer is lost");
  const absl::Status status = rank.Run(0);
  ASSERT_FALSE(status.ok());
  const std::string message(status.message());
  EXPECT_NE(message.find("embed"), std::string::npos) << message;
  EXPECT_NE(message.find("turn 0"), std::string::npos) << message;
  EXPECT_NE(message.find("a peer is lost"), std::string::npos) << message;
}

TEST(UnitExecutor, WeightsBeforeTheirGatherAreRefused) {
  OneRank rank(2);
  // The last turn's program counts on the first one's gathers.
  const absl::Status status = rank.Run(1);
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_NE(std::string(status.message()).find("weights used before their gather"),
            std::string::npos)
      << status;
}

TEST(UnitExecutor, AStepWithoutItsFirstTurnIsRefused) {
  OneRank rank(2);
  ASSERT_EQ(rank.Run(0), absl::OkStatus());
  const absl::Status status = rank.Run(0);
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_NE(std::string(status.message()).find("out of order"), std::string::npos) << status;
}

}  // namespace
}  // namespace ravel::shard
