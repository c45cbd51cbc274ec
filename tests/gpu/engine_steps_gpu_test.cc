// Steps that are issued before the one before is read: the same results, and no wait of the host.

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "worker/shard/step_graphs.h"

namespace ravel::trainer {
namespace {

class GpuSteps : public GpuEngine {
 protected:
  GpuSteps() { std::filesystem::remove_all(folder_); }
  ~GpuSteps() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch() {
    EpochArgs args;
    args.spec = CaseJob("odd_tied", folder_);
    args.spec.steps = 5;
    args.spec.checkpoint.every_steps = 2;
    args.spec.evaluation_every = 0;
    args.spec.log_every = 1;
    args.spec.cpu_devices = false;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }

 private:
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_gpu_steps");
  int64_t epoch_ = 0;
};

TEST_F(GpuSteps, ResultsReadOneStepLateAreTheSame) {
  for (const StrategyCase& tested : std::vector<StrategyCase>{
           {.strategy = "ZeRO3"}, {.strategy = "ZeRO2", .width = 3, .micro_batches = 3}}) {
    RecordArgs args = DeviceSteps(tested);
    args.evaluate_every_step = false;
    args.spec.norms_every = 2;
    args.last_step = 2 * kDeviceSteps;
    const Recording at_once = RecordOn(gpu(), args);
    args.ahead = true;
    const Recording late = RecordOn(gpu(), args);
    ASSERT_EQ(late.steps.size(), static_cast<size_t>(2 * kDeviceSteps));
    EXPECT_EQ(FirstDifference(at_once, late), "") << tested.name();
    EXPECT_EQ(late.steps.back().control.stop, 0);
  }
}

TEST_F(GpuSteps, NoStepWaitsForTheDeviceButToReadTheStepBefore) {
  for (const int64_t width : {1, 2}) {
    const RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = width, .micro_batches = 2});
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      EXPECT_EQ(engine.lag(), 1);
      RETURN_IF_ERROR(engine.IssueStep(0));
      for (int64_t step = 1; step < 5; ++step) {
        const int64_t before = engine.host_waits();
        RETURN_IF_ERROR(engine.IssueStep(step));
        EXPECT_EQ(engine.host_waits(), before);
        ASSIGN_OR_RETURN(const StepResult result, engine.ReadStep());
        EXPECT_EQ(result.step, step);
        EXPECT_EQ(engine.host_waits(), before + 1);
        EXPECT_EQ(engine.unread_steps(), 1);
      }
      return engine.ReadStep().status();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
  }
}

TEST_F(GpuSteps, AJobThatReplaysSkippedStepsReadsEachAtOnce) {
  RecordArgs args = DeviceSteps({});
  args.spec.localise = true;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.lag(), 0);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

// Of rank 0's first tensor.
absl::StatusOr<std::vector<float>> FirstWeights(RankEngine& engine) {
  const shard::ParameterGroup& group = engine.groups().front();
  std::vector<float> weights(static_cast<size_t>(group.shard_elements()));
  RETURN_IF_ERROR(
      engine.memory().Read(group.main_weight(), std::as_writable_bytes(std::span(weights))));
  return weights;
}

