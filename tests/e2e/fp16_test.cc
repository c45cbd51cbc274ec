// Jobs in fp16 through the whole service: the loss scale goes through steps that overflow, a
// SIGKILL and a resume on other workers with the same history; metrics and plans show it; refusals
// name their field.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 16;
// The first steps overflow, and every second good one makes the scale larger.
constexpr char kRestless[] =
    "compute: fp16, lossScale: {initial: 262144, growthInterval: 2, minimum: 4}";

class Fp16Test : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    ASSERT_EQ(cluster_->StartWorkers(3, cluster_->HoldFaults()), absl::OkStatus());
  }

  TinyJob Job(const std::string& name, const std::string& precision, int64_t workers = 3) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = workers,
            .sizes = workers == 3 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{},
            .steps = kSteps,
            .save_every_steps = 4,
            .more_spec = absl::StrCat("  precision: {", precision, "}\n")};
  }
  absl::StatusOr<std::vector<StepRow>> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(120)));
    return cluster_->Metrics(job.name);
  }
  // The loss scale of each step, as the newest record of it says.
  std::vector<double> Scales(const std::string& name) const {
    std::vector<double> scales(kSteps, 0);
    const RunResult lines = cluster_->Ctl({"metrics", name, "-o", "jsonl"});
    for (const auto& text : absl::StrSplit(lines.out, '\n', absl::SkipEmpty())) {
      const absl::StatusOr<json::Value> line = json::Parse(std::string(text));
      EXPECT_TRUE(line.ok()) << text;
      const json::Value* scale = line->Find("loss_scale");
      if (scale != nullptr) {
        scales[static_cast<size_t>(line->Find("step")->AsInt() - 1)] = scale->AsDouble();
      }
    }
    return scales;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(Fp16Test, AKilledWorkerAndAResumeChangeNoBitOfLossesAndScales) {
  const absl::StatusOr<std::vector<StepRow>> whole = Train(Job("whole", kRestless, 1));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::vector<double> scales = Scales("whole");
  EXPECT_EQ(scales[0], 262144);
  EXPECT_EQ(scales[1], 131072);
  EXPECT_GT(scales[kSteps - 1], 4);
  EXPECT_TRUE(std::adjacent_find(scales.begin(), scales.end(), std::less<>()) != scales.end())
      << "the scale has never grown";

  cluster_->HoldTrainersAt(7);
  ASSERT_EQ(cluster_->Submit(Job("killed", kRestless)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("killed", 6, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster_->Trainers("w1");
  ASSERT_FALSE(trainers.empty());
  ::kill(trainers.front(), SIGKILL);
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("killed", seconds(120)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("killed");
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, *whole), "");
  EXPECT_GT(history->back().epoch, history->front().epoch) << "the kill came too late";
  EXPECT_EQ(Scales("killed"), scales);

  const std::string saved = cluster_->Checkpoints("whole")->at(8);
  TinyJob resumed = Job("resumed", kRestless, 2);
  resumed.resume_from = saved;
  resumed.transport = "gloo";
  resumed.parallelism = "strategy: optim";
  const absl::StatusOr<std::vector<StepRow>> rest = Train(resumed);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(FirstDifference(*rest, {whole->begin() + 8, whole->end()}), "");
  const std::vector<double> rest_scales = Scales("resumed");
  EXPECT_TRUE(std::equal(scales.begin() + 8, scales.end(), rest_scales.begin() + 8));
  EXPECT_EQ(cluster_->Ctl({"checkpoints", "verify", saved}).exit_code, 0);
}

TEST_F(Fp16Test, APlanNamesTheTypeAndRefusalsNameTheirField) {
  const std::string folder = cluster_->folder();
  const auto plan = [&](const std::string& name, const std::string& precision) {
    WriteText(folder + "/" + name + ".yaml", ToYaml(Job(name, precision)));
    return cluster_->Ctl({"plan", "-f", folder + "/" + name + ".yaml", "--devices", "2xcpu"});
  };
  const RunResult good = plan("good", "compute: fp16");
  EXPECT_EQ(good.exit_code, 0) << good.err;
  EXPECT_THAT(good.out, HasSubstr("fp16 weights and activations"));
  EXPECT_THAT(plan("recipe", "compute: fp16, recipe: mxfp8").err,
              HasSubstr("spec.precision.compute"));
  EXPECT_THAT(plan("scale", "compute: bf16, lossScale: {static: 8}").err,
              HasSubstr("spec.precision.lossScale"));
  EXPECT_THAT(plan("power", "compute: fp16, lossScale: {initial: 1000}").err,
              HasSubstr("spec.precision.lossScale.initial"));
  EXPECT_THAT(cluster_->Ctl({"explain", "spec.precision.lossScale"}).out,
              HasSubstr("growthInterval"));
}

}  // namespace
}  // namespace ravel::testing
