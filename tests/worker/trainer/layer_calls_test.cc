// Layers that run twice in a row (layer_sharing) and layers that micro-batches leave out
// (training.layerDrop): the same bits under every strategy and recompute policy, through
// checkpoints, and what is not allowed to change. Their losses against PyTorch are among the cases
// of loss_parity_test.cc.

#include <filesystem>
#include <fstream>
#include <set>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
#include "tests/testing/queued_replay.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/generator.h"

namespace ravel::trainer {
namespace {

using plan::RecomputePolicy;
using ::testing::HasSubstr;
using ::testing::Not;

class LayerCalls : public ::testing::TestWithParam<const char*> {
 protected:
  LayerCalls() : folder_(OwnFolder(absl::StrCat("ravel_layer_calls_", GetParam()))) {
    std::filesystem::remove_all(folder_);
  }
  ~LayerCalls() override { std::filesystem::remove_all(folder_); }

  Recording Run(const StrategyCase& tested) const {
    RecordArgs args = ArgsOf(tested, JobOf(tested, GetParam(), folder_));
    args.last_step = 4;
    return Record(args);
  }
  EpochArgs Epoch(int ranks, int64_t epoch) const {
    EpochArgs args;
    args.spec = CaseJob(GetParam(), folder_);
    args.spec.steps = 6;
    args.spec.evaluation_every = 2;
    args.spec.checkpoint.every_steps = 1;
    args.ranks = ranks;
    args.epoch = epoch;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch);
    return args;
  }

  const std::string folder_;
};
INSTANTIATE_TEST_SUITE_P(Cases,
                         LayerCalls,
                         ::testing::Values("shared_layers", "layer_drop"),
                         [](const auto& tested) { return std::string(tested.param); });

// Fails when draws are keyed by ranks or turns: strategies and widths would leave out other layers.
TEST_P(LayerCalls, EveryStrategyAndRecomputePolicyGivesTheSameBits) {
  for (const int64_t micro_batches : {1, 3}) {
    const Recording one = Run({.micro_batches = micro_batches, .in_place = true});
    for (const NamedStrategy& strategy : MatrixStrategies()) {
      for (const int64_t width : {2, 3}) {
        const StrategyCase tested = {.strategy = strategy.name,
                                     .width = width,
                                     .micro_batches = micro_batches,
                                     .recompute = RecomputePolicy::kBlock,
                                     .small_windows = width == 3};
        EXPECT_EQ(FirstDifference(one, Run(tested)), "") << tested.name();
      }
    }
    for (const RecomputePolicy policy : {RecomputePolicy::kNorm, RecomputePolicy::kMlp}) {
      const StrategyCase tested = {.micro_batches = micro_batches, .recompute = policy};
      EXPECT_EQ(FirstDifference(one, Run(tested)), "") << tested.name();
    }
  }
}

// Fails when streams let a second call begin before the first is done with what both write.
TEST_P(LayerCalls, QueuesGiveTheSameBits) {
  const StrategyCase tested = {.width = 3, .recompute = RecomputePolicy::kBlock};
  RecordArgs args = ArgsOf(tested, JobOf(tested, GetParam(), folder_));
  args.last_step = 2;
  const Recording inline_run = Record(args);
  for (const uint64_t seed : {1, 2}) {
    args.options = {.poison = true, .host_replay = shard::QueuedStreams(seed)};
    EXPECT_EQ(FirstDifference(inline_run, Record(args)), "");
  }
}

TEST_P(LayerCalls, AResumedRunOnAnotherNumberOfRanksHasTheSameLosses) {
  const EpochOutcome whole = RunEpoch(Epoch(2, 1));
  ASSERT_EQ(whole.steps.size(), 6u);
  EpochArgs args = Epoch(3, 2);
  args.restore_path = whole.committed.at(3);
  args.first_step = 3;
  const EpochOutcome resumed = RunEpoch(args);
  EXPECT_THAT(resumed.results, ::testing::Each(absl::OkStatus()));
  ASSERT_EQ(resumed.steps.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(resumed.steps[i].loss, whole.steps[i + 3].loss) << i;
  }
}

// A checkpoint says that layers run twice, and a generator believes it: with one call of each it
// would see another model.
TEST(SharedLayers, TheGeneratorContinuesWhatWasLearnt) {
  const std::string folder = OwnFolder("ravel_shared_generator");
  std::filesystem::remove_all(folder);
  EpochArgs args;
  args.spec = CaseJob("shared_layers", folder);
  args.spec.evaluation_every = 0;
  args.spec.steps = 2;
  args.spec.checkpoint.every_steps = 2;
  args.checkpoint_root = folder + "/store";
  const EpochOutcome outcome = RunEpoch(args);
  ASSERT_TRUE(outcome.committed.contains(2));
  const std::string step = outcome.committed.at(2);
  const GenerateRequest request = {.tokens = {3, 22, 60}, .max_new_tokens = 40, .temperature = 0};
  const auto generate = [&] {
    const auto generator = Generator::Open(step);
    EXPECT_TRUE(generator.ok()) << generator.status();
    return (*generator)->Generate(request)->tokens;
  };
  const std::vector<int32_t> twice = generate();
  const std::string path = step + "/hf/config.json";
  std::ifstream in(path);
  std::string config((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_THAT(config, HasSubstr("\"layer_sharing\": true"));
  config.replace(config.find("\"layer_sharing\": true"), 21, "\"layer_sharing\": null");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  std::ofstream(path) << config;
  EXPECT_NE(generate(), twice);
  std::filesystem::remove_all(folder);
}

// Fails when a replay draws other layers than the step that it replays, or looks at activations of
// layers that computed nothing.
TEST(LayerDrop, ASkippedStepIsReplayedWithTheSameLayers) {
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2};
  RecordArgs args = ArgsOf(tested, JobOf(tested, "layer_drop", OwnFolder("ravel_layer_drop")));
  args.spec.localise = true;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    for (shard::ParameterGroup& group : engine.groups()) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        if (engine.tensor(piece.tensor).name == "model.layers.2.mlp.down_proj.weight") {
          group.main_weight()[piece.shard_offset] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(1));
    EXPECT_TRUE(result.skipped);
    ASSIGN_OR_RETURN(const std::string found, engine.Localise(1));
    EXPECT_THAT(found, HasSubstr("layers.2"));
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks({.spec = args.spec, .ranks = args.ranks, .body = body}),
            absl::OkStatus());
}

// Its programs differ from step to step: none becomes a graph.
TEST(LayerDrop, ADeviceIssuesEveryStepAndHasTheHostsBits) {
  setenv("RAVEL_CUDA_LIBRARY", RAVEL_EMULATED_CUDA_LIBRARY, 1);
  const auto gpu = OpenDevice();
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3"}, "layer_drop");
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.graphs(), nullptr);
    return engine.InitializeWeights();
  };
  EXPECT_EQ(RunOn(**gpu, args, body), absl::OkStatus());
  const Recording device = RecordOn(**gpu, args);
  const Recording host = Record(args);
  ASSERT_EQ(device.steps.size(), host.steps.size());
  for (size_t i = 0; i < host.steps.size(); ++i) {
    EXPECT_NEAR(device.steps[i].loss, host.steps[i].loss, 1e-5 * host.steps[i].loss) << i;
  }
}

}  // namespace
}  // namespace ravel::trainer
