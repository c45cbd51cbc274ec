// The engine in fp16 on ranks of a host, with a loss scale: the same bits on any number of ranks
// and under every strategy, through steps that overflow; the scale goes down and up by its rule and
// into checkpoints; a skipped step changes nothing else; skips that lower the scale are no failure.

#include <bit>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/exit_code.h"
#include "worker/trainer/generator.h"
#include "worker/trainer/trainer.h"

namespace ravel::trainer {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// The first steps overflow, and every second good step makes it larger.
constexpr plan::LossScaleSpec kRestless = {.initial = 32768, .growth_interval = 2};
// One that these models never overflow.
constexpr plan::LossScaleSpec kQuiet = {.initial = 1024, .minimum = 1024, .maximum = 1024};
constexpr int64_t kFp16Steps = 9;

void UseFp16(const plan::LossScaleSpec& scale, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kF16;
  spec.loss_scale = scale;
}

RecordArgs Fp16Run(const StrategyCase& tested, const std::string& model = "odd_tied") {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_fp16")));
  UseFp16(kRestless, args.spec);
  args.last_step = kFp16Steps;
  args.options.poison = true;
  return args;
}

std::vector<double> ScalesOf(const Recording& run) {
  std::vector<double> scales;
  for (const StepResult& step : run.steps) {
    scales.push_back(step.loss_scale);
  }
  return scales;
}

TEST(HostFp16, EveryStrategyAndNumberOfRanksGiveTheSameBits) {
  std::vector<StrategyCase> cases = {
      {.strategy = "ZeRO3", .width = 4, .recompute = plan::RecomputePolicy::kBlock},
      {.strategy = "ZeRO2", .width = 2, .recompute = plan::RecomputePolicy::kMlp},
      {.strategy = "ZeRO1", .width = 3, .recompute = plan::RecomputePolicy::kNorm},
      {.strategy = "HFSDP", .width = 2, .small_windows = true}};
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {1, 2, 3, 4}) {
      cases.push_back({.strategy = strategy.name, .width = width, .in_place = width % 2 == 0});
    }
  }
  for (const char* model : {"odd_tied", "bundled_rope_scaling"}) {
    const Recording one = Record(Fp16Run({}, model));
    ASSERT_EQ(one.steps.size(), static_cast<size_t>(kFp16Steps));
    EXPECT_LT(one.updates, kFp16Steps) << "no step has overflowed";
    EXPECT_GT(one.updates, 0);
    for (const StrategyCase& tested : cases) {
      EXPECT_EQ(FirstDifference(one, Record(Fp16Run(tested, model))), "")
          << model << " " << tested.name();
    }
  }
}

TEST(HostFp16, WiresMicroBatchesAndTransportsChangeNoBit) {
  const auto run = [](const StrategyCase& tested, plan::WireType wire, bool shared) {
    RecordArgs args = Fp16Run(tested);
    args.spec.gradient_wire = wire;
    args.shared_memory = shared;
    return Record(args);
  };
  for (const plan::WireType wire : {plan::WireType::kF32, plan::WireType::kBF16}) {
    for (const int64_t micro_batches : {1, 3}) {
      const Recording one = run({.micro_batches = micro_batches}, wire, true);
      for (const StrategyCase& tested :
           {StrategyCase{.strategy = "ZeRO3", .width = 2, .micro_batches = micro_batches},
            StrategyCase{.strategy = "ZeRO0", .width = 3, .micro_batches = micro_batches},
            StrategyCase{.strategy = "HFSDP", .width = 2, .micro_batches = micro_batches}}) {
        EXPECT_EQ(FirstDifference(one, run(tested, wire, true)), "") << tested.name();
      }
      EXPECT_EQ(
          FirstDifference(one, run({.width = 3, .micro_batches = micro_batches}, wire, false)), "");
    }
  }
}

TEST(HostFp16, EveryOptimizerAndStateTypeTrainsWithTheSameBits) {
  for (const plan::OptimizerKind kind :
       {plan::OptimizerKind::kAdamW, plan::OptimizerKind::kLion, plan::OptimizerKind::kSgd}) {
    for (const plan::StateTypes& states : {plan::kF32States, plan::kBf16States, plan::kFp8States}) {
      if (kind != plan::OptimizerKind::kAdamW && states != plan::kF32States) {
        continue;
      }
      const auto run = [&](const StrategyCase& tested) {
        RecordArgs args = Fp16Run(tested);
        args.spec.optimizer.kind = kind;
        args.spec.optimizer.state_types = states;
        return Record(args);
      };
      const Recording one = run({});
      EXPECT_GT(one.updates, 0);
      EXPECT_EQ(FirstDifference(one, run({.strategy = "ZeRO3", .width = 3})), "");
      EXPECT_EQ(FirstDifference(one, run({.strategy = "HFSDP", .width = 2})), "");
    }
  }
}

