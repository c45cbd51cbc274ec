#include "tests/testing/device_runs.h"

#include <cerrno>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::trainer {

using plan::RecomputePolicy;

absl::StatusOr<std::unique_ptr<kernels::CudaGpu>> OpenDevice() {
  ASSIGN_OR_RETURN(const kernels::CudaLibrary library,
                   kernels::CudaLibrary::Open(kernels::DefaultCudaLibraryPath()));
  return kernels::CudaGpu::Open(library, 0);
}

std::vector<StrategyCase> DeviceCases() {
  std::vector<StrategyCase> cases;
  for (const char* strategy : {"ZeRO0", "ZeRO1", "ZeRO2", "ZeRO3"}) {
    for (const int64_t width : {1, 2, 4}) {
      if (width == 1 && strategy == std::string("ZeRO1")) {
        continue;  // the plan of ZeRO2
      }
      cases.push_back({.strategy = strategy, .width = width, .in_place = width == 2});
    }
  }
  cases.push_back({.strategy = "ZeRO3", .width = 3, .micro_batches = 3, .small_windows = true});
  cases.push_back(
      {.strategy = "ZeRO3", .width = 4, .recompute = RecomputePolicy::kBlock, .in_place = true});
  cases.push_back({.strategy = "ZeRO1", .width = 3, .micro_batches = 3});
  for (const char* strategy : {"HSDP", "HFSDP"}) {
    for (const int64_t width : {1, 2}) {
      cases.push_back({.strategy = strategy, .width = width, .in_place = width == 2});
    }
  }
  cases.push_back({.strategy = "HFSDP", .width = 2, .micro_batches = 3});
  return cases;
}

RecordArgs DeviceSteps(const StrategyCase& tested, const std::string& model) {
  // Suites of several programs run side by side.
  const std::string folder =
      absl::StrCat(::testing::TempDir(), "/ravel_device_runs_", program_invocation_short_name);
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, folder));
  args.spec.cpu_devices = false;
  args.last_step = kDeviceSteps;
  args.evaluate_every_step = true;
  return args;
}

Recording RecordOn(kernels::CudaGpu& gpu, RecordArgs args) {
  args.gpu = &gpu;
  args.options.poison = true;
  return Record(args);
}

const Recording& RecordedOnce(kernels::CudaGpu& gpu,
                              const std::string& name,
                              const RecordArgs& args) {
  static std::map<std::string, Recording> recordings;
  Recording& recording = recordings[name];
  if (recording.steps.empty()) {
    recording = RecordOn(gpu, args);
  }
  return recording;
}

void PutBefore(const Recording& earlier, Recording& later) {
  later.steps.insert(later.steps.begin(), earlier.steps.begin(), earlier.steps.end());
  later.validation.insert(
      later.validation.begin(), earlier.validation.begin(), earlier.validation.end());
}

absl::Status RunOn(kernels::CudaGpu& gpu, const RecordArgs& args, RankBody body) {
  return RunLocalRanks({.spec = args.spec,
                        .ranks = args.ranks,
                        .body = std::move(body),
                        .adjust = args.adjust,
                        .gpu = &gpu,
                        .gemms = args.gemms});
}

void ExpectANanIsSkippedAndExplained(kernels::CudaGpu& gpu, const RecordArgs& args) {
  const auto body = [](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    const shard::ParameterGroup& group = engine.groups().front();
    if (rank == 0) {
      const float nan = std::numeric_limits<float>::quiet_NaN();
      RETURN_IF_ERROR(engine.memory().Write(std::as_bytes(std::span(&nan, 1)),
                                            group.main_weight() + group.pieces()[0].shard_offset));
    }
    RETURN_IF_ERROR(engine.RefreshWeights());
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(0));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(engine.updates(), 0);
    ASSIGN_OR_RETURN(const std::string why, engine.Localise(0));
    EXPECT_THAT(why, ::testing::HasSubstr("Gather of phase"));
    EXPECT_THAT(why, ::testing::HasSubstr("= nan"));
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu, args, body), absl::OkStatus());
}

void ExpectEqualRuns(const Recording& expected, const Recording& run, const std::string& name) {
  ASSERT_EQ(run.steps.size(), static_cast<size_t>(kDeviceSteps)) << name;
  EXPECT_EQ(FirstDifference(expected, run), "") << name;
  EXPECT_EQ(expected.validation, run.validation) << name;
}

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

}  // namespace ravel::trainer
