// Main weights as bf16 and a remainder, and moments in bf16: the first changes no bit of anything,
// both have the same bits on any number of ranks, and saves, which hold moments as they live and
// main weights as fp32, go on elsewhere.

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "common/store/step_verifier.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/saved_state.h"
#include "worker/shard/step_graphs.h"

namespace ravel::trainer {
namespace {

using plan::kBf16States;
using plan::kF32States;
using plan::MainWeightForm;
using plan::StateTypes;

struct StateForm {
  MainWeightForm main_weights = MainWeightForm::kF32;
  StateTypes states = kF32States;
};

void UseForm(const StateForm& form, plan::JobSpec& job) {
  job.compute = plan::ComputeType::kBF16;
  job.optimizer.main_weights = form.main_weights;
  job.optimizer.state_types = form.states;
}

RecordArgs FormSteps(const StrategyCase& tested, const StateForm& form) {
  RecordArgs args = DeviceSteps(tested, "bundled_rope_scaling");
  UseForm(form, args.spec);
  return args;
}

class GpuStates : public GpuEngine {
 protected:
  // One rank with fp32 main weights.
  static const Recording& Reference(StateTypes states) {
    return RecordedOnce(gpu(),
                        absl::StrCat("states ", plan::StateTypesText(states)),
                        FormSteps({}, {.states = states}));
  }
};

TEST_F(GpuStates, RemaindersChangeNoBit) {
  for (const StateTypes states : {kF32States, kBf16States}) {
    const StateForm form = {.main_weights = MainWeightForm::kBF16Remainder, .states = states};
    for (const StrategyCase& tested :
         {StrategyCase{.strategy = "ZeRO3", .width = 1},
          StrategyCase{.strategy = "ZeRO3", .width = 4},
          StrategyCase{.strategy = "ZeRO0", .width = 2},
          StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
          StrategyCase{.strategy = "ZeRO2", .width = 3},
          StrategyCase{.strategy = "HSDP", .width = 2},
          StrategyCase{.strategy = "HFSDP", .width = 2},
          StrategyCase{.strategy = "HFSDP", .width = 1, .in_place = true}}) {
      const Recording run = RecordOn(gpu(), FormSteps(tested, form));
      ExpectEqualRuns(Reference(states), run, tested.name());
    }
  }
}

TEST_F(GpuStates, Bf16MomentsHaveTheSameBitsOnAnyNumberOfRanks) {
  const Recording& one = Reference(kBf16States);
  const Recording& wide = Reference(kF32States);
  EXPECT_NE(FirstDifference(one, wide), "");
  EXPECT_LT(RelativeDifference(wide.exp_avg, one.exp_avg), 0.02);
  EXPECT_LT(RelativeDifference(wide.exp_avg_sq, one.exp_avg_sq), 0.05);
  for (const auto* moments : {&one.exp_avg, &one.exp_avg_sq}) {
    for (const auto& [name, values] : *moments) {
      for (const float value : values) {
        EXPECT_EQ(Bf16ToFloat(FloatToBf16(value)), value) << name;
      }
    }
  }
  for (const StrategyCase& tested : {StrategyCase{.strategy = "ZeRO3", .width = 3},
                                     StrategyCase{.strategy = "ZeRO0", .width = 2},
                                     StrategyCase{.strategy = "HFSDP", .width = 2}}) {
    ExpectEqualRuns(
        one, RecordOn(gpu(), FormSteps(tested, {.states = kBf16States})), tested.name());
  }
}

TEST_F(GpuStates, Fp8MomentsHaveTheSameBitsOnAnyNumberOfRanksAndInEitherForm) {
  for (const StateTypes types : {plan::kFp8States, StateTypes{DType::kF8E4M3, DType::kBF16}}) {
    const Recording& one = Reference(types);
    EXPECT_NE(FirstDifference(one, Reference(kBf16States)), "");
    for (const StrategyCase& tested : {StrategyCase{.strategy = "ZeRO3", .width = 3},
                                       StrategyCase{.strategy = "ZeRO0", .width = 2},
                                       StrategyCase{.strategy = "HFSDP", .width = 2}}) {
      ExpectEqualRuns(one, RecordOn(gpu(), FormSteps(tested, {.states = types})), tested.name());
    }
    const StateForm split = {.main_weights = MainWeightForm::kBF16Remainder, .states = types};
    ExpectEqualRuns(
        one, RecordOn(gpu(), FormSteps({.strategy = "ZeRO3", .width = 2}, split)), "remainders");
  }
}

// What rounds the moments is keyed by the step in the device's memory: one graph serves all steps.
TEST_F(GpuStates, GraphsChangeNoBitOfBf16Moments) {
  RecordArgs args = FormSteps({.micro_batches = 3}, {MainWeightForm::kBF16Remainder, kBf16States});
  args.evaluate_every_step = false;
  args.ahead = true;
  args.last_step = 5;
  args.options.graphs = false;
  const Recording without = RecordOn(gpu(), args);
  args.options.graphs = true;
  EXPECT_EQ(FirstDifference(without, RecordOn(gpu(), args)), "");
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 5; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
    }
    const shard::StepGraphs* graphs = engine.graphs();
    EXPECT_GE(graphs->captured(), 3);
    EXPECT_EQ(graphs->launches(), 3 * graphs->captured());
    EXPECT_THAT(graphs->notes(), ::testing::IsEmpty());
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks({.spec = args.spec, .body = body, .adjust = args.adjust, .gpu = &gpu()}),
            absl::OkStatus());
}

