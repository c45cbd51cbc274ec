// The engine in bf16 on ranks of a host: weights that modules read and activations are bf16, main
// weights, gradients and statistics fp32, moments fp32 or bf16. Any number of ranks and any
// strategy give the same bits, both forms of main weights do, and the curve is that of PyTorch and
// of a device as far as bf16 tells.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/generator.h"

namespace ravel::trainer {
namespace {

using plan::MainWeightForm;
using plan::WireType;

struct HostForm {
  MainWeightForm main_weights = MainWeightForm::kF32;
  plan::StateTypes states = plan::kF32States;
  WireType wire = WireType::kF32;
};

void UseHostForm(const HostForm& form, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kBF16;
  spec.optimizer.main_weights = form.main_weights;
  spec.optimizer.state_types = form.states;
  spec.gradient_wire = form.wire;
}

constexpr int64_t kHostSteps = 3;

// An evaluation after each step; fresh staging memory holds NaN.
RecordArgs HostSteps(const StrategyCase& tested,
                     const HostForm& form = {},
                     const std::string& model = "odd_tied") {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_host_bf16")));
  UseHostForm(form, args.spec);
  args.last_step = kHostSteps;
  args.evaluate_every_step = true;
  args.options.poison = true;
  return args;
}

// All strategies on 1, 2 and 4 ranks of a replica, and a diagonal through what else changes a plan.
std::vector<StrategyCase> HostCases() {
  std::vector<StrategyCase> cases;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {1, 2, 3, 4}) {
      cases.push_back({.strategy = strategy.name, .width = width, .in_place = width % 2 == 0});
    }
  }
  cases.push_back({.strategy = "ZeRO3", .width = 4, .recompute = plan::RecomputePolicy::kBlock});
  cases.push_back({.strategy = "ZeRO2", .width = 2, .recompute = plan::RecomputePolicy::kMlp});
  cases.push_back({.strategy = "ZeRO1", .width = 3, .recompute = plan::RecomputePolicy::kNorm});
  cases.push_back({.strategy = "HFSDP", .width = 2, .small_windows = true});
  return cases;
}

// Tensors that lie on one rank, and such that are cut between ranks.
constexpr const char* kHostModels[] = {"odd_tied", "bundled_rope_scaling"};

TEST(HostBf16, EveryStrategyAndNumberOfRanksGiveTheSameBits) {
  for (const char* model : kHostModels) {
    for (const WireType wire : {WireType::kF32, WireType::kBF16}) {
      const HostForm form = {.wire = wire};
      const Recording one = Record(HostSteps({}, form, model));
      ASSERT_EQ(one.steps.size(), static_cast<size_t>(kHostSteps));
      for (const StrategyCase& tested : HostCases()) {
        EXPECT_EQ(FirstDifference(one, Record(HostSteps(tested, form, model))), "")
            << model << " " << tested.name();
      }
    }
  }
}

TEST(HostBf16, MicroBatchesOfALaneAreAddedInFp32) {
  const Recording one = Record(HostSteps({.micro_batches = 3}));
  for (const StrategyCase& tested :
       {StrategyCase{.strategy = "ZeRO3", .width = 2, .micro_batches = 3},
        StrategyCase{.strategy = "ZeRO0", .width = 3, .micro_batches = 3},
        StrategyCase{.strategy = "HFSDP", .width = 2, .micro_batches = 3}}) {
    EXPECT_EQ(FirstDifference(one, Record(HostSteps(tested))), "") << tested.name();
  }
}

TEST(HostBf16, RanksThatShareNoMemoryGiveTheSameBits) {
  const Recording one = Record(HostSteps({}));
  for (const int64_t width : {2, 3}) {
    RecordArgs args = HostSteps({.strategy = "ZeRO3", .width = width});
    args.shared_memory = false;
    EXPECT_EQ(FirstDifference(one, Record(args)), "") << width << " ranks";
  }
}

TEST(HostBf16, RemaindersChangeNoBitAndNarrowMomentsRound) {
  const Recording wide = Record(HostSteps({}));
  for (const plan::StateTypes& states : {plan::kF32States, plan::kBf16States, plan::kFp8States}) {
    const Recording one = Record(HostSteps({}, {.states = states}));
    for (const MainWeightForm form : {MainWeightForm::kF32, MainWeightForm::kBF16Remainder}) {
      for (const StrategyCase& tested :
           {StrategyCase{.strategy = "ZeRO3", .width = 1},
            StrategyCase{.strategy = "ZeRO3", .width = 3},
            StrategyCase{.strategy = "ZeRO0", .width = 2},
            StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
            StrategyCase{.strategy = "ZeRO2", .width = 4},
            StrategyCase{.strategy = "HSDP", .width = 2},
            StrategyCase{.strategy = "HFSDP", .width = 2}}) {
        const HostForm forms = {.main_weights = form, .states = states};
        EXPECT_EQ(FirstDifference(one, Record(HostSteps(tested, forms))), "") << tested.name();
      }
    }
    EXPECT_EQ(FirstDifference(wide, one).empty(), states == plan::kF32States);
    EXPECT_LT(RelativeDifference(wide.exp_avg, one.exp_avg),
              states == plan::kFp8States ? 0.1 : 0.02);
  }
}

