// The engine in fp16 on a CUDA device, with a loss scale that lies in the device's memory: the same
// bits on any number of ranks and under any strategy, through steps that overflow, issued ahead and
// by graphs; near the host's run in fp16 and PyTorch's; the scale goes into saves and on from them.

#include <bit>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "kernels/scalar/float16.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
#include "worker/shard/step_graphs.h"

namespace ravel::trainer {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// The first steps overflow, and every second good step makes it larger.
constexpr plan::LossScaleSpec kRestless = {.initial = 32768, .growth_interval = 2};
// One that these models never overflow.
constexpr plan::LossScaleSpec kQuiet = {.initial = 1024, .minimum = 1024, .maximum = 1024};
constexpr int64_t kFp16Steps = 8;

void UseFp16(const plan::LossScaleSpec& scale, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kF16;
  spec.loss_scale = scale;
}

RecordArgs Fp16Steps(const StrategyCase& tested, const std::string& model = "odd_tied") {
  RecordArgs args = DeviceSteps(tested, model);
  UseFp16(kRestless, args.spec);
  args.last_step = kFp16Steps;
  args.evaluate_every_step = false;
  return args;
}

class GpuFp16 : public GpuEngine {
 protected:
  static const Recording& Reference() {
    return RecordedOnce(gpu(), "fp16", Fp16Steps({.in_place = true}));
  }
};

TEST_F(GpuFp16, AnotherStrategyOnTwoRanksGivesTheSameBitsThroughOverflows) {
  const Recording& one = Reference();
  EXPECT_LT(one.updates, kFp16Steps) << "no step has overflowed";
  EXPECT_GT(one.updates, 0);
  const StrategyCase tested = {
      .strategy = "HFSDP", .width = 2, .recompute = plan::RecomputePolicy::kMlp};
  EXPECT_EQ(FirstDifference(one, RecordOn(gpu(), Fp16Steps(tested))), "");
}

TEST_F(GpuFp16, TheScaleFollowsItsRuleAlsoWhereTheNextStepIsIssuedBefore) {
  RecordArgs args = Fp16Steps({.strategy = "ZeRO3", .width = 2});
  args.ahead = true;
  const Recording run = RecordOn(gpu(), args);
  EXPECT_EQ(FirstDifference(Reference(), run), "");
  optim::LossScale expected = optim::FirstLossScale(kRestless);
  int64_t grown = 0;
  int64_t lowered = 0;
  for (const StepResult& step : run.steps) {
    EXPECT_EQ(step.loss_scale, expected.scale) << "step " << step.step;
    EXPECT_EQ(step.lowers_scale, step.skipped);
    EXPECT_EQ(step.skipped, step.non_finite > 0);
    const double before = expected.scale;
    expected = optim::NextLossScale(kRestless, expected, !step.skipped);
    grown += expected.scale > before ? 1 : 0;
    lowered += expected.scale < before ? 1 : 0;
  }
  EXPECT_EQ(run.loss_scale, expected);
  EXPECT_GT(grown, 0);
  EXPECT_GT(lowered, 1);
  EXPECT_EQ(run.updates, kFp16Steps - lowered);
}

// The scale is no argument of a call: one graph of a program serves all steps, whatever it is.
TEST_F(GpuFp16, GraphsReadTheScaleFromMemoryAndChangeNoBit) {
  const RecordArgs args = Fp16Steps({.strategy = "ZeRO3"});
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < kFp16Steps; ++step) {
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
      const StepResult& expected = Reference().steps[static_cast<size_t>(step)];
      EXPECT_EQ(result.loss_scale, expected.loss_scale);
      EXPECT_EQ(std::bit_cast<uint32_t>(result.loss), std::bit_cast<uint32_t>(expected.loss));
      EXPECT_EQ(result.skipped, expected.skipped);
    }
    EXPECT_GE(engine.graphs()->captured(), 1);
    EXPECT_EQ(engine.graphs()->launches(), (kFp16Steps - 2) * engine.graphs()->captured());
    EXPECT_THAT(engine.graphs()->notes(), ::testing::IsEmpty());
    return absl::OkStatus();
  };
  Reference();
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

