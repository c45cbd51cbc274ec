#include "worker/trainer/watchdog.h"

#include <atomic>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/local_communicator.h"

namespace ravel::trainer {
namespace {

using ::ravel::testing::Eventually;
constexpr std::chrono::seconds kDeadline{10};

// Commands that a test puts in; closed when the daemon is gone.
class Wire {
 public:
  void Put(Command command) {
    MutexLock lock(mutex_);
    commands_.push_back(std::move(command));
    changed_.NotifyAll();
  }
  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }
  absl::StatusOr<Command> Receive() {
    MutexLock lock(mutex_);
    while (commands_.empty() && !closed_) {
      changed_.Wait(mutex_);
    }
    if (commands_.empty()) {
      return absl::UnavailableError("closed");
    }
    Command command = std::move(commands_.front());
    commands_.pop_front();
    return command;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<Command> commands_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class CountingReporter final : public Reporter {
 public:
  absl::Status Publish(const std::string&, const std::string&) override { return absl::OkStatus(); }
  absl::Status Ready(const TrainerReady&) override { return absl::OkStatus(); }
  absl::Status Step(const StepReport&) override { return absl::OkStatus(); }
  absl::Status Progress(const ProgressReport& report) override {
    ++beats;
    step = report.step;
    return absl::OkStatus();
  }
  absl::Status SaveStarted(int64_t, int64_t, int64_t) override { return absl::OkStatus(); }
  absl::Status SaveFailed(const ravel::SaveFailed&) override { return absl::OkStatus(); }
  absl::Status Sealed(const ckpt::Seal&) override { return absl::OkStatus(); }
  absl::Status Ledger(const LedgerReport&) override {
    ++ledgers;
    return absl::OkStatus();
  }
  absl::Status Failed(const absl::Status&) override { return absl::OkStatus(); }
  absl::Status Done(int64_t) override { return absl::OkStatus(); }

  std::atomic<int> beats = 0;
  std::atomic<int64_t> step = -1;
  std::atomic<int> ledgers = 0;
};

// Work of its device has failed, and runs until it is aborted.
class FailedOnItsDevice final : public comm::Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const char* transport() const override { return "failed"; }
  bool shared_memory() const override { return false; }
  absl::Status AllocateArena(const comm::ArenaSizes&) override { return Failure(); }
  std::byte* arena(plan::MemoryKind) override { return nullptr; }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions&) override {
    return Failure();
  }
  absl::Status Barrier(const comm::CollectiveTag&) override { return Failure(); }
  absl::Status AllGather(const AllGatherOptions&) override { return Failure(); }
  absl::StatusOr<comm::PieceViews> ExchangePieces(const ExchangeOptions&) override {
    return Failure();
  }
  absl::Status ReleasePieces(const comm::CollectiveTag&) override { return Failure(); }
  absl::Status AllGatherBytes(const comm::CollectiveTag&,
                              std::span<const std::byte>,
                              std::span<std::byte>) override {
    return Failure();
  }
  void Abort(std::string_view why) override {
    const MutexLock lock(mutex_);
    reason_ = why;
  }
  absl::Status Failure() const override { return absl::UnavailableError("rank 3 is gone"); }
  IssueState issued() const override { return {}; }
  comm::CollectiveLedger& ledger() override { return ledger_; }

  std::string reason() {
    const MutexLock lock(mutex_);
    return reason_;
  }

 private:
  comm::CollectiveLedger ledger_;
  Mutex mutex_;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
};

class WatchdogTest : public ::testing::Test {
 protected:
  static constexpr int64_t kEpoch = 5;
  static constexpr int kNotEnded = -1;

  WatchdogTest()
      : position_(SystemClock::Get()),
        watchdog_({.reporter = reporter_,
                   .box = box_,
                   .position = position_,
                   .epoch = kEpoch,
                   .receive = [this] { return wire_.Receive(); },
                   .interrupt = [this] { wire_.Close(); },
                   .exit = [this](ExitCode code) { ended_ = static_cast<int>(code); },
                   .beat_interval = std::chrono::milliseconds(5)}) {
    watchdog_.Start();
  }

