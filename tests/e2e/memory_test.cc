// Fully sharded trainers need less memory each as workers are added.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr double kMiB = 1024.0 * 1024.0;

class MemoryTest : public ::testing::Test {
 protected:
  // Peak over time of what the job's trainers hold together, shared pages counted once, over their
  // number; 0 when the job failed. They are held before their last step, with all that a step needs
  // in memory, until they have been measured there. One trainer's own figure would not do: what it
  // shares with others becomes its alone while they start and as they end.
  static double PeakTrainerMiB(MiniCluster& cluster, const TinyJob& job) {
    cluster.HoldTrainersAt(job.steps);
    const absl::Status submitted = cluster.Submit(job);
    EXPECT_EQ(submitted, absl::OkStatus());
    if (!submitted.ok()) {
      return 0;
    }
    int64_t peak = 0;
    JobView view;
    Eventually(seconds(120), [&] {
      const bool held = view.step == job.steps - 1;  // as of the last look
      int64_t together = 0;
      for (const pid_t trainer : cluster.AllTrainers()) {
        together += PssBytes(trainer);
      }
      peak = std::max(peak, together);
      if (held) {
        cluster.LetTrainersGo();
      }
      const absl::StatusOr<JobView> now = cluster.Get(job.name);
      view = now.ok() ? *now : view;
      return view.Terminal();
    });
    EXPECT_EQ(view.state, "SUCCEEDED") << view.message << cluster.Report(job.name);
    EXPECT_TRUE(Eventually(seconds(30), [&] { return cluster.AllTrainers().empty(); }));
    return static_cast<double>(peak) / kMiB / static_cast<double>(job.workers);
  }
};

TEST_F(MemoryTest, PeakOfATrainerFallsAsWorkersAreAdded) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  ASSERT_EQ(cluster.StartWorkers(4, cluster.HoldFaults()), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 20000, 512);

  std::map<int64_t, double> peak_mib;
  for (const int64_t workers : {1, 2, 4}) {
    // 13 M parameters in 12 layers: 200 MiB of state against little activation memory.
    const TinyJob job = {.name = absl::StrCat("w", workers),
                         .tokens_path = cluster.folder() + "/tokens.bin",
                         .store = cluster.folder() + "/store",
                         .workers = workers,
                         .steps = 3,
                         .global_batch = 4,
                         .virtual_ranks = 4,
                         .sequence_length = 32,
                         .save_every_steps = 3,
                         .vocabulary = 512,
                         .hidden = 320,
                         .intermediate = 860,
                         .layers = 12,
                         .heads = 5,
                         .key_value_heads = 5};
    peak_mib[workers] = PeakTrainerMiB(cluster, job);
    std::printf(
        "%ld workers: peak %.1f MiB a trainer\n", static_cast<long>(workers), peak_mib[workers]);
  }
  EXPECT_LT(peak_mib[2], 0.75 * peak_mib[1]);
  EXPECT_LT(peak_mib[4], 0.75 * peak_mib[2]);
}

}  // namespace
}  // namespace ravel::testing
