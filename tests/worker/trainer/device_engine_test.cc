// The engine on a CUDA device, which here is emulated (tests/testing/emulated_cuda): the order of
// what is issued, its addresses and lifetimes. No device code runs: what computes are the host's
// ops, with the partial sums of the device's kernels. So all runs on the device must have the same
// bits, and those on the host the same up to the order of a sum.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "kernels/cuda_device.h"
#include "tests/worker/trainer/fake_supervisor.h"
#include "tests/worker/trainer/strategy_cases.h"

namespace ravel::trainer {
namespace {

using plan::RecomputePolicy;

constexpr char kDeviceModel[] = "odd_tied";
constexpr int64_t kDeviceSteps = 3;
constexpr char kUnordered[] = "no event orders stream";

std::string DeviceFolder() {
  return absl::StrCat(::testing::TempDir(), "/ravel_device_engine");
}

std::unique_ptr<kernels::CudaGpu> OpenEmulated() {
  const auto library = kernels::CudaLibrary::Open(RAVEL_EMULATED_CUDA_LIBRARY);
  CHECK_MSG(library.ok(), std::string(library.status().message()).c_str());
  auto gpu = kernels::CudaGpu::Open(*library, 0);
  CHECK_MSG(gpu.ok(), std::string(gpu.status().message()).c_str());
  return *std::move(gpu);
}

RecordArgs StepsOf(const StrategyCase& tested, const std::string& model = kDeviceModel) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, DeviceFolder()));
  args.last_step = kDeviceSteps;
  args.evaluate_every_step = true;
  return args;
}

Recording RecordOnDevice(RecordArgs args) {
  const std::unique_ptr<kernels::CudaGpu> gpu = OpenEmulated();
  args.gpu = gpu.get();
  args.executor.poison = true;
  return Record(args);
}

void ExpectEqualRuns(const Recording& expected, const Recording& run, const std::string& name) {
  ASSERT_EQ(run.steps.size(), static_cast<size_t>(kDeviceSteps)) << name;
  EXPECT_EQ(FirstDifference(expected, run), "") << name;
  EXPECT_EQ(expected.validation, run.validation) << name;
}

// Of all elements of all tensors: the norm of the difference over the norm.
double RelativeDifference(const std::map<std::string, std::vector<float>>& a,
                          const std::map<std::string, std::vector<float>>& b) {
  double difference = 0;
  double norm = 0;
  for (const auto& [name, values] : a) {
    for (size_t i = 0; i < values.size(); ++i) {
      const double delta = double{values[i]} - double{b.at(name).at(i)};
      difference += delta * delta;
      norm += double{values[i]} * double{values[i]};
    }
  }
  return std::sqrt(difference / norm);
}

void ExpectNearHost(const Recording& host, const Recording& device, const std::string& name) {
  ASSERT_EQ(device.steps.size(), host.steps.size()) << name;
  EXPECT_EQ(device.steps.front().loss, host.steps.front().loss) << name;
  for (size_t i = 0; i < host.steps.size(); ++i) {
    EXPECT_NEAR(device.steps[i].loss, host.steps[i].loss, 1e-5 * host.steps[i].loss) << name;
    EXPECT_NEAR(device.steps[i].grad_norm, host.steps[i].grad_norm, 1e-5) << name;
    EXPECT_NEAR(device.validation[i], host.validation[i], 1e-5 * host.validation[i]) << name;
  }
  EXPECT_LT(RelativeDifference(host.exp_avg, device.exp_avg), 1e-5) << name;
  EXPECT_LT(RelativeDifference(host.exp_avg_sq, device.exp_avg_sq), 1e-5) << name;
  EXPECT_EQ(device.updates, host.updates) << name;
}

// One rank of a device, by number of micro-batches.
const Recording& DeviceReference(int64_t micro_batches) {
  static std::map<int64_t, Recording> references;
  Recording& reference = references[micro_batches];
  if (reference.steps.empty()) {
    reference = RecordOnDevice(StepsOf({.micro_batches = micro_batches, .in_place = true}));
  }
  return reference;
}

class DeviceStrategies : public ::testing::TestWithParam<StrategyCase> {};

TEST_P(DeviceStrategies, GiveTheBitsOfOneRank) {
  const Recording run = RecordOnDevice(StepsOf(GetParam()));
  ExpectEqualRuns(DeviceReference(GetParam().micro_batches), run, GetParam().name());
}

