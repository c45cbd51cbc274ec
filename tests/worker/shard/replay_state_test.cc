// The life of weights and gradients: what is out of order is refused by name. Each test plays a
// program by hand and fails when the guard that it names is removed.

#include "worker/shard/replay_state.h"

#include <gtest/gtest.h>

#include "tests/worker/shard/synthetic_ranks.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpLabel;
using plan::Role;

plan::ShardingPlan PlanOf(plan::Strategy strategy,
                          int ranks,
                          const std::function<void(plan::JobSpec&)>& change = nullptr) {
  plan::JobSpec spec = SyntheticJob(8, 1);
  spec.strategy = strategy;
  if (change != nullptr) {
    change(spec);
  }
  plan::ShardingPlan plan = *plan::BuildShardingPlan({.spec = spec, .ranks = ranks});
  plan.options.gather_in_place = false;
  EXPECT_TRUE(plan::PlanPrograms(plan).ok());
  return plan;
}

// Plays instructions of the step's first program one after another.
class Player {
 public:
  explicit Player(const plan::ShardingPlan& plan)
      : plan_(plan), program_(&plan.programs.front()), state_(plan) {
    state_.BeginProgram({.phase = program_->phase, .part = program_->part});
  }

  ReplayState& state() { return state_; }
  const std::vector<Instruction>& list() const { return program_->instructions; }
  size_t Find(OpLabel label, size_t from = 0) const {
    while (from < list().size() && plan::LabelOf(plan_.moves, list()[from]) != label) {
      ++from;
    }
    EXPECT_LT(from, list().size()) << plan::OpName(label);
    return from;
  }
  absl::Status Play(size_t at) {
    const Instruction& i = list()[at];
    switch (plan::LabelOf(plan_.moves, i)) {
      case OpLabel::kGather:
        RETURN_IF_ERROR(state_.BeginGather(i));
        state_.EndGather(i);
        return absl::OkStatus();
      case OpLabel::kForward:
      case OpLabel::kRecompute:
      case OpLabel::kBackward:
        RETURN_IF_ERROR(state_.BeginCompute(i));
        state_.EndCompute(i);
        return absl::OkStatus();
      case OpLabel::kAllocStaging:
        return state_.AllocStaging(plan::BufferOf(i, Role::kGradient));
      case OpLabel::kReduceScatter:
      case OpLabel::kAccumulateGrad:
        RETURN_IF_ERROR(state_.BeginReduce(i));
        state_.EndReduce(i);
        return absl::OkStatus();
      case OpLabel::kFree:
        return state_.Free(i.freed);
      case OpLabel::kOuterGather:
        state_.EndRenewal(i.group);
        return absl::OkStatus();
      case OpLabel::kOuterReduce:
        RETURN_IF_ERROR(state_.BeginReduceOfSums(i));
        state_.EndReduceOfSums(i);
        return absl::OkStatus();
      case OpLabel::kJoinGradients:
        return state_.JoinGradients(i.group);
      case OpLabel::kGatherGradient:
        return state_.GatherGradient(i.group);
      case OpLabel::kStatsReduce:
        return state_.CheckSumsComplete();
      case OpLabel::kOptimizerStep:
        RETURN_IF_ERROR(state_.BeginUpdate(i.group));
        state_.EndUpdate(i.group);
        return absl::OkStatus();
      case OpLabel::kOffloadGradient:
        return state_.CheckGradient(i.group);
      case OpLabel::kAmaxReduce:
        return state_.CheckAmaxes();
      case OpLabel::kRefreshWeights:
        RETURN_IF_ERROR(state_.BeginRefresh(i.group));
        state_.EndRefresh(i.group);
        return absl::OkStatus();
      case OpLabel::kDecideStep:
      case OpLabel::kTensorReduce:  // of logs alone
      case OpLabel::kTensorGather:
        return absl::OkStatus();
      case OpLabel::kEndPhase:
        return state_.EndPhase();
    }
    return absl::InternalError("unknown");
  }
  // Everything before `end`, but for `without`.
  absl::Status PlayUntil(size_t end, const std::function<bool(size_t)>& without = nullptr) {
    for (size_t at = 0; at < end; ++at) {
      if (without == nullptr || !without(at)) {
        RETURN_IF_ERROR(Play(at));
      }
    }
    return absl::OkStatus();
  }
  absl::Status PlayAll(const std::function<bool(size_t)>& without = nullptr) {
    return PlayUntil(list().size(), without);
  }
  void Begin() { state_.BeginProgram({.phase = program_->phase, .part = program_->part}); }