TEST_F(GpuFp16, AStateGoesOnAtAnotherWidthAndStrategyWithTheSameBits) {
  RecordArgs first = Fp16Steps({.strategy = "ZeRO3", .width = 4});
  first.last_step = 3;
  const Recording saved = RecordOn(gpu(), first);
  RecordArgs args = Fp16Steps({.strategy = "ZeRO1", .width = 2, .in_place = true});
  args.first_step = 3;
  args.start = &saved;
  Recording resumed = RecordOn(gpu(), args);
  PutBefore(saved, resumed);
  EXPECT_EQ(FirstDifference(Reference(), resumed), "");
}

// The host rounds at the same places, and adds in another order.
TEST_F(GpuFp16, IsNearTheHost) {
  for (const std::string model : {"qwen3_untied", "gpt2_tied"}) {
    RecordArgs args = Fp16Steps({.strategy = "ZeRO3", .width = 2}, model);
    UseFp16(kQuiet, args.spec);
    args.last_step = 3;
    const Recording device = RecordOn(gpu(), args);
    args.spec.cpu_devices = true;
    const Recording host = Record(args);
    ASSERT_EQ(device.steps.size(), host.steps.size());
    EXPECT_EQ(device.updates, 3) << model;
    for (size_t i = 0; i < host.steps.size(); ++i) {
      EXPECT_NEAR(device.steps[i].loss / host.steps[i].loss, 1, 3e-4) << model;
      EXPECT_NEAR(device.steps[i].grad_norm / host.steps[i].grad_norm, 1, 3e-3) << model;
    }
    EXPECT_LT(RelativeDifference(host.exp_avg, device.exp_avg), 5e-3) << model;
  }
}

// Against a curve that PyTorch made in fp16 over fp32 weights, with its GradScaler; both round,
// elsewhere.
TEST_F(GpuFp16, EveryStepIsNearPyTorchs) {
  const std::string model = "bundled_rope_scaling";
  std::vector<GoldenStep> golden = GoldenCurve(model + "_fp16");
  golden.resize(static_cast<size_t>(ComparedSteps(kGoldenSteps)));
  RecordArgs args = {.spec = CaseJob(model, ::testing::TempDir() + "/ravel_gpu_loss_fp16"),
                     .last_step = ComparedSteps(kGoldenSteps),
                     .gpu = &gpu()};
  args.spec.cpu_devices = false;
  UseFp16(kQuiet, args.spec);
  const CurveDistance worst = DistanceToGolden(golden, Record(args));
  std::printf("%s in fp16: worst relative difference of the loss %.3g, of the norm %.3g\n",
              model.c_str(),
              worst.loss,
              worst.grad_norm);
  EXPECT_LE(worst.loss, 2e-3);
  EXPECT_LE(worst.grad_norm, 0.01);
}