TEST_F(GpuStates, AStateGoesOnInTheOtherFormWithTheSameBits) {
  const StateForm forms[] = {{MainWeightForm::kBF16Remainder, kBf16States},
                             {MainWeightForm::kF32, kBf16States}};
  for (const size_t first : {size_t{0}, size_t{1}}) {
    RecordArgs begin = FormSteps({.strategy = "ZeRO3", .width = 2}, forms[first]);
    begin.last_step = 2;
    const Recording saved = RecordOn(gpu(), begin);
    RecordArgs rest = FormSteps({.strategy = "HFSDP", .width = 2}, forms[1 - first]);
    rest.first_step = 2;
    rest.start = &saved;
    Recording whole = RecordOn(gpu(), rest);
    PutBefore(saved, whole);
    ExpectEqualRuns(Reference(kBf16States), whole, "resumed");
  }
}

TEST_F(GpuStates, NormsAndFrozenTensorsAreThoseOfFp32MainWeights) {
  RecordArgs args = FormSteps({.strategy = "ZeRO2", .width = 2}, {});
  args.spec.norms_every = 1;
  args.spec.freeze = {"*mlp*"};
  const Recording expected = RecordOn(gpu(), args);
  UseForm({.main_weights = MainWeightForm::kBF16Remainder}, args.spec);
  ExpectEqualRuns(expected, RecordOn(gpu(), args), "norms");
}

TEST_F(GpuStates, WhatIsAllocatedIsWhatIsPlanned) {
  for (const StateTypes states : {kBf16States, plan::kFp8States}) {
    const RecordArgs args =
        FormSteps({.strategy = "ZeRO3", .width = 2}, {MainWeightForm::kBF16Remainder, states});
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      EXPECT_EQ(engine.measured_bytes(), engine.planned_bytes());
      return engine.InitializeWeights();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
  }
}

// -- saves

class GpuStateSaves : public GpuStates {
 protected:
  GpuStateSaves() { std::filesystem::remove_all(folder_); }
  ~GpuStateSaves() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch(const StateForm& form) {
    EpochArgs args;
    args.spec = CaseJob("odd_tied", folder_);
    UseForm(form, args.spec);
    args.spec.steps = kLastStep;
    args.spec.checkpoint.every_steps = 2;
    args.spec.evaluation_every = 0;
    args.spec.cpu_devices = false;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }
  static EpochOutcome RunWell(const EpochArgs& args) {
    EpochOutcome outcome = RunEpoch(args);
    for (const absl::Status& result : outcome.results) {
      EXPECT_TRUE(result.ok()) << result;
    }
    EXPECT_TRUE(outcome.commit_errors.empty());
    return outcome;
  }
  static constexpr size_t kSavedStep = 2;
  static constexpr size_t kLastStep = 5;
  EpochArgs From(const EpochOutcome& whole, EpochArgs args) {
    args.restore_path = whole.committed.at(kSavedStep);
    args.first_step = kSavedStep;
    return args;
  }