 private:
  const plan::ShardingPlan& plan_;
  const plan::StepProgram* program_;
  ReplayState state_;
};

void ExpectFault(const absl::Status& status, const std::string& text) {
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status;
}

TEST(ReplayState, AWholeProgramIsInOrderUnderEveryStrategyTwice) {
  for (const plan::Strategy strategy : {plan::Strategy::kNoShard,
                                        plan::Strategy::kOptim,
                                        plan::Strategy::kOptimGrads,
                                        plan::Strategy::kOptimGradsParams}) {
    const plan::ShardingPlan plan = PlanOf(strategy, 8);
    Player player(plan);
    EXPECT_EQ(player.PlayAll(), absl::OkStatus());
    player.Begin();
    EXPECT_EQ(player.PlayAll(), absl::OkStatus());
  }
}

// Guard: GroupState::updating in BeginGather.
TEST(ReplayState, GatherWaitsForWeightWrite) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  const size_t step = player.Find(OpLabel::kOptimizerStep);
  ASSERT_EQ(player.PlayUntil(step), absl::OkStatus());
  const Instruction& update = player.list()[step];
  ASSERT_EQ(player.state().BeginUpdate(update.group), absl::OkStatus());
  Instruction gather = player.list()[player.Find(OpLabel::kGather)];
  ASSERT_EQ(gather.group, update.group);
  ExpectFault(player.state().BeginGather(gather), "gathered while they are written");
}

// Guard: the generation of gathered weights in CheckWeights, and of model weights in BeginGather.
TEST(ReplayState, RefreshAfterStepNeverSkipped) {
  const plan::ShardingPlan resident = PlanOf(plan::Strategy::kOptimGrads, 8);
  Player player(resident);
  ASSERT_EQ(player.PlayAll(), absl::OkStatus());
  player.Begin();
  const auto gathers = [&](size_t at) { return player.list()[at].op == plan::OpCode::kGather; };
  ExpectFault(player.PlayAll(gathers), "older generation");

  const plan::ShardingPlan cut =
      PlanOf(plan::Strategy::kOptimGradsParams, 8, [](plan::JobSpec& spec) {
        spec.replicas = 2;
        spec.replicate_strategy = plan::Strategy::kOptim;
      });
  Player outer(cut);
  const size_t gather = outer.Find(OpLabel::kGather);
  ASSERT_EQ(outer.PlayUntil(gather + 1), absl::OkStatus());
  // After a step the model weight is old until replicas have exchanged their pieces of it.
  outer.state().EndUpdate(outer.list()[gather].group);
  ExpectFault(outer.state().BeginGather(outer.list()[gather]), "older generation are gathered");
  outer.state().EndRenewal(outer.list()[gather].group);
}

// Guard: the generation in CheckWeights: a gather that nobody used before the step is stale after.
TEST(ReplayState, PrefetchedUnusedUnitIsNotReused) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  ASSERT_EQ(player.PlayAll(), absl::OkStatus());
  player.Begin();
  const size_t gather = player.Find(OpLabel::kGather);
  ASSERT_EQ(player.Play(gather), absl::OkStatus());
  player.state().EndUpdate(player.list()[gather].group);
  ExpectFault(player.Play(player.Find(OpLabel::kForward)), "older generation");
}

// Guard: CheckWindow. Programs that prefetch further than the window says are refused.
TEST(ReplayState, PrefetchBudgetIsACap) {
  for (const bool weights : {true, false}) {
    plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
    EXPECT_EQ(Player(plan).PlayAll(), absl::OkStatus());
    (weights ? plan.options.gather_window_bytes : plan.options.staging_window_bytes) = 1;
    ExpectFault(Player(plan).PlayAll(), "than the window holds");
  }
}

// Guard: Content::kDraining in Busy.
TEST(ReplayState, StagingLivesUntilReduceDone) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  const size_t at = player.Find(OpLabel::kReduceScatter);
  ASSERT_EQ(player.PlayUntil(at), absl::OkStatus());
  const Instruction& reduce = player.list()[at];
  ASSERT_EQ(player.state().BeginReduce(reduce), absl::OkStatus());
  const plan::BufferId staging = plan::BufferOf(reduce, Role::kSend);
  ExpectFault(player.state().AllocStaging(staging), "still in use");
  ExpectFault(player.state().Free(staging), "freed before it is reduced");
  player.state().EndReduce(reduce);
  EXPECT_EQ(player.state().Free(staging), absl::OkStatus());
}

