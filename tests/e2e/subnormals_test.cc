// A processor mode that would change bits: a trainer says so at its start and trains nothing.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

TEST(SubnormalsTest, ATrainerThatFlushesThemDoesNotTrain) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  ASSERT_EQ(cluster.StartWorkers(1, {{"LD_PRELOAD", RAVEL_FLUSHING_LIBRARY}}), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 5000, TinyJob().vocabulary);
  ASSERT_EQ(cluster.Submit({.name = "flushed",
                            .tokens_path = cluster.folder() + "/tokens.bin",
                            .store = cluster.folder() + "/store",
                            .workers = 1,
                            .steps = 3}),
            absl::OkStatus());
  std::string message;
  EXPECT_TRUE(Eventually(seconds(30), [&] {
    for (const EventRow& event : cluster.Events("flushed").value_or(std::vector<EventRow>())) {
      // Later events of the same reason tell of the next attempt.
      message = event.type == "EpochChanged" ? event.message : message;
    }
    return !message.empty();
  })) << cluster.Report("flushed");
  EXPECT_THAT(message, ::testing::HasSubstr("subnormal numbers: this process writes zero"));
  EXPECT_EQ(cluster.Get("flushed")->step, 0);
}

}  // namespace
}  // namespace ravel::testing
