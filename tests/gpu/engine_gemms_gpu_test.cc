// Choices of gemms on a device: measured once, the same on any number of ranks and after any
// start (tests/worker/trainer/gemm_choices_test.cc has what needs an emulated device).

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"

namespace ravel::trainer {
namespace {

// Each start with a table of its own.
class GpuGemms : public GpuEngine {
 protected:
  void SetUp() override {
    GpuEngine::SetUp();
    if (!IsSkipped() && !gpu().no_cublas().empty()) {
      GTEST_SKIP() << gpu().no_cublas();
    }
  }
  struct Run {
    Recording recording;
    GemmChoices choices;  // of rank 0
  };
  static RecordArgs Case(const StrategyCase& tested) {
    RecordArgs args = DeviceSteps(tested);
    args.gemms = GemmOptions();
    return args;
  }
  static Run Start(RecordArgs args) {
    Run run;
    const auto fresh = kernels::CudaGpu::Open(gpu().library(), gpu().index());
    EXPECT_TRUE(fresh.ok()) << fresh.status();
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      if (rank == 0) {
        run.choices = engine.gemm_choices();
      }
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(**fresh, args, body), absl::OkStatus());
    args.gemms->saved = run.choices.table;  // or this engine would measure for itself
    run.recording = RecordOn(**fresh, args);
    const GemmChoices& choices = run.choices;
    std::printf("%d gemms: %d saved, %d cached, %d measured, %.3f s\n",
                static_cast<int>(choices.gemms),
                static_cast<int>(choices.saved),
                static_cast<int>(choices.cached),
                static_cast<int>(choices.measured),
                choices.seconds);
    return run;
  }
};

// Gemms of the table by their operands: "e4m3*e4m3+fast" is of forward, "e5m2*e4m3+fast" of an
// input gradient.
TEST_F(GpuGemms, SumsOfCodesAreFastAsTheJobSays) {
  using plan::FastAccumulation;
  for (const FastAccumulation fast : {FastAccumulation::kNone,
                                      FastAccumulation::kForward,
                                      FastAccumulation::kForwardAndInputGradient}) {
    RecordArgs args = DeviceSteps({}, "recipes");
    args.gemms = GemmOptions();
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.recipe = {
        .recipe = plan::Recipe::kCurrent, .keep_bf16 = {}, .fast_accumulation = fast};
    const auto fresh = kernels::CudaGpu::Open(gpu().library(), gpu().index());
    ASSERT_TRUE(fresh.ok()) << fresh.status();
    std::string table;
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      table = engine.gemm_choices().table;
      return absl::OkStatus();
    };
    ASSERT_EQ(RunOn(**fresh, args, body), absl::OkStatus());
    const auto has = [&](const char* operands) { return table.find(operands) != table.npos; };
    const bool forward = fast != FastAccumulation::kNone;
    const bool gradient = fast == FastAccumulation::kForwardAndInputGradient;
    EXPECT_EQ(has("-e4m3*e4m3+fast-bf16-"), forward) << table;
    EXPECT_EQ(has("-e4m3*e4m3-bf16-"), !forward) << table;
    EXPECT_EQ(has("-e5m2*e4m3+fast-bf16-"), gradient) << table;
    EXPECT_EQ(has("-e5m2*e4m3-bf16-"), !gradient) << table;
    EXPECT_TRUE(has("-e5m2*e4m3-f32-")) << table;
    EXPECT_FALSE(has("+fast-f32-")) << table;
  }
}

TEST_F(GpuGemms, OneTableServesAnyNumberOfRanks) {
  for (const int64_t micro_batches : {1, 3}) {
    Run one;
    for (const char* strategy : {"ZeRO0", "HSDP"}) {
      for (const int64_t width : {1, 2, 4}) {
        RecordArgs args =
            Case({.strategy = strategy, .width = width, .micro_batches = micro_batches});
        args.gemms->saved = one.choices.table;
        Run run = Start(args);
        const std::string name = absl::StrCat(strategy, ", ", width, ", ", micro_batches);
        if (one.recording.steps.empty()) {
          one = std::move(run);
          EXPECT_GT(one.choices.measured, 0);
          continue;
        }
        // What a rank computes is a lane of the job, whoever else there is.
        EXPECT_EQ(run.choices.saved, run.choices.gemms) << name;
        ExpectEqualRuns(one.recording, run.recording, name);
      }
    }
  }
}

TEST_F(GpuGemms, ASecondStartReadsTheDisk) {
  RecordArgs args = Case({.strategy = "ZeRO3", .width = 2});
  args.gemms->cache_folder = ::testing::TempDir() + "/ravel_gpu_gemms";
  std::filesystem::remove_all(args.gemms->cache_folder);
  const Run first = Start(args);
  EXPECT_GT(first.choices.measured, 0);
  const Run second = Start(args);
  EXPECT_EQ(second.choices.measured, 0);
  EXPECT_EQ(second.choices.cached, first.choices.gemms);
  ExpectEqualRuns(first.recording, second.recording, "a second start");
  std::filesystem::remove_all(args.gemms->cache_folder);
}

}  // namespace
}  // namespace ravel::trainer
