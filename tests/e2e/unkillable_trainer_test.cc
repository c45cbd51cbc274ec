// A trainer that SIGKILL does not end, as on a hung mount or a wedged driver: its job goes on
// elsewhere, its device is out, its node stays.

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

TEST(UnkillableTrainerTest, TheJobGoesOnWithoutItsDevice) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start({}, kPatientDetection);
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  WriteTokens(cluster.folder() + "/tokens.bin", 100'000, TinyJob().vocabulary);
  // This daemon's SIGKILL does nothing.
  ASSERT_EQ(cluster.StartWorker("w0", cluster.HoldFaults("daemon.kill@*:error=wedged")),
            absl::OkStatus());
  ASSERT_EQ(cluster.StartWorker("w1", cluster.HoldFaults()), absl::OkStatus());
  ASSERT_EQ(cluster.StartWorker("w2", cluster.HoldFaults()), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForReadyNodes(3), absl::OkStatus());
  const TinyJob job = {.name = "job",
                       .tokens_path = cluster.folder() + "/tokens.bin",
                       .store = cluster.folder() + "/store",
                       .workers = 2,
                       .sizes = {2},
                       .steps = 80,
                       .global_batch = 16,
                       .sequence_length = 128,
                       .save_every_steps = 20,
                       .hidden = 96,
                       .intermediate = 260};
  cluster.HoldTrainersAt(30);  // each epoch's
  ASSERT_EQ(cluster.Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForStep("job", 29, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster.Trainers("w0");
  ASSERT_EQ(trainers.size(), 1U);
  ASSERT_EQ(::kill(trainers[0], SIGSTOP), 0);
  const auto nodes = [&cluster] { return cluster.Ctl({"nodes", "list"}).out; };
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> view = cluster.Get("job");
    return view.ok() && view->state == "RUNNING" && view->epoch > 1;
  })) << cluster.Report("job");
  EXPECT_THAT(cluster.Ctl({"events", "job"}).out, HasSubstr("Unkillable"));
  EXPECT_THAT(nodes(), HasSubstr("cannot be killed"));
  EXPECT_EQ(cluster.Trainers("w0"), trainers) << "it is still there";
  EXPECT_EQ(cluster.Trainers("w2").size(), 1U);
  // It goes at last: the device is back.
  ASSERT_EQ(::kill(trainers[0], SIGKILL), 0);
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    return nodes().find("cannot be killed") == std::string::npos;
  })) << nodes();
  cluster.LetTrainersGo();
  EXPECT_EQ(cluster.WaitForSuccess("job", seconds(60)), absl::OkStatus());
}

}  // namespace
}  // namespace ravel::testing