TEST(HostFp16, TheScaleFollowsItsRuleAndASkippedStepChangesNothingElse) {
  const Recording run = Record(Fp16Run({.width = 2}));
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
  ASSERT_TRUE(run.steps.front().skipped);

  RecordArgs args = Fp16Run({.width = 2});
  args.last_step = 0;
  const Recording start = Record(args);
  args.last_step = 1;
  Recording skipped = Record(args);
  EXPECT_EQ(skipped.loss_scale.scale, kRestless.initial / 2);
  skipped.steps.clear();
  skipped.loss_scale = start.loss_scale;
  EXPECT_EQ(FirstDifference(start, skipped), "");
}

// What is divided out again: a scale that loses nothing gives nearly the same gradients as another.
TEST(HostFp16, TheScaleLeavesLossesAndNormsWhereTheyAre) {
  const auto run = [](double scale) {
    RecordArgs args = Fp16Run({});
    UseFp16({.initial = scale, .minimum = scale, .maximum = scale}, args.spec);
    args.last_step = 3;
    return Record(args);
  };
  const Recording expected = run(1024);
  for (const double scale : {256, 2048}) {
    const Recording other = run(scale);
    EXPECT_EQ(std::bit_cast<uint32_t>(other.steps[0].loss),
              std::bit_cast<uint32_t>(expected.steps[0].loss));
    for (size_t i = 0; i < other.steps.size(); ++i) {
      EXPECT_FALSE(other.steps[i].skipped);
      EXPECT_EQ(other.steps[i].loss_scale, scale);
      EXPECT_NEAR(other.steps[i].grad_norm / expected.steps[i].grad_norm, 1, 2e-3);
      EXPECT_NEAR(other.steps[i].loss / expected.steps[i].loss, 1, 1e-4);
    }
  }
}

TEST(HostFp16, OtherComputeTypesScaleNothing) {
  for (const plan::ComputeType compute : {plan::ComputeType::kF32, plan::ComputeType::kBF16}) {
    RecordArgs args = Fp16Run({});
    args.last_step = 2;
    args.spec.compute = compute;
    const Recording run = Record(args);
    EXPECT_THAT(ScalesOf(run), Each(0));
    EXPECT_EQ(run.loss_scale, optim::LossScale{});
    EXPECT_FALSE(run.steps.front().skipped);
  }
}

TEST(HostFp16, AStateGoesOnAtAnotherWidthAndStrategyWithTheSameBits) {
  const Recording whole = Record(Fp16Run({}));
  for (const int64_t cut : {1, 3, 5}) {
    RecordArgs first = Fp16Run({.strategy = "ZeRO3", .width = 4});
    first.last_step = cut;
    const Recording saved = Record(first);
    for (const StrategyCase& tested :
         {StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
          StrategyCase{.strategy = "HFSDP", .width = 2},
          StrategyCase{.strategy = "ZeRO2", .width = 3}}) {
      RecordArgs args = Fp16Run(tested);
      args.first_step = cut;
      args.start = &saved;
      Recording resumed = Record(args);
      PutBefore(saved, resumed);
      EXPECT_EQ(FirstDifference(whole, resumed), "") << tested.name() << " from " << cut;
    }
  }
}

TEST(HostFp16, OffloadedStateGivesTheSameBits) {
  const std::string disk = OwnFolder("ravel_fp16_disk");
  std::filesystem::create_directories(disk);
  const Recording memory = Record(Fp16Run({.width = 2}));
  RecordArgs args = Fp16Run({.width = 2});
  args.spec.optimizer.offload = {.fraction = 1, .path = disk};
  EXPECT_EQ(FirstDifference(memory, Record(args)), "");
  std::filesystem::remove_all(disk);
}

// A replay uses the scale of the step that it replays, and leaves what the step has left.
TEST(HostFp16, AnOverflowIsExplained) {
  const auto body = [](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    ASSIGN_OR_RETURN(const StepResult first, engine.TrainStep(0));
    EXPECT_TRUE(first.skipped);
    const optim::LossScale after = engine.optimizer().loss_scale();
    for (int i = 0; i < 2; ++i) {
      ASSIGN_OR_RETURN(const std::string text, engine.Localise(0));
      EXPECT_THAT(text, HasSubstr("unit head"));
      EXPECT_THAT(text, HasSubstr("dhidden"));
      EXPECT_EQ(engine.optimizer().loss_scale(), after);
    }
    return absl::OkStatus();
  };
  plan::JobSpec spec = Fp16Run({.width = 2}).spec;
  spec.loss_scale.initial = spec.loss_scale.maximum = plan::kMostLossScale;
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 2, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
}