// Weights, moments and every loss, of each type of moments.
TEST(HostBf16, RemaindersChangeNoBitInTwoHundredSteps) {
  constexpr int64_t kManySteps = 200;
  for (const plan::StateTypes& states : {plan::kF32States, plan::kBf16States, plan::kFp8States}) {
    const auto run = [&](MainWeightForm form, int64_t width) {
      RecordArgs args = HostSteps({.strategy = "ZeRO3", .width = width},
                                  {.main_weights = form, .states = states});
      args.last_step = kManySteps;
      args.spec.steps = kManySteps;
      args.evaluate_every_step = false;
      return Record(args);
    };
    const Recording main = run(MainWeightForm::kF32, 1);
    ASSERT_EQ(main.steps.size(), static_cast<size_t>(kManySteps));
    EXPECT_LT(main.steps.back().loss, main.steps.front().loss);
    EXPECT_EQ(FirstDifference(main, run(MainWeightForm::kBF16Remainder, 2)), "");
  }
}

TEST(HostBf16, AStateGoesOnAtAnotherWidthStrategyAndFormWithTheSameBits) {
  const HostForm forms[] = {
      {.states = plan::kBf16States},
      {.main_weights = MainWeightForm::kBF16Remainder, .states = plan::kBf16States}};
  const Recording whole = Record(HostSteps({}, forms[0]));
  RecordArgs first = HostSteps({.strategy = "ZeRO3", .width = 4}, forms[1]);
  first.last_step = 1;
  const Recording saved = Record(first);
  for (const StrategyCase& tested :
       {StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
        StrategyCase{.strategy = "ZeRO0", .width = 1},
        StrategyCase{.strategy = "HFSDP", .width = 2},
        StrategyCase{.strategy = "ZeRO2", .width = 3}}) {
    for (const HostForm& form : forms) {
      RecordArgs args = HostSteps(tested, form);
      args.first_step = 1;
      args.start = &saved;
      Recording resumed = Record(args);
      PutBefore(saved, resumed);
      EXPECT_EQ(FirstDifference(whole, resumed), "") << tested.name();
    }
  }
}

// Steps of every model against curves that PyTorch made in bf16 over fp32 weights; both round,
// elsewhere.
TEST(HostBf16, EveryStepOfEveryModelIsNearPyTorchs) {
  for (const std::string& model : CaseNames()) {
    RecordArgs args = {.spec = CaseJob(model, OwnFolder("ravel_host_bf16_curves")),
                       .last_step = kGoldenSteps};
    args.spec.compute = plan::ComputeType::kBF16;
    const Recording one = Record(args);
    const CurveDistance worst = DistanceToGolden(GoldenCurve(model + "_bf16"), one);
    std::printf("%s in bf16: worst relative difference of the loss %.3g, of the norm %.3g\n",
                model.c_str(),
                worst.loss,
                worst.grad_norm);
    EXPECT_LE(worst.loss, 5e-3) << model;
    EXPECT_LE(worst.grad_norm, 0.05) << model;
    args.ranks = 3;
    EXPECT_EQ(FirstDifference(one, Record(args)), "") << model;
  }
}

TEST(HostBf16, DiffersFromFp32AsFarAsBf16Does) {
  for (const std::string& model : CaseNames()) {
    RecordArgs args = HostSteps({}, {}, model);
    const Recording narrow = Record(args);
    args.spec.compute = plan::ComputeType::kF32;
    const Recording wide = Record(args);
    EXPECT_NE(narrow.steps.front().loss, wide.steps.front().loss) << model;
    for (size_t i = 0; i < narrow.steps.size(); ++i) {
      EXPECT_NEAR(narrow.steps[i].loss, wide.steps[i].loss, 5e-3 * wide.steps[i].loss) << model;
      EXPECT_NEAR(narrow.steps[i].grad_norm / wide.steps[i].grad_norm, 1, 0.03) << model;
      EXPECT_NEAR(narrow.validation[i], wide.validation[i], 5e-3 * wide.validation[i]) << model;
    }
    EXPECT_LT(RelativeDifference(wide.exp_avg, narrow.exp_avg), 0.05) << model;
  }
}

// An emulated device rounds at the same places, and adds in another order.
TEST(HostBf16, IsNearADevice) {
  setenv("RAVEL_CUDA_LIBRARY", RAVEL_EMULATED_CUDA_LIBRARY, 1);
  const auto gpu = OpenDevice();
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  for (const std::string model : {"odd_tied", "qwen3_untied", "gpt2_tied"}) {
    const Recording host = Record(HostSteps({.strategy = "ZeRO3", .width = 2}, {}, model));
    RecordArgs on_device = DeviceSteps({.strategy = "ZeRO3", .width = 2}, model);
    on_device.spec.compute = plan::ComputeType::kBF16;
    const Recording device = RecordOn(**gpu, on_device);
    ASSERT_EQ(device.steps.size(), host.steps.size());
    for (size_t i = 0; i < host.steps.size(); ++i) {
      EXPECT_NEAR(device.steps[i].loss, host.steps[i].loss, 2e-3 * host.steps[i].loss) << model;
      EXPECT_NEAR(device.steps[i].grad_norm / host.steps[i].grad_norm, 1, 0.02) << model;
    }
    EXPECT_LT(RelativeDifference(host.exp_avg, device.exp_avg), 0.03) << model;
  }
}