// Two steps are under way when the first is found to be skipped; the count of updates, which the
// scalars of the next one depend on, is the device's.
TEST_F(GpuSteps, StepsThatAreSkippedWhileTheNextIsUnderWayChangeNothing) {
  const RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = 2});
  std::array<std::vector<StepResult>, 2> results;
  std::array<std::vector<float>, 2> after;
  const auto body = [&](RankEngine& engine, int rank, bool broken) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    float* first = engine.groups().front().main_weight();
    ASSIGN_OR_RETURN(const std::vector<float> before, FirstWeights(engine));
    if (broken) {
      const std::vector<float> nans(before.size(), std::numeric_limits<float>::quiet_NaN());
      RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(nans)), first));
      RETURN_IF_ERROR(engine.IssueStep(0));
      RETURN_IF_ERROR(engine.IssueStep(1));
      for (int i = 0; i < 2; ++i) {
        ASSIGN_OR_RETURN(const StepResult skipped, engine.ReadStep());
        EXPECT_TRUE(skipped.skipped);
        EXPECT_GT(skipped.non_finite, 0);
      }
      EXPECT_EQ(engine.updates(), 0);
      RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(before)), first));
    }
    RETURN_IF_ERROR(engine.IssueStep(2));
    RETURN_IF_ERROR(engine.IssueStep(3));
    for (int i = 0; i < 2; ++i) {
      ASSIGN_OR_RETURN(const StepResult result, engine.ReadStep());
      if (rank == 0) {
        results[broken ? 1 : 0].push_back(result);
      }
    }
    EXPECT_EQ(engine.updates(), 2);
    if (rank == 0) {
      ASSIGN_OR_RETURN(after[broken ? 1 : 0], FirstWeights(engine));
    }
    return absl::OkStatus();
  };
  for (const bool broken : {false, true}) {
    ASSERT_EQ(
        RunOn(
            gpu(), args, [&](RankEngine& engine, int rank) { return body(engine, rank, broken); }),
        absl::OkStatus());
  }
  EXPECT_EQ(after[0], after[1]);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_FALSE(results[1][i].skipped);
    EXPECT_EQ(results[0][i].loss, results[1][i].loss);
    EXPECT_EQ(results[0][i].grad_norm, results[1][i].grad_norm);
  }
}

// -- graphs

RecordArgs ManySteps(int64_t micro_batches) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .micro_batches = micro_batches});
  args.evaluate_every_step = false;
  args.ahead = true;
  args.last_step = 6;
  return args;
}

TEST_F(GpuSteps, GraphsChangeNoBit) {
  for (const int64_t micro_batches : {1, 3}) {
    for (const int64_t norms_every : {0, 2}) {
      RecordArgs args = ManySteps(micro_batches);
      args.spec.norms_every = norms_every;
      args.options.graphs = false;
      const Recording without = RecordOn(gpu(), args);
      args.options.graphs = true;
      const Recording with = RecordOn(gpu(), args);
      ASSERT_EQ(with.steps.size(), 6u);
      EXPECT_EQ(FirstDifference(without, with), "") << micro_batches << ", " << norms_every;
    }
  }
}

// Its micro-batches add up in the sum over lanes, which the next step overwrites. A graph reads
// that memory, too.
TEST_F(GpuSteps, ALaneThatIsAloneHasTheBitsOfOneThatIsStagedApart) {
  for (const plan::WireType wire : {plan::WireType::kF32, plan::WireType::kBF16}) {
    for (const bool graphs : {false, true}) {
      RecordArgs args = ManySteps(3);
      args.spec.virtual_ranks = 1;
      args.spec.global_batch = 3;
      args.spec.gradient_wire = wire;
      args.options.graphs = graphs;
      const Recording in_sum = RecordOn(gpu(), args);
      ASSERT_EQ(in_sum.steps.size(), 6u);
      args.adjust = [adjust = args.adjust](plan::ShardingPlan& plan) -> absl::Status {
        RETURN_IF_ERROR(adjust(plan));
        for (plan::ProgramBuffer& buffer : plan.buffers) {
          if (buffer.kind == plan::BufferKind::kStaging) {
            EXPECT_GE(buffer.inside, 0) << buffer.name;
            buffer.inside = {};
          }
        }
        ASSIGN_OR_RETURN(plan.memory, plan::PlanBuffers(plan.buffers, plan.programs));
        return absl::OkStatus();
      };
      EXPECT_EQ(FirstDifference(RecordOn(gpu(), args), in_sum), "") << graphs;
    }
  }
}

