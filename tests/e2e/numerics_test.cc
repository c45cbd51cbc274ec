// A job goes on from a checkpoint that was computed as it computes, and from another only if it
// says so.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/manifest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/step_layout.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class NumericsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = 6,
            .global_batch = 8,
            .virtual_ranks = 4,
            .save_every_steps = 3};
  }
  // Messages of the job's warnings that its numerics changed.
  std::vector<std::string> Warnings(const std::string& job) const {
    std::vector<std::string> messages;
    const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events(job);
    EXPECT_TRUE(events.ok()) << events.status();
    for (const EventRow& event : *events) {
      if (event.type == "Warning" && event.reason == "NumericsChanged") {
        messages.push_back(event.message);
      }
    }
    return messages;
  }
  bool Reaches(const std::string& job, const std::string& state) const {
    return Eventually(seconds(60), [&] {
      const absl::StatusOr<JobView> view = cluster_->Get(job);
      return view.ok() && view->state == state;
    });
  }

  std::unique_ptr<MiniCluster> cluster_;
};

// A release that computes otherwise would have written this.
void SetNumerics(const std::string& step, const std::string& numerics) {
  absl::StatusOr<ckpt::Manifest> manifest = ckpt::DecodeManifest(ReadText(step + "/manifest.pb"));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  manifest->numerics = numerics;
  const std::string bytes = ckpt::EncodeManifest(*manifest);
  WriteText(step + "/manifest.pb", bytes);
  WriteText(step + "/COMMIT", ckpt::EncodeCommit(ckpt::MakeCommitRecord(*manifest, bytes)));
}

TEST_F(NumericsTest, AJobBeginsFromAStepOfOtherNumericsOnlyIfItAllowsThat) {
  ASSERT_EQ(cluster_->Submit(Job("first")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("first", seconds(60)), absl::OkStatus());
  const std::string step = cluster_->Checkpoints("first")->at(3);
  const std::string shown = cluster_->Ctl({"checkpoints", "show", step}).out;
  EXPECT_THAT(shown, HasSubstr("mesh          shard 1; 4 virtual ranks\n"));
  EXPECT_THAT(shown, HasSubstr("numerics      compute=fp32 determinism=exact device=cpu "));
  // More workers, another strategy: the same numerics.
  TinyJob wide = Job("wide");
  wide.workers = 2;
  wide.parallelism = "strategy: hsdp, replicas: 2";
  wide.resume_from = step;
  ASSERT_EQ(cluster_->Submit(wide), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("wide", seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->StateDigest(cluster_->Get("wide")->committed_path).value(),
            cluster_->StateDigest(cluster_->Get("first")->committed_path).value());
  EXPECT_EQ(Warnings("wide").size(), 0U);
  for (const char* target : {"wide", "store/wide"}) {
    const std::string path =
        target[0] == 's' ? cluster_->folder() + "/" + target : std::string(target);
    EXPECT_THAT(cluster_->Ctl({"checkpoints", "list", path}).out,
                HasSubstr("replicate 2, shard 1"));
    EXPECT_THAT(cluster_->Ctl({"checkpoints", "list", path, "-o", "json"}).out,
                HasSubstr("\"replicate 2, shard 1\""));
  }
  // Other lanes: another order of sums.
  TinyJob other = Job("other");
  other.virtual_ranks = 8;
  other.resume_from = step;
  const absl::Status refused = cluster_->Submit(other);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("spec.checkpoint.resumeFrom: " + step));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("microBatch was 2 and is 1; virtualRanks was 4 and is 8"));
  other.allow_numerics_change = true;
  ASSERT_EQ(cluster_->Submit(other), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("other", seconds(60)), absl::OkStatus());
  ASSERT_EQ(Warnings("other").size(), 1U) << cluster_->Report("other");
  EXPECT_THAT(Warnings("other")[0], HasSubstr("virtualRanks was 4 and is 8"));
}

TEST_F(NumericsTest, AJobThatComputesOtherwiseThanItsOwnStepIsFailedUntilAPersonAllowsIt) {
  TinyJob job = Job("job");
  // One save, when it is asked for: none is settled after the job's end.
  job.steps = job.save_every_steps = 1'000'000;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 3, seconds(60)), absl::OkStatus());
  ASSERT_EQ(cluster_->Ctl({"checkpoint", "job", "--wait"}).exit_code, 0);
  ASSERT_EQ(cluster_->Ctl({"cancel", "job", "--wait"}).exit_code, 0);
  const JobView cancelled = *cluster_->Get("job");
  ASSERT_GE(cancelled.committed_step, 3) << cluster_->Report("job");
  SetNumerics(cancelled.committed_path, "compute=bf16 virtualRanks=4");
  ASSERT_EQ(cluster_->Ctl({"retry", "job"}).exit_code, 0);
  ASSERT_TRUE(Reaches("job", "FAILED")) << cluster_->Report("job");
  EXPECT_EQ(cluster_->Get("job")->reason, "NumericsChanged");
  EXPECT_THAT(cluster_->Get("job")->message, HasSubstr("compute was bf16 and is fp32"));
  EXPECT_EQ(cluster_->Get("job")->committed_step, cancelled.committed_step);
  const RunResult retried = cluster_->Ctl({"retry", "job", "--allow-numerics-change"});
  ASSERT_EQ(retried.exit_code, 0) << retried.err;
  ASSERT_EQ(cluster_->WaitForStep("job", cancelled.committed_step + 6, seconds(60)),
            absl::OkStatus());
  ASSERT_EQ(Warnings("job").size(), 1U) << cluster_->Report("job");
  EXPECT_THAT(Warnings("job")[0], HasSubstr("compute was bf16 and is fp32"));
  EXPECT_THAT(cluster_->Ctl({"get", "job", "-o", "yaml"}).out,
              HasSubstr("allowNumericsChange: true"));
  ASSERT_EQ(cluster_->Ctl({"cancel", "job", "--wait"}).exit_code, 0);
}

}  // namespace
}  // namespace ravel::testing