TEST_F(GpuFp16, ModelWeightsAreTheNearestToMainWeights) {
  RecordArgs args = Fp16Steps({.strategy = "ZeRO3", .width = 2});
  UseFp16(kQuiet, args.spec);  // skipped steps would leave the first weights
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 3; ++step) {
      EXPECT_EQ(engine.updates(), step);
      for (const shard::ParameterGroup& group : engine.groups()) {
        std::vector<float> main(static_cast<size_t>(group.shard_elements()));
        std::vector<uint16_t> model(main.size());
        RETURN_IF_ERROR(
            engine.memory().Read(group.main_weight(), std::as_writable_bytes(std::span(main))));
        RETURN_IF_ERROR(engine.memory().Read(group.stored_model_weight(),
                                             std::as_writable_bytes(std::span(model))));
        for (const plan::OwnedPiece& piece : group.pieces()) {
          for (int64_t i = 0; i < piece.elements(); ++i) {
            const auto at = static_cast<size_t>(piece.shard_offset + i);
            EXPECT_EQ(model[at], kernels::scalar::Fp16Nearest(main[at]));
          }
        }
      }
      RETURN_IF_ERROR(engine.TrainStep(step).status());
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

// A replay uses the scale of the step that it replays, and leaves what the step has left.
TEST_F(GpuFp16, AnOverflowIsExplained) {
  RecordArgs args = Fp16Steps({.width = 2});
  args.spec.loss_scale.initial = args.spec.loss_scale.maximum = plan::kMostLossScale;
  const auto body = [](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    ASSIGN_OR_RETURN(const StepResult first, engine.TrainStep(0));
    EXPECT_TRUE(first.skipped);
    const optim::LossScale after = engine.optimizer().loss_scale();
    ASSIGN_OR_RETURN(const std::string text, engine.Localise(0));
    EXPECT_THAT(text, HasSubstr("unit head"));
    EXPECT_EQ(engine.optimizer().loss_scale(), after);
    ASSIGN_OR_RETURN(const StepResult second, engine.TrainStep(1));
    EXPECT_EQ(second.loss_scale, after.scale);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

// -- whole trainers

class GpuFp16Saves : public GpuFp16 {
 protected:
  GpuFp16Saves() { std::filesystem::remove_all(folder_); }
  ~GpuFp16Saves() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch() {
    EpochArgs args;
    args.spec = CaseJob("odd_tied", folder_);
    UseFp16(kRestless, args.spec);
    args.spec.steps = 6;
    args.spec.checkpoint.every_steps = 3;
    args.spec.evaluation_every = 0;
    args.spec.log_every = 1;
    args.spec.cpu_devices = false;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }
  static ckpt::Manifest ManifestOf(const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    return store::CommittedStep::Open(&store, path.filename().string()).value().manifest();
  }
  static std::string ScaleIn(const std::string& directory) {
    const ckpt::Manifest manifest = ManifestOf(directory);
    const ckpt::Blob* blob = manifest.FindBlob(optim::kLossScaleBlob);
    return blob == nullptr ? "none" : blob->content;
  }

 private:
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_gpu_fp16_saves");
  int64_t epoch_ = 0;
};

TEST_F(GpuFp16Saves, HoldTheScaleAndGoOnWithTheSameBits) {
  const EpochOutcome whole = RunEpoch(Epoch());
  EXPECT_THAT(whole.results, Each(absl::OkStatus()));
  ASSERT_EQ(whole.steps.size(), 6u);
  optim::LossScale expected = optim::FirstLossScale(kRestless);
  for (int64_t step = 1; step <= 6; ++step) {
    const StepReport& report = whole.steps[static_cast<size_t>(step - 1)];
    EXPECT_EQ(report.loss_scale, expected.scale);
    expected = optim::NextLossScale(kRestless, expected, !report.skipped);
    if (step % 3 == 0) {
      EXPECT_EQ(ScaleIn(whole.committed.at(step)), optim::LossScaleText(expected)) << step;
    }
  }
  EpochArgs next = Epoch();
  next.restore_path = whole.committed.at(3);
  next.first_step = 3;
  const EpochOutcome resumed = RunEpoch(next);
  EXPECT_THAT(resumed.results, Each(absl::OkStatus()));
  ASSERT_EQ(resumed.steps.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss),
              std::bit_cast<uint32_t>(whole.steps[3 + i].loss));
    EXPECT_EQ(resumed.steps[i].loss_scale, whole.steps[3 + i].loss_scale);
  }
  EXPECT_EQ(ManifestOf(resumed.committed.at(6)).state_digest,
            ManifestOf(whole.committed.at(6)).state_digest);
  EXPECT_EQ(ScaleIn(resumed.committed.at(6)), ScaleIn(whole.committed.at(6)));
}

}  // namespace
}  // namespace ravel::trainer
