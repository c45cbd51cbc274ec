// The mount of a checkpoint store is taken away, or turned read-only, at each moment of a job's
// life: before its first launch, between saves, in the middle of one, while the job restarts, at
// its last save. The job says so, never begins anew, and ends well when the mount is back.
//
// RAVEL_MOMENTS=0 runs every moment, otherwise two of them (one mount that goes, one read-only).

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kSteps = 160;
constexpr int64_t kSaveEvery = 20;

enum class Moment { kQueued, kTraining, kSaving, kRestarting, kLastSave };
enum class Loss { kGone, kReadOnly };

struct Case {
  const char* name;
  Moment moment;
  Loss loss;
};

void PrintTo(const Case& tested, std::ostream* out) {
  *out << tested.name;
}

// Two combinations are no cases. A job without a commit that finds an empty folder begins there, so
// a mount cannot be gone before the first launch. A save holds its files open from its beginning to
// its end, and no mount turns read-only under an open file.
constexpr Case kCases[] = {
    {"GoneWhileTraining", Moment::kTraining, Loss::kGone},
    {"ReadOnlyWhileTraining", Moment::kTraining, Loss::kReadOnly},
    {"ReadOnlyBeforeLaunch", Moment::kQueued, Loss::kReadOnly},
    {"GoneWhileSaving", Moment::kSaving, Loss::kGone},
    {"GoneWhileRestarting", Moment::kRestarting, Loss::kGone},
    {"ReadOnlyWhileRestarting", Moment::kRestarting, Loss::kReadOnly},
    {"GoneAtTheLastSave", Moment::kLastSave, Loss::kGone},
    {"ReadOnlyAtTheLastSave", Moment::kLastSave, Loss::kReadOnly},
};

// A tmpfs in `disk`, seen through a mount of its own in `folder`, which can go and come back.
class Mount {
 public:
  explicit Mount(const std::string& scratch)
      : disk_(scratch + "/disk"), folder_(scratch + "/store") {
    std::filesystem::create_directories(disk_);
    std::filesystem::create_directories(folder_);
    disk_is_there_ = ::mount("tmpfs", disk_.c_str(), "tmpfs", 0, "size=64m") == 0;
    usable_ = disk_is_there_ && Return();
  }
  ~Mount() {
    ::umount2(folder_.c_str(), MNT_DETACH);
    if (disk_is_there_) {
      ::umount2(disk_.c_str(), MNT_DETACH);
    }
  }
  bool usable() const { return usable_; }
  const std::string& folder() const { return folder_; }
  bool TakeAway(Loss loss) {
    if (loss == Loss::kGone) {
      return ::umount2(folder_.c_str(), MNT_DETACH) == 0;
    }
    // Refused while a file is open for writing.
    return Eventually(seconds(10), [&] { return Remount(MS_RDONLY); });
  }
  bool GiveBack(Loss loss) {
    if (loss == Loss::kReadOnly) {
      return Remount(0);
    }
    return Return();
  }

 private:
  bool Return() { return ::mount(disk_.c_str(), folder_.c_str(), nullptr, MS_BIND, nullptr) == 0; }
  bool Remount(unsigned long flags) {
    return ::mount(nullptr, folder_.c_str(), nullptr, MS_BIND | MS_REMOUNT | flags, nullptr) == 0;
  }

  std::string disk_;
  std::string folder_;
  bool disk_is_there_ = false;
  bool usable_ = false;
};

class StoreMomentsTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const bool first_two = GetParam().name == kCases[0].name || GetParam().name == kCases[1].name;
    if (!first_two && EnvironmentNumber("RAVEL_MOMENTS", 2) != 0) {
      GTEST_SKIP() << "the slow form runs every moment";
    }
    // A process that was taken for lost would count its steps anew, and a hold counts them.
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    mount_ = std::make_unique<Mount>(cluster_->folder());
    if (!mount_->usable()) {
      SkipWithout("mounts", "a mount of its own needs CAP_SYS_ADMIN");
      return;
    }
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  // The programs first: they hold files in the mount.
  void TearDown() override {
    if (cluster_ != nullptr) {
      for (const std::string& name : cluster_->worker_names()) {
        cluster_->KillWorker(name);
      }
    }
    mount_.reset();
  }

  TinyJob Job() const {
    return {.name = "job",
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = mount_->folder(),
            .workers = 1,
            .steps = kSteps,
            .save_every_steps = kSaveEvery,
            .keep_last = 3};
  }
  int64_t Committed() const {
    const absl::StatusOr<JobView> view = cluster_->Get("job");
    return view.ok() ? view->committed_step : -1;
  }
  bool InAttempt(int64_t step) const {
    std::error_code error;
    for (std::filesystem::directory_iterator entry(mount_->folder() + "/job", error), end;
         !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename();
      if (absl::StrContains(name, absl::StrCat(step, ".")) && absl::EndsWith(name, ".tmp")) {
        return true;
      }
    }
    return false;
  }
  void StartWorker() {
    // Steps and writes take a while, so that there is a middle of each. A save takes less than the
    // steps to the next one: between them no file is open, and a mount can turn read-only.
    const std::string faults = "trainer.step@*:stall=30ms,save.write@*:stall=60ms";
    ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults(faults)), absl::OkStatus());
  }
  void Reach(Moment moment) {
    if (moment == Moment::kQueued) {
      return;
    }
    const int64_t enough = moment == Moment::kLastSave ? kSteps - kSaveEvery : 2 * kSaveEvery;
    ASSERT_TRUE(Eventually(seconds(30), [&] { return Committed() >= enough; }))
        << cluster_->Report("job");
    const bool saves = moment == Moment::kSaving || moment == Moment::kLastSave;
    if (saves && GetParam().loss == Loss::kGone) {
      EXPECT_TRUE(Eventually(seconds(30), [&] { return InAttempt(Committed() + kSaveEvery); }))
          << cluster_->Report("job");
    }
    if (moment == Moment::kRestarting) {
      for (const pid_t trainer : cluster_->AllTrainers()) {
        ::kill(trainer, SIGKILL);
      }
    }
  }
  bool Told() const {
    const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("job");
    if (events.ok()) {
      for (const EventRow& event : *events) {
        if (event.reason == "StoreUnavailable" || event.type == "CheckpointFailed" ||
            absl::StrContains(event.message, "StoreUnavailable")) {
          return true;
        }
      }
    }
    return false;
  }
  void ExpectNeverBegunAnew() const {
    const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("job");
    ASSERT_TRUE(events.ok()) << events.status();
    for (const EventRow& event : *events) {
      EXPECT_FALSE(event.epoch > 1 && GetParam().moment != Moment::kQueued &&
                   absl::StrContains(event.message, "initial weights"))
          << event.message;
    }
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::unique_ptr<Mount> mount_;
};

TEST_P(StoreMomentsTest, IsToldWaitedForAndNothingIsLost) {
  const Case& now = GetParam();
  if (now.moment != Moment::kQueued) {
    StartWorker();
  }
  // Between its second and its third save a job waits: the mount goes there, however late this
  // process is.
  if (now.moment == Moment::kTraining) {
    cluster_->HoldTrainersAt(3 * kSaveEvery);
  }
  ASSERT_EQ(cluster_->Submit(Job()), absl::OkStatus());
  Reach(now.moment);
  const int64_t committed = Committed();
  ASSERT_TRUE(mount_->TakeAway(now.loss));
  cluster_->LetTrainersGo();
  if (now.moment == Moment::kQueued) {
    StartWorker();
  }
  EXPECT_TRUE(Eventually(seconds(60), [&] { return Told(); })) << cluster_->Report("job");
  const absl::StatusOr<JobView> view = cluster_->Get("job");
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_FALSE(view->Terminal()) << cluster_->Report("job");
  EXPECT_GE(view->committed_step, committed);
  ASSERT_TRUE(mount_->GiveBack(now.loss));
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(90)), absl::OkStatus());
  ExpectNeverBegunAnew();
  EXPECT_EQ(Committed(), kSteps);
  const absl::StatusOr<std::map<int64_t, std::string>> kept = cluster_->Checkpoints("job");
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_TRUE(kept->contains(kSteps));
  for (const auto& [step, path] : *kept) {
    EXPECT_EQ(cluster_->Ctl({"checkpoints", "verify", path}).exit_code, 0) << path;
  }
}

INSTANTIATE_TEST_SUITE_P(Moments,
                         StoreMomentsTest,
                         ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& tested) {
                           return std::string(tested.param.name);
                         });

}  // namespace
}  // namespace ravel::testing