TEST(HostFp16, IsNearerToFp32ThanBf16Is) {
  for (const char* model : {"odd_tied", "qwen3_untied", "gpt2_tied", "bundled_rope_scaling"}) {
    const auto run = [&](plan::ComputeType compute) {
      RecordArgs args = Fp16Run({}, model);
      UseFp16(kQuiet, args.spec);
      args.spec.compute = compute;
      args.last_step = 4;
      return Record(args);
    };
    const Recording wide = run(plan::ComputeType::kF32);
    const Recording fp16 = run(plan::ComputeType::kF16);
    const Recording bf16 = run(plan::ComputeType::kBF16);
    EXPECT_EQ(fp16.updates, 4) << model;
    EXPECT_NE(FirstDifference(fp16, wide), "");
    for (size_t i = 0; i < wide.steps.size(); ++i) {
      EXPECT_NEAR(fp16.steps[i].loss / wide.steps[i].loss, 1, 1e-3) << model;
      EXPECT_NEAR(fp16.steps[i].grad_norm / wide.steps[i].grad_norm, 1, 5e-3) << model;
    }
    EXPECT_LT(RelativeDifference(wide.exp_avg, fp16.exp_avg),
              RelativeDifference(wide.exp_avg, bf16.exp_avg))
        << model;
  }
}

// Against curves that PyTorch made in fp16 over fp32 weights, with its GradScaler; both round,
// elsewhere.
TEST(HostFp16, EveryStepIsNearPyTorchs) {
  for (const std::string model :
       {"odd_tied", "qwen3_untied", "gpt2_tied", "bundled_rope_scaling"}) {
    RecordArgs args = {.spec = CaseJob(model, OwnFolder("ravel_fp16_curves")),
                       .last_step = kGoldenSteps};
    UseFp16(kQuiet, args.spec);
    const Recording run = Record(args);
    const CurveDistance worst = DistanceToGolden(GoldenCurve(model + "_fp16"), run);
    std::printf("%s in fp16: worst relative difference of the loss %.3g, of the norm %.3g\n",
                model.c_str(),
                worst.loss,
                worst.grad_norm);
    EXPECT_LE(worst.loss, 2e-3) << model;
    EXPECT_LE(worst.grad_norm, 0.01) << model;
  }
}

// -- whole trainers

class HostFp16Jobs : public ::testing::Test {
 protected:
  HostFp16Jobs() : folder_(OwnFolder("ravel_fp16_jobs")) { std::filesystem::remove_all(folder_); }
  ~HostFp16Jobs() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch(int ranks, const plan::LossScaleSpec& scale, int64_t steps) {
    EpochArgs args;
    args.spec = CaseJob("bundled_rope_scaling", folder_);
    UseFp16(scale, args.spec);
    args.spec.steps = steps;
    args.spec.evaluation_every = 0;
    args.ranks = ranks;
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
  static std::vector<double> Scales(const EpochOutcome& outcome) {
    std::vector<double> scales;
    for (const StepReport& step : outcome.steps) {
      scales.push_back(step.loss_scale);
    }
    return scales;
  }

  const std::string folder_;
  int64_t epoch_ = 0;
};

TEST_F(HostFp16Jobs, ACheckpointHoldsTheScaleAndAnyNumberOfRanksGoesOn) {
  const auto args = [&](int ranks) {
    EpochArgs made = Epoch(ranks, kRestless, 8);
    made.spec.checkpoint.every_steps = 1;
    return made;
  };
  const EpochOutcome whole = RunEpoch(args(3));
  EXPECT_THAT(whole.results, Each(absl::OkStatus()));
  ASSERT_EQ(whole.steps.size(), 8u);
  optim::LossScale expected = optim::FirstLossScale(kRestless);
  for (int64_t step = 1; step <= 8; ++step) {
    const StepReport& report = whole.steps[static_cast<size_t>(step - 1)];
    EXPECT_EQ(report.loss_scale, expected.scale);
    expected = optim::NextLossScale(kRestless, expected, !report.skipped);
    EXPECT_EQ(ScaleIn(whole.committed.at(step)), optim::LossScaleText(expected)) << step;
  }
  for (const int64_t cut : {1, 4, 5}) {  // after a skip, and within a run of good steps
    for (const int ranks : {1, 2}) {
      EpochArgs next = args(ranks);
      next.restore_path = whole.committed.at(cut);
      next.first_step = cut;
      const EpochOutcome resumed = RunEpoch(next);
      EXPECT_THAT(resumed.results, Each(absl::OkStatus()));
      ASSERT_EQ(resumed.steps.size(), static_cast<size_t>(8 - cut));
      for (size_t i = 0; i < resumed.steps.size(); ++i) {
        const StepReport& expected_step = whole.steps[static_cast<size_t>(cut) + i];
        EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss),
                  std::bit_cast<uint32_t>(expected_step.loss));
        EXPECT_EQ(resumed.steps[i].loss_scale, expected_step.loss_scale);
      }
      EXPECT_EQ(ManifestOf(resumed.committed.at(8)).state_digest,
                ManifestOf(whole.committed.at(8)).state_digest);
      EXPECT_EQ(ScaleIn(resumed.committed.at(8)), ScaleIn(whole.committed.at(8)));
    }
  }
}

