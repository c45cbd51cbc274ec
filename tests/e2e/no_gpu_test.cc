// A machine without a driver: `nodes list` says so, and a job that wants a GPU waits and says what
// for, wherever one looks.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kNoDriver[] = "no driver: libnvidia-ml.so.1 not found";

class NoGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
    const std::string nodes = Out({"nodes", "list", "-o", "json"});
    if (!absl::StrContains(nodes, "no driver")) {
      GTEST_SKIP() << "this machine has a driver: " << nodes;
    }
  }

  std::string Out(const std::vector<std::string>& arguments) {
    const RunResult result = cluster_->Ctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out + result.err;
  }
  // A tiny job of the file's text, but for GPUs.
  void SubmitForGpu() {
    WriteTokens(cluster_->folder() + "/tokens.bin", 5000, TinyJob().vocabulary);
    const std::string yaml = ToYaml({.name = "wants-gpu",
                                     .tokens_path = cluster_->folder() + "/tokens.bin",
                                     .store = cluster_->folder() + "/store",
                                     .workers = 1,
                                     .steps = 3});
    ASSERT_TRUE(absl::StrContains(yaml, "kind: cpu")) << yaml;
    WriteText(cluster_->folder() + "/job.yaml",
              absl::StrReplaceAll(yaml, {{"kind: cpu", "kind: gpu"}}));
    Out({"submit", "-f", cluster_->folder() + "/job.yaml"});
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(NoGpuTest, NodesListSaysThatThereIsNoDriver) {
  EXPECT_THAT(Out({"nodes", "list"}), AllOf(HasSubstr("NOTE"), HasSubstr(kNoDriver)));
  EXPECT_THAT(Out({"nodes", "list", "-o", "json"}), HasSubstr(kNoDriver));
}

TEST_F(NoGpuTest, AJobForAGpuStaysQueuedWithTheReason) {
  SubmitForGpu();
  const std::string reason =
      absl::StrCat("needs 1 free gpu devices, 0 are free: no node has a GPU (w0: ", kNoDriver, ")");
  ASSERT_TRUE(Eventually(std::chrono::seconds(20), [&] {
    const absl::StatusOr<JobView> job = cluster_->Get("wants-gpu");
    return job.ok() && job->message == reason;
  })) << Out({"get", "wants-gpu", "-o", "json"});
  EXPECT_EQ(cluster_->Get("wants-gpu")->state, "QUEUED");
  for (const std::vector<std::string>& look : std::vector<std::vector<std::string>>{
           {"get", "wants-gpu"}, {"list"}, {"describe", "wants-gpu"}, {"list", "-o", "json"}}) {
    EXPECT_THAT(Out(look), AllOf(HasSubstr("QUEUED"), HasSubstr(reason))) << look.front();
  }
}

TEST_F(NoGpuTest, AJobForACpuIsTrainedBesideIt) {
  SubmitForGpu();
  ASSERT_EQ(cluster_->Submit({.name = "on-cpu",
                              .tokens_path = cluster_->folder() + "/tokens.bin",
                              .store = cluster_->folder() + "/store-cpu",
                              .workers = 1,
                              .steps = 3}),
            absl::OkStatus());
  EXPECT_EQ(cluster_->WaitForSuccess("on-cpu", std::chrono::seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->Get("wants-gpu")->state, "QUEUED");
}

}  // namespace
}  // namespace ravel::testing
