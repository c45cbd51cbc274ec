#include "coordinator/jobs/planner_driver.h"

#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "coordinator/ctl/local_paths.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

std::string JobText(const std::string& data, int64_t hidden = 64) {
  return absl::StrCat(R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model:
    config: {vocabSize: 257, hiddenSize: )",
                      hidden,
                      R"(, intermediateSize: 128, numHiddenLayers: 2,
             numAttentionHeads: 4, maxPositionEmbeddings: 32}
  data:
    train:
      - {path: )",
                      data,
                      R"(}
  training:
    steps: 100
    globalBatch: 8
    optimizer: {lr: 3e-4}
  devices: {kind: cpu, count: 4}
  elastic: {min: 1, max: 4}
  checkpoint: {store: /data/checkpoints, everySteps: 10}
)");
}

plan::JobSpec SpecOf(int64_t hidden) {
  const CanonicalJob job = Canonicalize(ParseJobFile(JobText("/data/train", hidden)).job, {});
  EXPECT_TRUE(job.ok());
  return job.spec;
}

TEST(PlannerDriverTest, APlanThatARunHoldsIsFoundHoweverManyCameAfterIt) {
  PlannerDriver planner;
  auto held = planner.Plan(SpecOf(64), 2, true);
  ASSERT_TRUE(held.ok()) << held.status();
  const std::string digest = (*held)->digest;
  auto other = planner.Plan(SpecOf(64), 3, true);
  ASSERT_TRUE(other.ok());
  const std::string other_digest = (*other)->digest;
  *other = nullptr;
  for (int64_t i = 1; i <= 70; ++i) {
    ASSERT_TRUE(planner.Plan(SpecOf(64 + 8 * i), 1, true).ok());
  }
  EXPECT_EQ(planner.Find(digest), *held);
  EXPECT_EQ(planner.Find(other_digest), nullptr) << "nobody held that one";
}

TEST(PlannerDriverTest, ChecksPushNoPlanOutAndGiveUpBetweenSizes) {
  PlannerDriver planner;
  auto kept = planner.Plan(SpecOf(64), 2, true);
  ASSERT_TRUE(kept.ok());
  const std::string digest = (*kept)->digest;
  *kept = nullptr;
  for (int64_t i = 1; i <= 40; ++i) {
    ASSERT_TRUE(CheckAllSizes(planner, SpecOf(64 + 8 * i)).ok());
  }
  EXPECT_NE(planner.Find(digest), nullptr) << "160 worlds were checked meanwhile";
  int asked = 0;
  const absl::Status stopped = CheckAllSizes(planner, SpecOf(64), [&asked] {
    return ++asked < 3 ? absl::OkStatus() : absl::CancelledError("the client is gone");
  });
  EXPECT_TRUE(absl::IsCancelled(stopped));
  EXPECT_EQ(asked, 3);
}

TEST(JobFilePathsTest, AFifoIsRefusedAndNotWaitedFor) {
  testing::ScratchFolder scratch;
  const std::string fifo = scratch.path() + "/tokens.bin";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  v1::TrainingJob flat = ParseJobFile(JobText(fifo)).job;
  flat.mutable_spec()->mutable_data()->set_format("flat_u16");
  const CanonicalJob data = ctl::CanonicalizeHere(flat, ctl::PathScope::kAll);
  ASSERT_FALSE(data.ok());
  EXPECT_NE(FormatViolation(data.violations[0], "").find("regular file"), std::string::npos)
      << FormatViolation(data.violations[0], "");
  ASSERT_EQ(mkfifo((scratch.path() + "/config.json").c_str(), 0600), 0);
  v1::TrainingJob model = ParseJobFile(JobText(fifo)).job;
  model.mutable_spec()->mutable_model()->Clear();
  model.mutable_spec()->mutable_model()->set_from(scratch.path());
  EXPECT_FALSE(ctl::CanonicalizeHere(model, ctl::PathScope::kModel).ok());
}

}  // namespace
}  // namespace ravel::coordinator
