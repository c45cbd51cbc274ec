// Kills at random moments: the daemon of a writer, the store, the coordinator, while a job saves
// into a ravel-store, or into S3, all the time. Commits only rise, a step that was committed never
// changes, every step that is there is whole, and the history is that of an undisturbed run.
//
// RAVEL_KILLS of each program, one otherwise; RAVEL_SEED chooses the moments.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/store/open_store.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/s3_server.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kEndlessSteps = 1'000'000;
constexpr int64_t kSaveEvery = 5;
constexpr int64_t kKept = 20;

enum class Victim { kWriter, kStore, kCoordinator };

// "ravel" or "s3"; of S3 what dies is what speaks for it, while its objects stay.
class StoreKillsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "s3") {
      absl::StatusOr<std::unique_ptr<S3Server>> server = S3Server::Start();
      if (absl::IsNotFound(server.status())) {
        SkipWithout("moto", server.status().message());
        return;
      }
      ASSERT_TRUE(server.ok()) << server.status();
      s3_ = *std::move(server);
      s3_->UseHere();
    }
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    if (s3_ == nullptr) {
      store_ = std::make_unique<StoreProcess>(
          StorePlace{.folder = cluster_->folder() + "/server", .flags = {"--dev-loopback"}});
      ASSERT_EQ(store_->Start(), absl::OkStatus());
    }
  }
  std::string Store() const { return s3_ == nullptr ? store_->Url("team") : "s3://bucket/team"; }
  TinyJob EndlessJob(const std::string& name, const std::string& store, int64_t save_every) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = store,
            .workers = 2,
            .steps = kEndlessSteps,
            .save_every_steps = save_every,
            .keep_last = kKept,
            .max_failures = 10'000};
  }
  // In a random order, `each` of each.
  std::vector<Victim> Victims(int64_t each) {
    std::vector<Victim> victims;
    for (int64_t i = 0; i < each; ++i) {
      victims.insert(victims.end(), {Victim::kWriter, Victim::kStore, Victim::kCoordinator});
    }
    std::shuffle(victims.begin(), victims.end(), random_);
    return victims;
  }
  void KillAndStart(Victim victim) {
    switch (victim) {
      case Victim::kWriter: {
        const std::vector<std::string> names = cluster_->worker_names();
        const std::string name = names[random_() % names.size()];
        cluster_->KillWorker(name);
        ASSERT_EQ(cluster_->StartWorker(name), absl::OkStatus());
        return;
      }
      case Victim::kStore:
        ASSERT_EQ(s3_ == nullptr ? store_->KillAndStart() : s3_->KillAndStart(), absl::OkStatus());
        return;
      case Victim::kCoordinator:
        cluster_->KillCoordinator();
        ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
        return;
    }
  }
  // A moment up to a quarter of a second after the job has gone on from where it was; of S3, where
  // a save takes as long as many steps, after another commit.
  void AwaitMoment(int64_t beyond) {
    const bool goes_on = Eventually(seconds(60), [&] {
      const absl::StatusOr<JobView> view = cluster_->Get("far");
      const bool saved = s3_ == nullptr || (view.ok() && view->committed_step > committed_);
      return view.ok() && view->step > beyond && view->state == "RUNNING" && saved;
    });
    ASSERT_TRUE(goes_on) << cluster_->Report("far") << (s3_ == nullptr ? store_->Log() : "");
    const auto moment =
        std::chrono::steady_clock::now() + milliseconds(static_cast<int64_t>(random_() % 250));
    Eventually(seconds(5), [&] { return std::chrono::steady_clock::now() >= moment; });
  }
  // The job's folder, read as a program does.
  std::unique_ptr<store::ObjectStore> Folder() const {
    absl::StatusOr<std::unique_ptr<store::ObjectStore>> opened = store::OpenStore(Store() + "/far");
    EXPECT_TRUE(opened.ok()) << opened.status();
    return *std::move(opened);
  }
  std::vector<std::string> Names(const store::ObjectStore& folder) const {
    std::vector<std::string> names;
    const auto entries = folder.List("");
    for (const store::ListedEntry& entry : entries.value_or(std::vector<store::ListedEntry>())) {
      names.push_back(entry.name);
    }
    return names;
  }
  // COMMIT of each step that is there; none lies in a save that is under way.
  std::map<std::string, std::string> Commits() const {
    std::map<std::string, std::string> commits;
    const std::unique_ptr<store::ObjectStore> folder = Folder();
    for (const std::string& name : Names(*folder)) {
      if (absl::StartsWith(name, "step-") && !absl::EndsWith(name, ".tmp")) {
        const auto text = store::ReadFile(*folder, name + "/COMMIT", 64 << 10);
        if (text.ok()) {  // else retention takes it this moment
          commits[name] = *text;
        }
      }
    }
    return commits;
  }
  bool Saving() const {
    const std::vector<std::string> names = Names(*Folder());
    return std::any_of(names.begin(), names.end(), [](const std::string& name) {
      return absl::EndsWith(name, ".tmp");
    });
  }
  // A commit that was seen before is as it was, or gone by retention; a new one is added.
  void CheckCommits() {
    for (const auto& [name, text] : Commits()) {
      const auto [known, added] = seen_.emplace(name, text);
      EXPECT_EQ(known->second, text) << name << " was committed twice";
    }
    const absl::StatusOr<JobView> view = cluster_->Get("far");
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_GE(view->committed_step, committed_) << "a commit is lost";
    committed_ = std::max(committed_, view->committed_step);
  }
  void CheckWhole(const std::map<int64_t, std::string>& steps) const {
    for (const auto& [step, url] : steps) {
      const RunResult verified = cluster_->Ctl({"checkpoints", "verify", url});
      EXPECT_TRUE(verified.exit_code == 0 && absl::StrContains(verified.out, ": ok (deep)"))
          << url << ": " << verified.out << verified.err;
    }
  }
  void Cancel(const std::string& job) const {
    EXPECT_EQ(cluster_->Ctl({"cancel", job}).exit_code, 0);
    const auto ended = cluster_->WaitForEnd(job, seconds(60));
    ASSERT_TRUE(ended.ok()) << ended.status();
  }
  // An undisturbed run has the same losses and, at `step`, the same state.
  void CompareWithUndisturbed(int64_t step, const std::string& url) {
    ASSERT_EQ(cluster_->Submit(EndlessJob("plain", cluster_->folder() + "/plain", step)),
              absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForStep("plain", step, seconds(60)), absl::OkStatus());
    ASSERT_TRUE(Eventually(seconds(60), [&] {
      const auto steps = cluster_->Checkpoints("plain");
      return steps.ok() && steps->contains(step);
    }));
    EXPECT_EQ(*cluster_->StateDigest(url),
              *cluster_->StateDigest(cluster_->Checkpoints("plain")->at(step)));
    const auto undisturbed = cluster_->Metrics("plain");
    const auto killed = cluster_->Metrics("far");
    ASSERT_TRUE(undisturbed.ok() && killed.ok());
    std::map<int64_t, std::string> plain;
    for (const StepRow& row : *undisturbed) {
      plain[row.step] = row.loss_bits;
    }
    int64_t told = 0;
    for (const StepRow& row : *killed) {
      if (row.step <= step) {
        ++told;
        EXPECT_EQ(row.loss_bits, plain[row.step]) << "step " << row.step;
      }
    }
    const bool said = absl::StrContains(cluster_->Ctl({"events", "far"}).out, "StepReportsMissing");
    EXPECT_TRUE(told == step || said) << told << " of " << step << " steps are reported";
    std::cout << step << " steps, " << told << " of them reported, as undisturbed\n";
    Cancel("plain");
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::unique_ptr<StoreProcess> store_;  // else s3_
  std::unique_ptr<S3Server> s3_;
  std::mt19937 random_;
  std::map<std::string, std::string> seen_;
  int64_t committed_ = -1;
};