std::vector<StrategyCase> DeviceCases() {
  std::vector<StrategyCase> cases;
  for (const char* strategy : {"ZeRO0", "ZeRO1", "ZeRO2", "ZeRO3"}) {
    for (const int64_t width : {1, 2, 4}) {
      cases.push_back({.strategy = strategy, .width = width, .in_place = width == 2});
    }
  }
  cases.push_back({.strategy = "ZeRO3", .width = 3, .micro_batches = 3, .small_windows = true});
  cases.push_back(
      {.strategy = "ZeRO3", .width = 4, .recompute = RecomputePolicy::kBlock, .in_place = true});
  cases.push_back({.strategy = "ZeRO1", .width = 3, .micro_batches = 3});
  cases.push_back({.strategy = "HSDP", .width = 2, .in_place = true});
  cases.push_back({.strategy = "HFSDP", .width = 2, .micro_batches = 3});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Few,
                         DeviceStrategies,
                         ::testing::ValuesIn(DeviceCases()),
                         [](const auto& tested) { return tested.param.name(); });

TEST(DeviceEngine, EveryModelTrainsAsOnTheHost) {
  for (const char* model : {"odd_tied", "odd_untied", "qwen2_tied", "qwen3_untied", "gpt2_tied"}) {
    const RecordArgs one = StepsOf({.strategy = "ZeRO3"}, model);
    const Recording device = RecordOnDevice(one);
    ExpectNearHost(Record(one), device, model);
    const RecordArgs two = StepsOf({.strategy = "ZeRO3", .width = 2}, model);
    ExpectEqualRuns(device, RecordOnDevice(two), model);
  }
}

TEST(DeviceEngine, Bf16WireHasTheSameBitsOnAnyNumberOfRanks) {
  RecordArgs args = StepsOf({.strategy = "ZeRO3"});
  args.spec.gradient_wire = plan::WireType::kBF16;
  const Recording expected = RecordOnDevice(args);
  EXPECT_NE(FirstDifference(expected, DeviceReference(1)), "");
  for (const int64_t width : {2, 3}) {
    args = StepsOf({.strategy = "ZeRO3", .width = width});
    args.spec.gradient_wire = plan::WireType::kBF16;
    ExpectEqualRuns(expected, RecordOnDevice(args), absl::StrCat(width, " ranks"));
  }
}

TEST(DeviceEngine, MeasuringNormsChangesNoBit) {
  RecordArgs args = StepsOf({.strategy = "ZeRO2", .width = 2});
  args.spec.norms_every = 2;
  ExpectEqualRuns(DeviceReference(1), RecordOnDevice(args), "norms");
}

TEST(DeviceEngine, WhatIsAllocatedIsThePlanAndWhatIsReported) {
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2, .in_place = true};
  const std::unique_ptr<kernels::CudaGpu> gpu = OpenEmulated();
  const int64_t free_before = *gpu->FreeBytes();
  const RecordArgs args = StepsOf(tested);
  std::atomic<int64_t> reported = 0;
  std::atomic<int64_t> free_within = 0;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.arena_bytes(), engine.planned_bytes());
    reported += engine.arena_bytes() + engine.device_bytes();
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.Evaluate().status());  // all ranks have allocated everything
    ASSIGN_OR_RETURN(const int64_t free_bytes, gpu->FreeBytes());
    free_within = free_bytes;
    return engine.Evaluate().status();
  };
  ASSERT_TRUE(
      RunLocalRanks(
          {.spec = args.spec, .ranks = 2, .body = body, .adjust = args.adjust, .gpu = gpu.get()})
          .ok());
  EXPECT_NEAR(static_cast<double>(free_before - free_within), static_cast<double>(reported), 8192);
  EXPECT_EQ(*gpu->FreeBytes(), free_before);
}

TEST(DeviceEngine, AStepWithoutFiniteGradientsIsSkippedAndExplained) {
  const std::unique_ptr<kernels::CudaGpu> gpu = OpenEmulated();
  const RecordArgs args = StepsOf({.strategy = "ZeRO3", .width = 2});
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    const shard::ParameterGroup& group = engine.groups().front();
    if (rank == 0) {
      const float nan = std::numeric_limits<float>::quiet_NaN();
      RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(&nan, 1)),
                                            group.main_weight() + group.pieces()[0].shard_offset));
    }
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(0));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(engine.updates(), 0);
    ASSIGN_OR_RETURN(const std::string why, engine.Localise(0));
    EXPECT_THAT(why, ::testing::HasSubstr("Gather of phase"));
    EXPECT_THAT(why, ::testing::HasSubstr("= nan"));
    return absl::OkStatus();
  };
  const absl::Status status = RunLocalRanks(
      {.spec = args.spec, .ranks = 2, .body = body, .adjust = args.adjust, .gpu = gpu.get()});
  EXPECT_TRUE(status.ok()) << status;
}

