// Saves that fail or hang, with the real programs: told within seconds, their bytes gone, and
// training goes on.

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "common/clock.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

class SaveFailuresTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& store) const {
    return {.name = "job",
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = store,
            .workers = 2,
            .steps = 100'000,
            .global_batch = 2,
            .virtual_ranks = 2,
            .save_every_steps = 100,
            .keep_last = 1,
            .hidden = 144,
            .intermediate = 400};
  }
  std::string Events() const { return cluster_->Ctl({"events", "job"}).out; }
  std::optional<EventRow> FirstFailure() const {
    const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("job");
    if (events.ok()) {
      for (const EventRow& event : *events) {
        if (event.type == "CheckpointFailed") {
          return event;
        }
      }
    }
    return std::nullopt;
  }
  int64_t Step() const {
    const absl::StatusOr<JobView> job = cluster_->Get("job");
    return job.ok() ? job->step : -1;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

int64_t BytesUnder(const std::string& folder) {
  int64_t bytes = 0;
  for (const std::filesystem::directory_entry& entry : EntriesUnder(folder)) {
    std::error_code gone;
    const auto size = entry.is_regular_file(gone) ? entry.file_size(gone) : 0;
    bytes += gone ? 0 : static_cast<int64_t>(size);
  }
  return bytes;
}

TEST_F(SaveFailuresTest, AStoreWithoutRoomIsToldAndKeptEmptyAndTheJobGoesOn) {
  const std::string store = cluster_->folder() + "/store";
  std::filesystem::create_directories(store);
  // Room for the part of one rank, 4.3 MB, and not for both.
  if (::mount("tmpfs", store.c_str(), "tmpfs", 0, "size=6m") != 0) {
    SkipWithout("mounts", "mounting a small tmpfs needs CAP_SYS_ADMIN");
    return;
  }
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(151);  // one save has failed, the next is not begun
  ASSERT_EQ(cluster_->Submit(Job(store)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 100, seconds(60)), absl::OkStatus());
  const int64_t due_ms = SystemClock::Get().WallMs();
  std::optional<EventRow> failed;
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    failed = FirstFailure();
    return failed.has_value();
  })) << cluster_->Report("job");
  EXPECT_LT(failed->time_ms - due_ms, 5000);
  EXPECT_THAT(Events(), HasSubstr("StoreFull"));
  EXPECT_TRUE(Eventually(seconds(60), [&] { return BytesUnder(store) < 64 * 1024; }))
      << BytesUnder(store) << " bytes stay";
  std::printf("told after %ld ms; %ld bytes stay\n",
              static_cast<long>(failed->time_ms - due_ms),
              static_cast<long>(BytesUnder(store)));
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForStep("job", 300, seconds(60)), absl::OkStatus());
  const RunResult described = cluster_->Ctl({"describe", "job"});
  EXPECT_THAT(described.out, HasSubstr("CheckpointFresh"));
  EXPECT_THAT(described.out, HasSubstr("SaveFailed"));
  EXPECT_THAT(cluster_->Ctl({"get", "job", "-o", "json"}).out, HasSubstr("failedSaves"));
  const RunResult now = cluster_->Ctl({"checkpoint", "job", "--wait"});
  EXPECT_NE(now.exit_code, 0);
  EXPECT_THAT(now.out + now.err, HasSubstr("StoreFull"));
  const absl::StatusOr<JobView> job = cluster_->Get("job");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state, "RUNNING");
  EXPECT_EQ(job->epoch, 1);
  EXPECT_EQ(cluster_->Ctl({"cancel", "job", "--wait"}).exit_code, 0);
  EXPECT_TRUE(Eventually(seconds(60), [&] { return ::umount(store.c_str()) == 0; }));
}

TEST_F(SaveFailuresTest, AHungStoreStopsNeitherTheStepsNorTheExit) {
  ASSERT_EQ(cluster_->StartWorker("w0"), absl::OkStatus());
  // The store of rank 1 answers no more from its second write on.
  ASSERT_EQ(cluster_->StartWorker("w1", {{"RAVEL_FAULTS", "save.write@2:stall=1h"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
  TinyJob tiny = Job(cluster_->folder() + "/store");
  tiny.when_busy = "skip";
  ASSERT_EQ(cluster_->Submit(tiny), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 450, seconds(60)), absl::OkStatus());
  EXPECT_TRUE(Eventually(seconds(60), [&] { return absl::StrContains(Events(), "SaveSkipped"); }))
      << cluster_->Report("job");
  const int64_t step = Step();
  EXPECT_TRUE(Eventually(seconds(60), [&] { return Step() > step + 100; }));
  const RunResult now = cluster_->Ctl({"checkpoint", "job", "--wait", "--deadline", "1s"});
  EXPECT_NE(now.exit_code, 0);
  EXPECT_THAT(now.out + now.err, HasSubstr("DeadlineExceeded"));
  const auto cancelled = steady_clock::now();
  EXPECT_EQ(cluster_->Ctl({"cancel", "job", "--wait"}).exit_code, 0);
  EXPECT_LT(steady_clock::now() - cancelled, seconds(30)) << "the store hangs for an hour";
  EXPECT_TRUE(Eventually(seconds(30), [&] { return cluster_->AllTrainers().empty(); }));
}

}  // namespace
}  // namespace ravel::testing