TEST_P(StoreKillsTest, NothingIsTornOrLostWheneverAProgramDies) {
  const int64_t seed = EnvironmentNumber("RAVEL_SEED", 20);
  const int64_t each = EnvironmentNumber("RAVEL_KILLS", 1);
  std::cout << "seed " << seed << ", kills of each program " << each << "\n";
  random_.seed(static_cast<uint32_t>(seed));
  ASSERT_EQ(cluster_->Submit(EndlessJob("far", Store(), kSaveEvery)), absl::OkStatus());
  int64_t during_a_save = 0;
  int64_t step = 0;
  for (const Victim victim : Victims(each)) {
    ASSERT_NO_FATAL_FAILURE(AwaitMoment(step));
    during_a_save += Saving() ? 1 : 0;
    ASSERT_NO_FATAL_FAILURE(KillAndStart(victim));
    ASSERT_NO_FATAL_FAILURE(CheckCommits());
    const absl::StatusOr<JobView> view = cluster_->Get("far");
    step = std::max(step, view.ok() ? view->committed_step : 0);
  }
  ASSERT_NO_FATAL_FAILURE(AwaitMoment(step));
  ASSERT_NO_FATAL_FAILURE(Cancel("far"));
  ASSERT_NO_FATAL_FAILURE(CheckCommits());
  // Old steps may still be on their way out of a slow store, file by file.
  absl::StatusOr<std::map<int64_t, std::string>> steps;
  ASSERT_TRUE(Eventually(seconds(120),
                         [&] {
                           steps = cluster_->Checkpoints("far");
                           return steps.ok() && !steps->empty() && std::ssize(*steps) <= kKept &&
                                  steps->size() == Commits().size();
                         }))
      << "a commit that the coordinator does not know, or one that stays\n"
      << cluster_->Report("far");
  CheckWhole(*steps);
  std::cout << 3 * each << " kills, " << during_a_save << " of them while files were written; "
            << seen_.size() << " commits seen\n";
  CompareWithUndisturbed(steps->rbegin()->first, steps->rbegin()->second);
}

INSTANTIATE_TEST_SUITE_P(Stores,
                         StoreKillsTest,
                         ::testing::Values("ravel", "s3"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ravel::testing