class DeviceTrainer : public ::testing::Test {
 protected:
  DeviceTrainer() { std::filesystem::remove_all(folder_); }
  ~DeviceTrainer() override { unsetenv(kLibrary); }
  void UseLibrary(const char* path) { setenv(kLibrary, path, 1); }
  EpochArgs Epoch(bool on_device) {
    EpochArgs args;
    args.spec = CaseJob(kDeviceModel, folder_);
    args.spec.steps = 5;
    args.spec.checkpoint.every_steps = 2;
    args.spec.evaluation_every = 0;
    args.spec.cpu_devices = !on_device;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }

 private:
  static constexpr char kLibrary[] = "RAVEL_CUDA_LIBRARY";
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_device_trainer");
  int64_t epoch_ = 0;
};

// The steps that a run of `args` reports; it is expected to succeed.
EpochOutcome RunWell(const EpochArgs& args) {
  EpochOutcome outcome = RunEpoch(args);
  for (const absl::Status& result : outcome.results) {
    EXPECT_TRUE(result.ok()) << result;
  }
  EXPECT_TRUE(outcome.commit_errors.empty());
  return outcome;
}

TEST_F(DeviceTrainer, AStateGoesOnWhereverItWasSaved) {
  constexpr int64_t kSavedStep = 2;
  UseLibrary(RAVEL_EMULATED_CUDA_LIBRARY);
  for (const bool saved_on_device : {true, false}) {
    const EpochOutcome whole = RunWell(Epoch(saved_on_device));
    ASSERT_TRUE(whole.committed.contains(kSavedStep));
    for (const bool device : {true, false}) {
      EpochArgs args = Epoch(device);
      args.restore_path = whole.committed.at(kSavedStep);
      args.first_step = kSavedStep;
      const EpochOutcome resumed = RunWell(args);
      ASSERT_EQ(resumed.steps.size(), whole.steps.size() - kSavedStep);
      // Forward passes have the same bits on both, later steps only where it was saved.
      EXPECT_EQ(resumed.steps[0].loss, whole.steps[kSavedStep].loss);
      for (size_t i = 0; i < resumed.steps.size(); ++i) {
        const float expected = whole.steps[kSavedStep + i].loss;
        EXPECT_NEAR(resumed.steps[i].loss, expected, device == saved_on_device ? 0 : 1e-5f);
      }
    }
  }
}

TEST_F(DeviceTrainer, WithoutTheLibraryAJobForGpusEndsWithDeviceError) {
  UseLibrary("/nonexistent/libravel_cuda.so");
  const EpochOutcome outcome = RunEpoch(Epoch(true));
  ASSERT_EQ(outcome.results.size(), 1u);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kDevice);
  EXPECT_EQ(ReasonOf(outcome.results[0]), "DeviceError");
  EXPECT_THAT(std::string(outcome.results[0].message()),
              ::testing::HasSubstr("/nonexistent/libravel_cuda.so not found"));
}

// A wait of the plan between streams that nothing else implies: of a Forward for its Gather.
TEST(DeviceEngineDeathTest, AWaitThatIsDroppedIsFound) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2, .small_windows = true};
  RecordArgs args = StepsOf(tested);
  const auto adjust = args.adjust;
  const auto drop = [&](plan::OpCode waiter, plan::OpCode awaited) {
    args.adjust = [=](plan::ShardingPlan& plan) -> absl::Status {
      RETURN_IF_ERROR(adjust(plan));
      int dropped = 0;
      for (plan::StepProgram& program : plan.programs) {
        for (plan::Instruction& instruction : program.instructions) {
          if (instruction.op == waiter) {
            dropped += static_cast<int>(std::erase_if(instruction.waits, [&](int wait) {
              return program.instructions[static_cast<size_t>(wait)].op == awaited;
            }));
          }
        }
      }
      CHECK_MSG(dropped > 0, "the plan has no such wait");
      return absl::OkStatus();
    };
  };
  drop(plan::OpCode::kForward, plan::OpCode::kGather);
  EXPECT_DEATH(RecordOnDevice(args), kUnordered);
  drop(plan::OpCode::kReduceScatter, plan::OpCode::kBackward);
  EXPECT_DEATH(RecordOnDevice(args), kUnordered);
}

}  // namespace
}  // namespace ravel::trainer