TEST_F(GpuSteps, EveryProgramOfAStepIsAGraphFromTheThirdStepOn) {
  const RecordArgs args = ManySteps(3);
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 6; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      if (step == 3) {
        RETURN_IF_ERROR(engine.Evaluate().status());
      }
    }
    const shard::StepGraphs* graphs = engine.graphs();
    EXPECT_GE(graphs->captured(), 3);
    EXPECT_EQ(graphs->launches(), 4 * graphs->captured());
    EXPECT_THAT(graphs->notes(), ::testing::IsEmpty());
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

// A graph reads what decides from memory: that a step is skipped is no other graph.
TEST_F(GpuSteps, AGraphSkipsAStepAndGoesOn) {
  const RecordArgs args = ManySteps(1);
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 3; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
    }
    float* first = engine.groups().front().main_weight();
    ASSIGN_OR_RETURN(const std::vector<float> before, FirstWeights(engine));
    const std::vector<float> nans(before.size(), std::numeric_limits<float>::quiet_NaN());
    RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(nans)), first));
    ASSIGN_OR_RETURN(const StepResult skipped, engine.TrainStep(3));
    EXPECT_TRUE(skipped.skipped);
    RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(before)), first));
    ASSIGN_OR_RETURN(const StepResult next, engine.TrainStep(4));
    EXPECT_FALSE(next.skipped);
    EXPECT_EQ(engine.updates(), 4);
    const shard::StepGraphs* graphs = engine.graphs();
    EXPECT_EQ(graphs->launches(), 3 * graphs->captured());
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

TEST_F(GpuSteps, RanksThatExchangeHaveNoGraphs) {
  const RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = 2});
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.graphs(), nullptr);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

// -- the trainer

TEST_F(GpuSteps, ReportsEveryStepAsTheEngineDoesThatReadsItAtOnce) {
  EpochArgs epoch = Epoch();
  const EpochOutcome outcome = RunEpoch(epoch);
  EXPECT_EQ(outcome.results.at(0), absl::OkStatus());
  RecordArgs args = {.spec = epoch.spec, .last_step = epoch.spec.steps};
  const Recording expected = RecordOn(gpu(), args);
  ASSERT_EQ(outcome.steps.size(), expected.steps.size());
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    EXPECT_EQ(outcome.steps[i].step, expected.steps[i].step);
    EXPECT_EQ(outcome.steps[i].loss, expected.steps[i].loss);
    EXPECT_EQ(outcome.steps[i].grad_norm, expected.steps[i].grad_norm);
    EXPECT_EQ(outcome.steps[i].lr, expected.steps[i].learning_rate);
    EXPECT_EQ(outcome.steps[i].tokens, expected.steps[i].target_tokens);
  }
  EXPECT_EQ(outcome.saves_started, (std::vector<int64_t>{2, 4, 5}));
}

// A request is heard, agreed on in a step, and served one step later, when all ranks have read it.
TEST_F(GpuSteps, ASaveThatStopsIsServedAfterTheStepThatWasUnderWay) {
  EpochArgs epoch = Epoch();
  epoch.spec.steps = 400;
  epoch.spec.checkpoint.every_steps = 0;
  epoch.stop_after_step = 2;
  const EpochOutcome outcome = RunEpoch(epoch);
  ASSERT_EQ(outcome.results.size(), 1u);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kStopped) << outcome.results[0];
  ASSERT_EQ(outcome.committed.size(), 1u);
  const int64_t saved = outcome.committed.begin()->first;
  EXPECT_EQ(outcome.steps.back().step, saved);
  EpochArgs resumed = Epoch();
  resumed.spec.steps = saved + 3;
  resumed.restore_path = outcome.committed.begin()->second;
  resumed.first_step = saved;
  const EpochOutcome rest = RunEpoch(resumed);
  EXPECT_EQ(rest.results.at(0), absl::OkStatus());
  EXPECT_EQ(rest.steps.front().step, saved + 1);
}

}  // namespace
}  // namespace ravel::trainer