// Guard: Busy in Claim, of the buffer and of those that overlap it; `uses` in Free.
TEST(ReplayState, ArenaLivenessFollowsEvents) {
  plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8, [](plan::JobSpec& s) {
    s.gather_window_bytes = 1;  // one unit
  });
  const std::vector<Instruction> list = plan.programs.front().instructions;
  Player player(plan);
  const Instruction& gather = list[player.Find(OpLabel::kGather)];
  const Instruction& other = list[player.Find(OpLabel::kGather, player.Find(OpLabel::kForward))];
  const plan::BufferId gathered = plan::BufferOf(gather, Role::kWeights);
  const plan::BufferId next = plan::BufferOf(other, Role::kWeights);
  ASSERT_NE(gathered, next);
  plan.memory.offsets[static_cast<size_t>(next)] =
      plan.memory.offsets[static_cast<size_t>(gathered)];
  Player late(plan);
  const size_t first = late.Find(OpLabel::kForward);
  ASSERT_EQ(late.PlayUntil(first), absl::OkStatus());
  ASSERT_EQ(late.state().BeginCompute(list[first]), absl::OkStatus());
  ASSERT_EQ(gathered, plan::BufferOf(list[first], Role::kWeights));
  ExpectFault(late.state().BeginGather(gather), "memory is still in use: ");
  ExpectFault(late.state().Free(gathered), "freed while it is used");
  ExpectFault(late.state().BeginGather(other), "still in use by another buffer");
}

// Guard: Content::kFilling in BeginGradients.
TEST(ReplayState, FreshStagingTakesOneFirstWrite) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  const size_t at = player.Find(OpLabel::kBackward);
  ASSERT_EQ(player.PlayUntil(at), absl::OkStatus());
  Instruction backward = player.list()[at];
  const auto drop = [&backward](Role role) {
    std::erase_if(backward.operands, [role](const auto& operand) { return operand.role == role; });
  };
  drop(Role::kScratch);
  Instruction adding = backward;
  for (plan::Operand& operand : adding.operands) {
    operand.access = operand.role == Role::kGradient ? plan::Access::kAdd : operand.access;
  }
  ExpectFault(player.state().BeginCompute(adding), "added to memory without any");
  ASSERT_EQ(player.state().BeginCompute(backward), absl::OkStatus());
  player.state().EndCompute(backward);
  drop(Role::kSaved);
  drop(Role::kRemade);
  ExpectFault(player.state().BeginCompute(backward), "second first write");
}

// Guard: SumState in CheckSums.
TEST(ReplayState, EveryGradientIsSummedBeforeItIsUsed) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  ASSERT_EQ(player.PlayUntil(player.Find(OpLabel::kReduceScatter) + 1), absl::OkStatus());
  ExpectFault(player.state().CheckSumsComplete(), "before it is summed over all lanes");
  ExpectFault(player.state().BeginUpdate(0), "before it is summed over all lanes");
}

// Guard: GroupState::joined. A tied table's two calls are joined once.
TEST(ReplayState, TiedReducedOnce) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  const size_t join = player.Find(OpLabel::kJoinGradients);
  ExpectFault(Player(plan).PlayAll([&](size_t at) { return at == join; }), "before their calls");
  ASSERT_EQ(player.PlayUntil(join + 1), absl::OkStatus());
  ExpectFault(player.Play(join), "joined twice");
}

// Guard: EndPhase.
TEST(ReplayState, NothingOutlivesItsProgram) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  size_t last = 0;
  for (size_t at = 0; at < player.list().size(); ++at) {
    last = player.list()[at].op == plan::OpCode::kFree ? at : last;
  }
  ExpectFault(player.PlayAll([&](size_t at) { return at == last; }), "outlives its program");
  Player update(plan);
  const size_t step = update.Find(OpLabel::kOptimizerStep);
  ExpectFault(update.PlayAll([&](size_t at) { return at == step; }), "left over");
}

// Guard: `pass` and `call` of activations in BeginActivations.
TEST(ReplayState, ABackwardNeedsTheForwardOfItsPass) {
  const plan::ShardingPlan plan = PlanOf(plan::Strategy::kOptimGradsParams, 8);
  Player player(plan);
  const size_t forward = player.Find(OpLabel::kForward, player.Find(OpLabel::kForward) + 1);
  ExpectFault(player.PlayAll([&](size_t at) { return at == forward; }), "no forward of this pass");
}

}  // namespace
}  // namespace ravel::shard
