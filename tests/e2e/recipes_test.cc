// Quantized jobs through the whole service: the same losses on other workers, transports and
// strategies, through a SIGKILL and a resume; a plan names its gemm path; a change of recipe is
// refused.

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 16;

class RecipesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    ASSERT_EQ(cluster_->StartWorkers(3, cluster_->HoldFaults()), absl::OkStatus());
  }

  // Matrices of 128 and 256, which every recipe takes.
  TinyJob Job(const std::string& name, const std::string& precision, int64_t workers = 3) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = workers,
            .sizes = workers == 3 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{},
            .steps = kSteps,
            .sequence_length = 32,
            .save_every_steps = 4,
            .hidden = 128,
            .intermediate = 256,
            .layers = 2,
            .heads = 2,
            .key_value_heads = 2,
            .more_spec = absl::StrCat("  precision: {", precision, "}\n")};
  }
  absl::StatusOr<std::vector<StepRow>> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(120)));
    return cluster_->Metrics(job.name);
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(RecipesTest, AKilledWorkerChangesNoBit) {
  const std::vector<std::string> recipes = {
      "recipe: fp8_tensor", "recipe: fp8_block", "recipe: nvfp4, keepBf16: ['*.down_proj.*']"};
  for (size_t i = 0; i < recipes.size(); ++i) {
    const std::string& recipe = recipes[i];
    const std::string tag = absl::StrCat(i);
    const absl::StatusOr<std::vector<StepRow>> whole = Train(Job("whole-" + tag, recipe, 1));
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_LT(whole->back().loss, whole->front().loss);

    const std::string name = "killed-" + tag;
    cluster_->HoldTrainersAt(7);
    ASSERT_EQ(cluster_->Submit(Job(name, recipe)), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForStep(name, 6, seconds(60)), absl::OkStatus());
    const std::vector<pid_t> trainers = cluster_->Trainers("w1");
    ASSERT_FALSE(trainers.empty());
    ::kill(trainers.front(), SIGKILL);
    cluster_->LetTrainersGo();
    ASSERT_EQ(cluster_->WaitForSuccess(name, seconds(120)), absl::OkStatus());
    const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(name);
    ASSERT_TRUE(history.ok()) << history.status();
    EXPECT_EQ(FirstDifference(*history, *whole), "") << recipe;
    // A kill before the first commit, on a busy machine, begins the history anew.
    EXPECT_GT(history->back().epoch, 1) << "the kill came too late";
  }
}

TEST_F(RecipesTest, TransportAndStrategyChangeNoBitAndAResumeGoesOn) {
  const std::string recipe = "recipe: fp8_tensor, amaxHistory: 4";
  const absl::StatusOr<std::vector<StepRow>> one = Train(Job("one", recipe, 1));
  ASSERT_TRUE(one.ok()) << one.status();
  TinyJob apart = Job("gloo", recipe, 2);
  apart.transport = "gloo";
  apart.parallelism = "strategy: optim";
  const absl::StatusOr<std::vector<StepRow>> gloo = Train(apart);
  ASSERT_TRUE(gloo.ok()) << gloo.status();
  EXPECT_EQ(FirstDifference(*gloo, *one), "");
  EXPECT_THAT(cluster_->Ctl({"describe", "one"}).out,
              ::testing::ContainsRegex("Gemm path, input gradient +cpu_reference"));
  const std::string saved = cluster_->Checkpoints("one")->at(8);
  TinyJob resumed = Job("resumed", recipe, 2);
  resumed.resume_from = saved;
  const absl::StatusOr<std::vector<StepRow>> rest = Train(resumed);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(FirstDifference(*rest, {one->begin() + 8, one->end()}), "");
  EXPECT_EQ(cluster_->Ctl({"checkpoints", "verify", saved}).exit_code, 0);
  EXPECT_EQ(
      cluster_->Ctl({"checkpoints", "export", saved, "--to", cluster_->folder() + "/exported"})
          .exit_code,
      0);
  // Another recipe computes other bits.
  TinyJob other = Job("other", "recipe: mxfp8", 2);
  other.resume_from = saved;
  const absl::Status refused = cluster_->Submit(other);
  if (refused.ok()) {
    ASSERT_TRUE(Eventually(seconds(30), [&] {
      return cluster_->Ctl({"describe", "other"}).out.find("recipe was") != std::string::npos;
    })) << cluster_->Report("other");
  } else {
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("recipe was fp8_tensor/delayed/4/margin2"));
  }
}

TEST_F(RecipesTest, APlanNamesItsGemmPathAndRefusalsNameTheirField) {
  const std::string folder = cluster_->folder();
  const auto plan = [&](const std::string& name, const std::string& precision, int64_t hidden) {
    TinyJob job = Job(name, precision);
    job.hidden = hidden;
    WriteText(folder + "/" + name + ".yaml", ToYaml(job));
    return cluster_->Ctl({"plan", "-f", folder + "/" + name + ".yaml", "--devices", "2xcpu"});
  };
  const RunResult good = plan("good", "recipe: fp8_block", 128);
  EXPECT_EQ(good.exit_code, 0) << good.err;
  EXPECT_THAT(good.out, HasSubstr("recipe fp8_block: 14 matrices of layers"));
  EXPECT_THAT(good.out, HasSubstr("gemm path cpu_reference"));
  EXPECT_THAT(plan("odd", "recipe: fp8_block", 120).err, HasSubstr("spec.precision.recipe"));
  EXPECT_THAT(plan("scaling", "recipe: mxfp8, scaling: current", 128).err,
              HasSubstr("spec.precision.scaling"));
  EXPECT_THAT(plan("margin", "recipe: mxfp8, amaxMargin: 0", 128).err,
              HasSubstr("spec.precision.amaxMargin"));
  EXPECT_THAT(plan("wide", "recipe: fp8_tensor, amaxMargin: 9", 128).err,
              HasSubstr("spec.precision.amaxMargin: expected a whole number from 0 to 8"));
  EXPECT_THAT(plan("fp32", "recipe: mxfp8, compute: fp32", 128).err,
              HasSubstr("spec.precision.compute"));
  EXPECT_THAT(good.out, HasSubstr("an emulation, of forward, input gradient, weight gradient"));
  EXPECT_THAT(plan("path", "recipe: mxfp8, emulation: [dequant_bf16]", 128).err,
              HasSubstr("spec.precision.emulation"));
  EXPECT_THAT(plan("none", "recipe: fp16", 128).err, HasSubstr("precision"));
  EXPECT_THAT(plan("pattern", "recipe: mxfp8, keepBf16: ['*.nothing']", 128).err,
              HasSubstr("spec.precision.keepBf16[0]"));
}

}  // namespace
}  // namespace ravel::testing