  Wire wire_;
  CountingReporter reporter_;
  CommandBox box_;
  Position position_;
  std::atomic<int> ended_ = kNotEnded;
  Watchdog watchdog_;
};

TEST_F(WatchdogTest, AStopReachesAStepThreadThatIsStuckInACollective) {
  auto group = comm::CreateLocalGroup(2);
  ASSERT_TRUE(group.ok());
  watchdog_.SetCommunicator((*group)[0].get());
  absl::Status stuck;
  // The other rank never arrives.
  std::thread step([&] { stuck = (*group)[0]->Barrier({}); });
  wire_.Put(Stop{.code = ExitCode::kCommunicator, .reason = "rank 1 is lost"});
  step.join();
  EXPECT_TRUE(absl::IsAborted(stuck)) << stuck;
  EXPECT_TRUE(Eventually(kDeadline, [&] { return ended_ == 11; }));
  EXPECT_EQ(CodeOf(box_.WaitForStep(1)), ExitCode::kCommunicator);
  EXPECT_EQ(CodeOf(box_.closed()), ExitCode::kCommunicator);
  watchdog_.SetCommunicator(nullptr);
}

TEST_F(WatchdogTest, AFailureOfTheDeviceIsAborted) {
  FailedOnItsDevice group;
  watchdog_.SetCommunicator(&group);
  EXPECT_TRUE(Eventually(kDeadline, [&] { return group.reason() == "rank 3 is gone"; }));
  watchdog_.SetCommunicator(nullptr);
  EXPECT_EQ(ended_, kNotEnded) << "the step thread reports it";
}

TEST_F(WatchdogTest, TheLedgerIsToldWhileTheStepThreadIsStuck) {
  auto group = comm::CreateLocalGroup(2);
  ASSERT_TRUE(group.ok());
  watchdog_.SetCommunicator((*group)[0].get());
  std::thread step([&] { EXPECT_FALSE((*group)[0]->Barrier({}).ok()); });
  wire_.Put(AskForLedger{.epoch = kEpoch - 1, .most = 10});  // of a time gone by: no answer
  wire_.Put(AskForLedger{.epoch = kEpoch, .most = 10});
  EXPECT_TRUE(Eventually(kDeadline, [&] { return reporter_.ledgers == 1; }));
  wire_.Put(Stop{.code = ExitCode::kStopped, .reason = "enough"});
  step.join();
  EXPECT_EQ(reporter_.ledgers, 1);
  watchdog_.SetCommunicator(nullptr);
}

TEST_F(WatchdogTest, AStopEndsAWaitForPermission) {
  absl::Status waited;
  std::thread step([&] { waited = box_.WaitForStep(3); });
  wire_.Put(Stop{.code = ExitCode::kStopped, .reason = "cancelled"});
  step.join();
  EXPECT_EQ(CodeOf(waited), ExitCode::kStopped);
  EXPECT_TRUE(Eventually(kDeadline, [&] { return ended_ == 10; }));
}

TEST_F(WatchdogTest, CommandsOfAnotherEpochAreIgnored) {
  wire_.Put(AllowSteps{.epoch = kEpoch - 1, .until_step = 100});
  wire_.Put(AskForSave{.epoch = kEpoch + 1, .sequence = 9, .then_stop = true});
  wire_.Put(AllowSteps{.epoch = kEpoch, .until_step = 7});
  wire_.Put(AskForSave{.epoch = kEpoch, .sequence = 2, .then_stop = false});
  EXPECT_TRUE(box_.WaitForStep(7).ok());
  EXPECT_TRUE(Eventually(kDeadline, [&] { return box_.control().save_sequence == 2; }));
  EXPECT_EQ(box_.control().stop, 0);
  absl::Status waited;
  std::thread step([&] { waited = box_.WaitForStep(8); });  // not allowed by the stale command
  wire_.Put(AllowSteps{.epoch = kEpoch, .until_step = 8});
  step.join();
  EXPECT_TRUE(waited.ok());
  EXPECT_EQ(ended_, kNotEnded);
}

TEST_F(WatchdogTest, AnswersOfSavesReachTheWriter) {
  EXPECT_EQ(box_.answered_step(), -1);
  wire_.Put(Commit{.step = 5, .committed = false, .reason = "StoreFull"});
  wire_.Put(Commit{.step = 7, .committed = true, .reason = ""});
  EXPECT_TRUE(Eventually(kDeadline, [&] { return box_.answered_step() == 7; }));
  EXPECT_TRUE(box_.IsRefused(5));
  EXPECT_FALSE(box_.IsRefused(7));
  wire_.Put(Commit{.step = 6, .committed = true, .reason = ""});  // late
  wire_.Put(Commit{.step = 8, .committed = false, .reason = "late"});
  EXPECT_TRUE(Eventually(kDeadline, [&] { return box_.IsRefused(8); }));
  EXPECT_EQ(box_.answered_step(), 8);
}

TEST_F(WatchdogTest, RecordsReachTheRendezvousOnce) {
  wire_.Put(RecordsOfGroup{.epoch = kEpoch, .group = "main", .records = {"a", "b"}});
  const auto records = box_.WaitForRecords("main");
  ASSERT_TRUE(records.ok());
  EXPECT_EQ(*records, (std::vector<std::string>{"a", "b"}));
}

TEST_F(WatchdogTest, TheEndOfTheDaemonEndsTheTrainer) {
  wire_.Close();
  EXPECT_TRUE(Eventually(kDeadline, [&] { return ended_ == 11; }));
}

TEST_F(WatchdogTest, BeatsGoOnWhileTheStepThreadIsBusy) {
  position_.FinishStep(42);
  const int before = reporter_.beats;
  EXPECT_TRUE(Eventually(kDeadline, [&] { return reporter_.beats >= before + 5; }));
  EXPECT_EQ(reporter_.step, 42);
}

}  // namespace
}  // namespace ravel::trainer