// -- whole trainers

struct SavedRun {
  std::vector<float> losses;
  std::map<int64_t, std::string> committed;
};

class HostBf16Saves : public ::testing::Test {
 protected:
  HostBf16Saves() : folder_(OwnFolder("ravel_host_bf16_saves")) {
    std::filesystem::remove_all(folder_);
  }
  ~HostBf16Saves() override { std::filesystem::remove_all(folder_); }

  SavedRun Run(const StrategyCase& tested,
               const HostForm& form,
               const std::string& transport,
               const std::string& from = "") {
    EpochArgs args;
    args.spec = JobOf(tested, "bundled_rope_scaling", folder_);
    UseHostForm(form, args.spec);
    args.spec.steps = 4;
    args.spec.checkpoint.every_steps = 2;
    args.transport = transport;
    args.ranks = tested.ranks();
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    args.first_step = from.empty() ? 0 : 2;
    args.restore_path = from;
    const EpochOutcome outcome = RunEpoch(args);
    EXPECT_THAT(outcome.results, ::testing::Each(absl::OkStatus())) << tested.name();
    EXPECT_THAT(outcome.commit_errors, ::testing::IsEmpty()) << tested.name();
    SavedRun run = {.losses = {}, .committed = outcome.committed};
    for (const StepReport& step : outcome.steps) {
      run.losses.push_back(step.loss);
      EXPECT_GT(step.planned_bytes, 0);
      EXPECT_GE(step.measured_bytes, step.planned_bytes);
      EXPECT_LE(step.measured_bytes, step.planned_bytes + RankEngine::kMostMeasuredSlack);
    }
    return run;
  }

  static Sha256Digest DigestOf(const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    const auto step = store::CommittedStep::Open(&store, path.filename().string());
    EXPECT_TRUE(step.ok()) << step.status();
    return step.ok() ? step->manifest().state_digest : Sha256Digest{};
  }

  const std::string folder_;
  int64_t epoch_ = 0;
};

TEST_F(HostBf16Saves, GoOnOverAnyTransportOnAnotherNumberOfRanksInAnyFormWithTheSameBits) {
  for (const plan::StateTypes& states : {plan::kF32States, plan::kBf16States, plan::kFp8States}) {
    const HostForm wide = {.states = states};
    const HostForm split = {.main_weights = MainWeightForm::kBF16Remainder, .states = states};
    const SavedRun whole = Run({.strategy = "ZeRO3", .width = 3}, split, "shm");
    ASSERT_EQ(whole.losses.size(), 4u);
    const std::vector<float> rest(whole.losses.begin() + 2, whole.losses.end());
    struct Next {
      StrategyCase strategy;
      HostForm form;
      const char* transport;
    };
    for (const Next& next : {Next{{.strategy = "ZeRO1", .width = 1}, wide, "shm"},
                             Next{{.strategy = "HFSDP", .width = 2}, split, "shm"},
                             Next{{.strategy = "ZeRO0", .width = 2}, wide, "gloo"}}) {
      const SavedRun resumed = Run(next.strategy, next.form, next.transport, whole.committed.at(2));
      EXPECT_EQ(resumed.losses, rest) << next.strategy.name() << " over " << next.transport;
      EXPECT_EQ(DigestOf(resumed.committed.at(4)), DigestOf(whole.committed.at(4)))
          << next.strategy.name();
    }
  }
}

TEST_F(HostBf16Saves, AreReadByAnFp32JobAndByTheGenerator) {
  const SavedRun whole =
      Run({.strategy = "ZeRO3", .width = 2},
          {.main_weights = MainWeightForm::kBF16Remainder, .states = plan::kBf16States},
          "shm");
  const auto generator = Generator::Open(whole.committed.at(4));
  ASSERT_TRUE(generator.ok()) << generator.status();
  GenerateRequest request = {.tokens = {3, 22}, .max_new_tokens = 4, .temperature = 0};
  const auto made = (*generator)->Generate(request);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->tokens.size(), 4u);
  EpochArgs args;
  args.spec = JobOf({.strategy = "ZeRO2", .width = 3}, "bundled_rope_scaling", folder_);
  args.spec.steps = 4;
  args.ranks = 3;
  args.epoch = ++epoch_;
  args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
  args.restore_path = whole.committed.at(2);
  args.first_step = 2;
  const EpochOutcome fp32 = RunEpoch(args);
  EXPECT_THAT(fp32.results, ::testing::Each(absl::OkStatus()));
  ASSERT_EQ(fp32.steps.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(fp32.steps[i].loss, whole.losses[2 + i], 5e-3f * whole.losses[2 + i]);
  }
}

}  // namespace
}  // namespace ravel::trainer