  // The manifest of a step's directory.
  static ckpt::Manifest ManifestOf(const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    return store::CommittedStep::Open(&store, path.filename().string()).value().manifest();
  }
  // All weights and moments of a step's directory.
  static testing::TrainingState StateIn(const std::string& directory, const EpochArgs& args) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    const plan::ShardingPlan plan = *PlanLocalRanks({.spec = args.spec, .ranks = 1});
    return testing::Load(store, path.filename().string(), plan.inventory, 1).value();
  }
  static void ExpectSameEnd(const EpochOutcome& expected, const EpochOutcome& run) {
    EXPECT_EQ(ManifestOf(run.committed.at(kLastStep)).state_digest,
              ManifestOf(expected.committed.at(kLastStep)).state_digest);
  }

 private:
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_gpu_state_saves");
  int64_t epoch_ = 0;
};

TEST_F(GpuStateSaves, ASaveGoesOnInEitherFormWithTheSameBits) {
  for (const StateTypes states : {kF32States, kBf16States, plan::kFp8States}) {
    const StateForm forms[] = {{MainWeightForm::kF32, states},
                               {MainWeightForm::kBF16Remainder, states}};
    const EpochOutcome plain = RunWell(Epoch(forms[0]));
    const EpochOutcome split = RunWell(Epoch(forms[1]));
    ASSERT_TRUE(plain.committed.contains(kSavedStep) && split.committed.contains(kSavedStep));
    ASSERT_EQ(split.steps.size(), plain.steps.size());
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_EQ(split.steps[i].loss, plain.steps[i].loss);
    }
    for (const EpochOutcome* whole : {&plain, &split}) {
      for (const StateForm& form : forms) {
        const EpochOutcome resumed = RunWell(From(*whole, Epoch(form)));
        ASSERT_EQ(resumed.steps.size(), plain.steps.size() - kSavedStep);
        for (size_t i = 0; i < resumed.steps.size(); ++i) {
          EXPECT_EQ(resumed.steps[i].loss, plain.steps[kSavedStep + i].loss);
        }
        ExpectSameEnd(plain, resumed);
      }
    }
  }
}

TEST_F(GpuStateSaves, ASaveHasTheBytesThatItsMomentsLiveIn) {
  for (const StateForm& form : {StateForm{MainWeightForm::kBF16Remainder, kBf16States},
                                StateForm{MainWeightForm::kF32, kBf16States},
                                StateForm{MainWeightForm::kBF16Remainder, kF32States},
                                StateForm{}}) {
    const EpochArgs args = Epoch(form);
    const std::string directory = RunWell(args).committed.at(kSavedStep);
    const DType moments = form.states == kBf16States ? DType::kBF16 : DType::kF32;
    const plan::ShardingPlan plan = *PlanLocalRanks({.spec = args.spec, .ranks = 1});
    const auto tensors = static_cast<int64_t>(plan.inventory.tensors.size());
    int64_t parameters = 0;
    for (const plan::TensorSpec& tensor : plan.inventory.tensors) {
      parameters += ElementCount(tensor.shape);
    }
    const ckpt::Manifest manifest = ManifestOf(directory);
    int64_t bytes = 0;
    for (const ckpt::FileRecord& file : manifest.files) {
      EXPECT_EQ(std::filesystem::file_size(directory + "/" + file.path),
                static_cast<size_t>(file.size));
      bytes += file.header_bytes > 0 ? file.size - file.header_bytes : 0;
    }
    EXPECT_EQ(bytes, (4 + 2 * DTypeBytes(moments)) * parameters + 4 * tensors);
    for (const ckpt::TensorRecord& tensor : manifest.tensors) {
      const bool moment =
          tensor.role == ckpt::TensorRole::kExpAvg || tensor.role == ckpt::TensorRole::kExpAvgSq;
      EXPECT_EQ(tensor.stored_dtype, moment ? moments : DType::kF32) << tensor.name;
    }
    const store::FileStore store(args.checkpoint_root);
    EXPECT_TRUE(store::VerifyStep(store,
                                  std::filesystem::path(directory).filename().string(),
                                  store::VerifyDepth::kDeep)
                    .ok());
  }
}

