// One job that goes on from its own checkpoints, each time on another mesh and with another
// strategy: losses, weights and moments are at every hop those of one rank that was never stopped.

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kHopSteps = 2;

// (shard 2 x tensor 2) -> 4 x 1 -> 1 x 4 -> 3 x 1 -> 2 x 2.
std::vector<StrategyCase> Hops() {
  return {{.strategy = "ZeRO3", .width = 2, .tensor = 2},
          {.strategy = "ZeRO2", .width = 4},
          {.strategy = "ZeRO1", .width = 1, .tensor = 4, .sequence = true},
          {.strategy = "ZeRO0", .width = 3},
          {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true}};
}

class TensorHops : public ::testing::TestWithParam<const char*> {
 protected:
  TensorHops() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  // With RAVEL_INTEROP_STORE the steps stay below that folder, for tests/interop/tensor_hops.py.
  ~TensorHops() override {
    if (std::getenv("RAVEL_INTEROP_STORE") == nullptr) {
      std::filesystem::remove_all(folder_);
    }
  }
  static std::string Root() {
    const char* kept = std::getenv("RAVEL_INTEROP_STORE");
    return kept == nullptr ? OwnFolder("ravel_interop") : std::string(kept);
  }

  EpochArgs Run(const StrategyCase& tested, int64_t first, int64_t end) {
    plan::JobSpec spec = JobOf(tested, GetParam(), folder_ + "/data");
    spec.tensor_parts = 4;
    spec.schedule.kind = plan::ScheduleKind::kConstant;  // of no length
    EpochArgs args = runs_.Whole(spec, tested.ranks());
    args.spec.steps = end;
    args.spec.checkpoint.every_steps = kHopSteps;
    args.first_step = first;
    return args;
  }

  const std::string folder_ = absl::StrCat(Root(), "/ravel_tensor_hops_", GetParam());
  ResumeRuns runs_{folder_};
};

TEST_P(TensorHops, EveryMeshGoesOnWithTheBitsOfOneRank) {
  const std::vector<StrategyCase> hops = Hops();
  const auto steps = static_cast<int64_t>(hops.size()) * kHopSteps;
  const EpochOutcome whole = RunWell(Run({.strategy = "ZeRO0"}, 0, steps));
  ASSERT_EQ(whole.steps.size(), static_cast<size_t>(steps));
  std::string last;
  for (size_t hop = 0; hop < hops.size(); ++hop) {
    SCOPED_TRACE(hops[hop].name());
    const int64_t first = static_cast<int64_t>(hop) * kHopSteps;
    EpochArgs args = Run(hops[hop], first, first + kHopSteps);
    args.restore_path = last;
    const EpochOutcome run = RunWell(args);
    ASSERT_EQ(run.steps.size(), static_cast<size_t>(kHopSteps));
    for (int64_t step = 0; step < kHopSteps; ++step) {
      const StepReport& expected = whole.steps[static_cast<size_t>(first + step)];
      const StepReport& got = run.steps[static_cast<size_t>(step)];
      EXPECT_EQ(std::bit_cast<uint32_t>(got.loss), std::bit_cast<uint32_t>(expected.loss));
      EXPECT_EQ(got.grad_norm, expected.grad_norm);
    }
    last = run.committed.at(first + kHopSteps);
    EXPECT_EQ(ManifestOf(last).state_digest,
              ManifestOf(whole.committed.at(first + kHopSteps)).state_digest);
    ExpectVerifies(last);
  }
}

INSTANTIATE_TEST_SUITE_P(Sample,
                         TensorHops,
                         ::testing::Values("bundled_rope_scaling", "cut_gpt2_tied"),
                         [](const auto& tested) { return std::string(tested.param); });
INSTANTIATE_TEST_SUITE_P(All,
                         TensorHops,
                         ::testing::ValuesIn(std::vector<const char*>{
                             "cut_llama_untied", "cut_qwen2_tied", "cut_qwen3_untied"}),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace ravel::trainer