// Main weights are fp32 in all compute types, so each reads the others' saves.
TEST_F(HostFp16Jobs, SavesAreReadByOtherComputeTypesAndByTheGenerator) {
  EpochArgs args = Epoch(2, kQuiet, 2);
  args.spec.checkpoint.every_steps = 2;
  const EpochOutcome fp16 = RunEpoch(args);
  ASSERT_EQ(fp16.committed.count(2), 1u);
  for (const auto from : {plan::ComputeType::kF16, plan::ComputeType::kBF16}) {
    EpochArgs next = Epoch(1, kQuiet, 4);
    next.spec.compute =
        from == plan::ComputeType::kF16 ? plan::ComputeType::kBF16 : plan::ComputeType::kF16;
    next.spec.checkpoint.every_steps = 2;
    next.restore_path = fp16.committed.at(2);
    next.first_step = 2;
    if (from == plan::ComputeType::kBF16) {
      EpochArgs first = next;
      first.spec.compute = from;
      first.spec.steps = 2;
      first.first_step = 0;
      first.restore_path.clear();
      const EpochOutcome bf16 = RunEpoch(first);
      ASSERT_EQ(bf16.committed.count(2), 1u);
      EXPECT_EQ(ScaleIn(bf16.committed.at(2)), "none");
      next.restore_path = bf16.committed.at(2);
      next.epoch = ++epoch_;
      next.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    }
    const EpochOutcome other = RunEpoch(next);
    EXPECT_THAT(other.results, Each(absl::OkStatus()));
    ASSERT_EQ(other.steps.size(), 2u);
    EXPECT_THAT(Scales(other), Each(from == plan::ComputeType::kF16 ? 0 : 1024));
  }
  const auto generator = Generator::Open(fp16.committed.at(2));
  ASSERT_TRUE(generator.ok()) << generator.status();
  const auto made = (*generator)->Generate({.tokens = {3, 22}, .max_new_tokens = 4});
  ASSERT_TRUE(made.ok()) << made.status();
}

// Weights that diverge are found whatever the scale: first it falls to its least, then the skips
// count.
TEST_F(HostFp16Jobs, SkipsThatLowerTheScaleDoNotCountToTheLimit) {
  const auto run = [&](const plan::LossScaleSpec& scale) {
    EpochArgs args = Epoch(2, scale, 60);
    args.spec.optimizer.lr = 1e30;  // the first update makes all weights infinite in fp16
    args.spec.optimizer.clip_norm = 0;
    args.spec.schedule = {.kind = plan::ScheduleKind::kConstant, .warmup_steps = 0};
    return RunEpoch(args);
  };
  const EpochOutcome dynamic = run({.initial = 32768, .minimum = 2});
  for (const absl::Status& result : dynamic.results) {
    EXPECT_EQ(CodeOf(result), ExitCode::kNumeric) << result;
  }
  // One update, 14 skips from 32768 down to 2, and the limit's.
  EXPECT_EQ(std::ssize(dynamic.steps), 1 + 14 + kMostSkippedInARow + 1);
  EXPECT_EQ(dynamic.steps.back().loss_scale, 2);
  const EpochOutcome fixed = run({.initial = 1024, .minimum = 1024, .maximum = 1024});
  for (const absl::Status& result : fixed.results) {
    EXPECT_EQ(CodeOf(result), ExitCode::kNumeric) << result;
  }
  EXPECT_EQ(std::ssize(fixed.steps), 1 + kMostSkippedInARow + 1);
}

}  // namespace
}  // namespace ravel::trainer