// Saves of bf16 moments once had them as fp32. Here a job of fp32 moments opens one as they are now
// and saves it before its first step: the same values, from which the first job goes on.
TEST_F(GpuStateSaves, Bf16MomentsThatWereSavedAsFp32GoOnWithTheSameBits) {
  const StateForm narrow = {MainWeightForm::kBF16Remainder, kBf16States};
  const EpochOutcome whole = RunWell(Epoch(narrow));
  EpochArgs widen = From(whole, Epoch({MainWeightForm::kBF16Remainder, kF32States}));
  widen.first_step = 0;
  widen.save_at_start = true;
  const std::string wide = RunWell(widen).committed.at(0);
  const ckpt::Manifest manifest = ManifestOf(wide);
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    EXPECT_EQ(tensor.stored_dtype, DType::kF32) << tensor.name;
  }
  const testing::TrainingState saved = StateIn(whole.committed.at(kSavedStep), widen);
  EXPECT_TRUE(saved.SameAs(StateIn(wide, widen)));
  EXPECT_NE(saved.values[1][0], std::vector<float>(saved.values[1][0].size()));
  EpochArgs rest = From(whole, Epoch(narrow));
  rest.restore_path = wide;
  ExpectSameEnd(whole, RunWell(rest));
}

TEST_F(GpuStateSaves, ADamagedBlockOfBf16MomentsIsNamed) {
  const EpochOutcome whole = RunWell(Epoch({.states = kBf16States}));
  const ckpt::Manifest manifest = ManifestOf(whole.committed.at(kSavedStep));
  const ckpt::TensorRecord& damaged =
      *manifest.FindTensor("state.model.embed_tokens.weight.exp_avg_sq");
  const ckpt::ChunkRecord& chunk = damaged.chunks.front();
  const std::string file = manifest.files[static_cast<size_t>(chunk.file)].path;
  std::fstream stream(whole.committed.at(kSavedStep) + "/" + file,
                      std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(chunk.data_offset + 1);
  const int value = stream.get();
  stream.seekp(chunk.data_offset + 1);
  stream.put(static_cast<char>(value ^ 4));
  stream.close();
  const EpochOutcome refused = RunEpoch(From(whole, Epoch({.states = kBf16States})));
  ASSERT_EQ(refused.results.size(), 1u);
  EXPECT_THAT(std::string(refused.results[0].message()),
              ::testing::HasSubstr(absl::StrCat(file, ": tensor ", damaged.name, ", block 0")));
  EXPECT_EQ(CodeOf(refused.results[0]), ExitCode::kStore);
}

TEST_F(GpuStateSaves, AnFp32JobOpensASaveOfTheNarrowest) {
  const EpochOutcome whole = RunWell(Epoch({MainWeightForm::kBF16Remainder, kBf16States}));
  for (const bool device : {true, false}) {
    EpochArgs args = Epoch({});
    args.spec.compute = plan::ComputeType::kF32;
    args.spec.cpu_devices = !device;
    args.ranks = device ? 1 : 3;
    const EpochOutcome resumed = RunWell(From(whole, args));
    ASSERT_EQ(resumed.steps.size(), whole.steps.size() - kSavedStep);
    for (size_t i = 0; i < resumed.steps.size(); ++i) {
      const float expected = whole.steps[kSavedStep + i].loss;
      EXPECT_NEAR(resumed.steps[i].loss, expected, 5e-3f * expected);
    }
  }
}

TEST_F(GpuStateSaves, MomentsThatWereFp32AreRefusedByAJobThatKeepsBf16) {
  const EpochOutcome whole = RunWell(Epoch({}));
  const EpochOutcome refused = RunEpoch(From(whole, Epoch({.states = kBf16States})));
  ASSERT_EQ(refused.results.size(), 1u);
  EXPECT_THAT(
      std::string(refused.results[0].message()),
      ::testing::ContainsRegex("state\\..*\\.exp_avg: saved as F32, with values that BF16 does "
                               "not have \\(.* in element .*\\); "
                               "training.optimizer.stateDtype: expected fp32, got bf16"));
  EXPECT_EQ(CodeOf(refused.results[0]), ExitCode::kPlanMismatch);
}

}  // namespace
}  // namespace ravel::trainer
