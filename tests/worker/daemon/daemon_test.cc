// The daemon with real child processes and a Fleet server in this process.

#include "worker/daemon/daemon.h"

#include <algorithm>
#include <thread>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "common/crypto.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "tests/worker/daemon/fake_fleet_service.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

constexpr char kJob[] = "job-uid";

std::function<bool(const v1::Up&)> Exited(int64_t rank) {
  return [rank](const v1::Up& up) { return up.has_exited() && up.exited().rank() == rank; };
}
std::function<bool(const v1::Up&)> Frame(v1::TrainerUp::KindCase kind, int64_t rank) {
  return [kind, rank](const v1::Up& up) {
    return up.has_trainer() && up.trainer().rank() == rank &&
           up.trainer().frame().kind_case() == kind;
  };
}
std::function<bool(const v1::Up&)> Result(int64_t command_id) {
  return [command_id](const v1::Up& up) {
    return up.has_result() && up.result().command_id() == command_id;
  };
}
bool IsHello(const v1::Up& up) {
  return up.has_hello();
}
bool IsBeat(const v1::Up& up) {
  return up.has_beat();
}

v1::Down MakeLaunch(const std::string& behaviour,
                    int64_t epoch,
                    int ranks,
                    const std::string& plan) {
  v1::Down down;
  v1::Launch& launch = *down.mutable_launch();
  launch.set_job_uid(kJob);
  launch.set_epoch(epoch);
  launch.set_attempt(1);
  const Sha256Digest digest = Sha256(plan);
  launch.set_plan_digest(std::string(digest.begin(), digest.end()));
  for (int rank = 0; rank < ranks; ++rank) {
    v1::StartTrainer& start = *launch.add_trainers();
    start.set_job_name(behaviour);
    start.set_rank(rank);
  }
  return down;
}

v1::Down MakeStop(int64_t epoch, int64_t grace_ms) {
  v1::Down down;
  down.mutable_stop()->set_job_uid(kJob);
  down.mutable_stop()->set_epoch(epoch);
  down.mutable_stop()->set_grace_ms(grace_ms);
  return down;
}

v1::Down MakeCommand(int64_t epoch, int64_t rank) {
  v1::Down down;
  down.mutable_trainer()->set_job_uid(kJob);
  down.mutable_trainer()->set_epoch(epoch);
  down.mutable_trainer()->set_rank(rank);
  return down;
}

class DaemonTest : public ::testing::Test {
 protected:
  void StartAll(FakeFleet::Options options = {}) {
    fleet_ = FakeFleet::Start(options);
    daemon_ = std::make_unique<Daemon>(
        DaemonOptions{.coordinator = fleet_->address(),
                      .node_id = "node-1",
                      .data_address = "127.0.0.1",
                      .work_dir = scratch_.path(),
                      .trainer_program = FAKE_TRAINER,
                      .version = "test",
                      .facts = {.devices = {{"cpu", "a cpu", 1 << 30, "cpu-0"}},
                                .device_message = "no driver",
                                .cpu_isa = "avx2",
                                .host_id = "host"},
                      .park_when_refused = parks_,
                      .park_time = std::chrono::milliseconds(50),
                      .drain_limit = drain_limit_});
    thread_ = std::thread([this] { exit_code_ = daemon_->Run(); });
    fleet_->WaitFor(IsHello);
  }
  void TearDown() override {
    if (thread_.joinable()) {
      daemon_->Stop("test is over");
      thread_.join();
    }
  }

  // Launches and waits until the ranks are ready.
  void Launch(const std::string& behaviour, int64_t epoch, int ranks) {
    const int64_t id = fleet_->Send(MakeLaunch(behaviour, epoch, ranks, "the plan"));
    EXPECT_TRUE(fleet_->WaitFor(Result(id)).result().ok());
  }
  void LaunchReady(const std::string& behaviour, int64_t epoch, int ranks) {
    Launch(behaviour, epoch, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      fleet_->WaitFor([&](const v1::Up& up) {
        return Frame(v1::TrainerUp::kReady, rank)(up) && up.trainer().epoch() == epoch;
      });
    }
  }
  std::string Refusal(const v1::Down& down) {
    const v1::CommandResult result = fleet_->WaitFor(Result(fleet_->Send(down))).result();
    EXPECT_FALSE(result.ok());
    return result.message();
  }

  testing::ScratchFolder scratch_;
  std::chrono::milliseconds drain_limit_{100};
  bool parks_ = false;
  std::unique_ptr<FakeFleet> fleet_;
  std::unique_ptr<Daemon> daemon_;
  std::thread thread_;
  int exit_code_ = -1;
};

TEST_F(DaemonTest, HelloSaysWhatTheNodeIs) {
  StartAll();
  const v1::Hello hello = fleet_->WaitFor(IsHello).hello();
  EXPECT_EQ(hello.node_id(), "node-1");
  EXPECT_EQ(hello.incarnation().size(), 32u);
  EXPECT_EQ(hello.devices_size(), 1);
  EXPECT_EQ(hello.devices(0).kind(), "cpu");
  EXPECT_EQ(hello.host_id(), "host");
  EXPECT_EQ(hello.device_message(), "no driver");
}

TEST_F(DaemonTest, FramesGoBothWaysAndBeatsCarryProgress) {
  StartAll();
  LaunchReady("echo", 1, 2);
  // The fetched plan reached the trainer.
  EXPECT_EQ(fleet_->WaitFor(Frame(v1::TrainerUp::kReady, 1)).trainer().frame().ready().step(), 8);
  v1::Down run = MakeCommand(1, -1);
  run.mutable_trainer()->mutable_frame()->mutable_run()->set_until_step(42);
  fleet_->Send(run);
  for (int rank : {0, 1}) {
    EXPECT_EQ(fleet_->WaitFor(Frame(v1::TrainerUp::kStep, rank)).trainer().frame().step().step(),
              42);
  }
  // A launch and a command were heard; beats before the command say 1.
  const v1::Up beat = fleet_->WaitFor([](const v1::Up& up) {
    return up.has_beat() && up.beat().trainers_size() == 2 &&
           up.beat().trainers(1).progress().phase() == "fake" && up.beat().heard_command() == 2;
  });
  EXPECT_EQ(beat.beat().trainers(1).job_uid(), kJob);
  EXPECT_EQ(fleet_->Count(Frame(v1::TrainerUp::kProgress, 0)), 0) << "progress rides on beats";
}

// A coordinator that has no such files asks; a question that cannot be read is answered, too.
TEST_F(DaemonTest, ALookAtPathsIsAnsweredWithWhatIsThere) {
  StartAll();
  testing::WriteText(scratch_.path() + "/tokens.bin", std::string("\1\0\2\0", 4));
  const auto answer = [](int64_t id) {
    return [id](const v1::Up& up) { return up.has_look() && up.look().look_id() == id; };
  };
  v1::Down down;
  v1::Look& look = *down.mutable_look();
  look.set_look_id(7);
  look.set_limit_ms(20'000);
  look.set_token_format(2);  // flat_u16
  look.add_token_files()->set_path(scratch_.path() + "/tokens.bin");
  look.add_token_files()->set_path("/absent.bin");
  fleet_->Send(down);
  const v1::LookResult found = fleet_->WaitFor(answer(7)).look();
  ASSERT_EQ(found.token_files_size(), 2);
  EXPECT_EQ(found.token_files(0).tokens(), 2);
  EXPECT_EQ(found.token_files(0).largest_id(), 2);
  EXPECT_THAT(found.token_files(1).error(), HasSubstr("/absent.bin"));
  EXPECT_EQ(found.silent_field(), "");
  look.set_look_id(8);
  look.set_token_format(99);
  fleet_->Send(down);
  EXPECT_THAT(fleet_->WaitFor(answer(8)).look().refused(), HasSubstr("look.token_format"));
}

TEST_F(DaemonTest, PlanWithAnotherDigestIsNotUsed) {
  StartAll({.plan = "a forged plan"});
  EXPECT_THAT(Refusal(MakeLaunch("echo", 1, 1, "the plan")), HasSubstr("SHA-256"));
}

TEST_F(DaemonTest, ExitIsReportedWithTheTrainersOwnReason) {
  StartAll();
  Launch("fail", 1, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.exit_code(), 13);
  EXPECT_EQ(exited.reason(), "DataError");
  EXPECT_EQ(exited.message(), "train.bin is truncated");
  EXPECT_EQ(exited.epoch(), 1);
}

TEST_F(DaemonTest, CrashIsReportedWithSignalAndLastLines) {
  StartAll();
  Launch("crash", 1, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.exit_code(), -1);
  EXPECT_EQ(exited.signal(), SIGABRT);
  EXPECT_EQ(exited.reason(), "ProcessCrash");
  EXPECT_THAT(exited.tail(), HasSubstr("about to crash"));
}

TEST_F(DaemonTest, KilledTrainerIsReportedWithin100Ms) {
  constexpr int kTrainers = 5;
  StartAll();
  LaunchReady("echo", 1, kTrainers);
  const std::vector<pid_t> children = testing::ChildrenOf(getpid());
  ASSERT_EQ(children.size(), size_t{kTrainers});
  // The quickest of several deaths counts: a machine that is busy delays some of them.
  auto quickest = milliseconds::max();
  for (int i = 0; i < kTrainers; ++i) {
    const auto killed = steady_clock::now();
    ASSERT_EQ(kill(children[static_cast<size_t>(i)], SIGKILL), 0);
    const v1::Up up =
        fleet_->WaitFor([](const v1::Up& message) { return message.has_exited(); }, i);
    const auto took = std::chrono::duration_cast<milliseconds>(steady_clock::now() - killed);
    quickest = std::min(quickest, took);
    EXPECT_EQ(up.exited().signal(), SIGKILL);
    EXPECT_EQ(up.exited().reason(), "ProcessCrash");
  }
  // 100 ms of the daemon and what the test's own polling adds.
  EXPECT_LT(quickest.count(), 250);
}

TEST_F(DaemonTest, StopLetsATrainerLeaveAndKillsADeafOneAfterItsGrace) {
  StartAll();
  LaunchReady("echo", 1, 1);
  fleet_->Send(MakeStop(1, 5000));
  EXPECT_EQ(fleet_->WaitFor(Exited(0)).exited().exit_code(), 10);
  LaunchReady("deaf", 2, 1);
  const auto told = steady_clock::now();
  fleet_->Send(MakeStop(2, 300));
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0), 1).exited();
  EXPECT_EQ(exited.signal(), SIGKILL);
  EXPECT_EQ(exited.reason(), "Stopped");
  EXPECT_GE(steady_clock::now() - told, milliseconds(300));
}

TEST_F(DaemonTest, StaleEpochsAreRefused) {
  StartAll();
  LaunchReady("echo", 5, 1);
  EXPECT_THAT(Refusal(MakeLaunch("echo", 4, 1, "the plan")), HasSubstr("epoch 4 is over"));
  Launch("echo", 5, 1);
  EXPECT_EQ(fleet_->Count(Frame(v1::TrainerUp::kReady, 0)), 1) << "the order came twice";
  v1::Down run = MakeCommand(4, -1);
  run.mutable_trainer()->mutable_frame()->mutable_run()->set_until_step(1);
  EXPECT_THAT(Refusal(run), HasSubstr("epoch 4 is over"));
  EXPECT_THAT(Refusal(MakeStop(4, 0)), HasSubstr("epoch 4 is over"));
  EXPECT_EQ(fleet_->Count(Exited(0)), 0) << "nothing stale reached the trainer";
  // What was stopped does not start again.
  fleet_->Send(MakeStop(5, 1000));
  fleet_->WaitFor(Exited(0));
  EXPECT_THAT(Refusal(MakeLaunch("echo", 5, 1, "the plan")), HasSubstr("epoch 5 is over"));
}

TEST_F(DaemonTest, NewEpochEndsTrainersOfTheOldOne) {
  StartAll();
  LaunchReady("deaf", 1, 1);
  LaunchReady("echo", 2, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.epoch(), 1);
  EXPECT_EQ(exited.reason(), "Stopped");
}

TEST_F(DaemonTest, SameCommandGetsTheSameAnswer) {
  StartAll();
  LaunchReady("echo", 1, 1);
  v1::Down again = MakeLaunch("echo", 1, 1, "the plan");
  again.set_command_id(1);  // the first launch had this one
  fleet_->Send(again);
  EXPECT_TRUE(fleet_->WaitFor(Result(1), 1).result().ok());
  EXPECT_EQ(testing::ChildrenOf(getpid()).size(), 1u);
}

TEST_F(DaemonTest, BadFrameEndsTheTrainer) {
  StartAll();
  Launch("garbage", 1, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.reason(), "ProcessCrash");
  EXPECT_THAT(exited.message(), HasSubstr("bad frame"));
}

TEST_F(DaemonTest, SilentTrainerIsKilled) {
  StartAll();  // a beat of 50 ms means T = 250 ms, which is raised to 2 s
  LaunchReady("silent", 1, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.reason(), "Stall");
  EXPECT_THAT(exited.message(), HasSubstr("silent for"));
}

TEST_F(DaemonTest, OutputIsNumberedKeptAndRelayed) {
  StartAll();
  Launch("chatty", 1, 1);
  EXPECT_EQ(fleet_->WaitFor(Exited(0)).exited().exit_code(), 0);
  std::vector<std::string> lines;
  int64_t next = 1;
  for (const v1::Up& up : fleet_->received()) {
    if (up.has_log()) {
      EXPECT_EQ(up.log().first_seq(), next) << "no gap, no repeat";
      next += up.log().lines_size();
      lines.insert(lines.end(), up.log().lines().begin(), up.log().lines().end());
    }
  }
  EXPECT_EQ(lines.size(), 1002u);
  EXPECT_THAT(lines, ::testing::Contains("line 999"));
  EXPECT_THAT(lines, ::testing::Contains("broken \xEF\xBF\xBD character"));
  EXPECT_THAT(lines, ::testing::Contains("no end of line"));
  const std::string kept =
      testing::ReadText(absl::StrCat(scratch_.path(), "/logs/", kJob, "/attempt-1/rank-0.log"));
  EXPECT_EQ(std::count(kept.begin(), kept.end(), '\n'), 1002);
}

TEST_F(DaemonTest, ReconnectResendsWhatWasNotAcknowledged) {
  StartAll({.acknowledge = false});
  LaunchReady("echo", 1, 1);
  v1::Down save = MakeCommand(1, 0);
  save.mutable_trainer()->mutable_frame()->mutable_save()->set_sequence(12);
  fleet_->Send(save);
  fleet_->WaitFor(Frame(v1::TrainerUp::kSeal, 0));
  fleet_->Disconnect();
  const v1::Hello again = fleet_->WaitFor(IsHello, 1).hello();
  EXPECT_EQ(again.cluster_id(), "cluster-1");
  ASSERT_EQ(again.trainers_size(), 1);
  EXPECT_EQ(again.trainers(0).state(), "ready");
  ASSERT_EQ(again.trainers(0).unacknowledged_seals_size(), 1);
  EXPECT_EQ(again.trainers(0).unacknowledged_seals(0).step(), 12);
  EXPECT_EQ(again.trainers(0).has().save_sequence(), 12);
  EXPECT_EQ(again.trainers(0).has().until_step(), -1) << "it was never told to train";
  fleet_->WaitFor(Frame(v1::TrainerUp::kSeal, 0), 1);
  fleet_->WaitFor(Frame(v1::TrainerUp::kReady, 0), 1);

  // Acknowledged and committed: neither is repeated.
  fleet_->SetAcknowledge(true);
  v1::Down commit = MakeCommand(1, 0);
  commit.mutable_trainer()->mutable_frame()->mutable_commit()->set_step(12);
  fleet_->Send(commit);
  fleet_->WaitFor(Frame(v1::TrainerUp::kSaveStarted, 0));
  // A beat that was sent after all of that has its answer when a later command has one.
  fleet_->WaitFor(IsBeat, fleet_->Count(IsBeat));
  fleet_->WaitFor(Result(fleet_->Send(commit)));
  fleet_->Disconnect();
  EXPECT_EQ(fleet_->WaitFor(IsHello, 2).hello().trainers(0).unacknowledged_seals_size(), 0);
  // What is sent again goes before the next beat.
  fleet_->WaitFor(IsBeat, fleet_->Count(IsBeat));
  EXPECT_EQ(fleet_->Count(Frame(v1::TrainerUp::kSeal, 0)), 2);
}

// A plan that was on its way when the stream ended does not come. The next coordinator is not told
// that its trainers are being launched, and launches them again.
TEST_F(DaemonTest, ALaunchEndsWithTheStreamThatItsPlanWasToComeFrom) {
  StartAll({});
  fleet_->SetPlansCome(false);
  fleet_->Send(MakeLaunch("echo", 1, 1, "the plan"));
  fleet_->WaitFor([](const v1::Up& up) {
    return up.has_beat() && up.beat().trainers_size() == 1 &&
           up.beat().trainers(0).state() == "launching";
  });
  EXPECT_TRUE(
      testing::Eventually(std::chrono::seconds(30), [&] { return fleet_->plans_held() == 1; }));
  fleet_->Disconnect();
  EXPECT_EQ(fleet_->WaitFor(IsHello, 1).hello().trainers_size(), 0);
  EXPECT_TRUE(testing::Eventually(std::chrono::seconds(30), [&] {
    return fleet_->plans_held() == 0;
  })) << "cancelled";
  fleet_->SetPlansCome(true);
  LaunchReady("echo", 1, 1);
}

TEST_F(DaemonTest, TrainersLiveThroughACoordinatorRestartAndOldTermsAreNotObeyed) {
  StartAll({.term = 3});
  LaunchReady("echo", 1, 1);
  v1::Down run = MakeCommand(1, 0);
  run.mutable_trainer()->mutable_frame()->mutable_run()->set_until_step(1000);
  run.mutable_trainer()->mutable_frame()->mutable_run()->set_save_every_ms(1);
  EXPECT_TRUE(fleet_->WaitFor(Result(fleet_->Send(run))).result().ok());
  const int port = fleet_->port();
  fleet_.reset();
  ASSERT_EQ(testing::ChildrenOf(getpid()).size(), 1u);
  fleet_ = FakeFleet::Start(
      {.term = 2, .port = port});  // an older coordinator: never answered but by Hello
  fleet_->WaitFor(IsHello, 1);
  EXPECT_EQ(fleet_->Count([](const v1::Up& up) { return up.has_beat() || up.has_trainer(); }), 0);
  // Meanwhile the daemon has asked for a save, and its trainer has made one.
  fleet_->WaitFor([](const v1::Up& up) {
    return up.has_hello() && up.hello().trainers_size() == 1 &&
           up.hello().trainers(0).unacknowledged_seals_size() > 0;
  });
  fleet_.reset();
  fleet_ = FakeFleet::Start({.term = 4, .port = port});
  const v1::Hello hello = fleet_->WaitFor(IsHello).hello();
  ASSERT_EQ(hello.trainers_size(), 1);
  EXPECT_EQ(hello.term(), 3);
  EXPECT_EQ(hello.trainers(0).epoch(), 1);
  EXPECT_EQ(hello.trainers(0).has().until_step(), 1000);
  EXPECT_GE(hello.trainers(0).has().save_sequence(), 1) << "nobody else asks for timed saves";
  EXPECT_GE(hello.trainers(0).unacknowledged_seals_size(), 1);
  fleet_->WaitFor([](const v1::Up& up) { return up.has_beat(); });
  EXPECT_EQ(testing::ChildrenOf(getpid()).size(), 1u);
}

TEST_F(DaemonTest, WelcomeStopsTrainersOfAnEpochThatIsOver) {
  StartAll();
  LaunchReady("deaf", 1, 1);
  const int port = fleet_->port();
  fleet_.reset();
  v1::HeldTrainer over;
  over.set_job_uid(kJob);
  over.set_epoch(1);
  fleet_ = FakeFleet::Start({.term = 2, .port = port, .stop = {over}});
  EXPECT_EQ(fleet_->WaitFor(Exited(0)).exited().reason(), "Stopped");
}

TEST_F(DaemonTest, RejectedDaemonEndsWith93) {
  StartAll({.reject = "this node is revoked"});
  thread_.join();
  EXPECT_EQ(exit_code_, kExitDoNotRestart);
}

TEST_F(DaemonTest, ACoordinatorOfAnotherProtocolIsLeftAlone) {
  StartAll({.protocol = 9});
  thread_.join();
  EXPECT_EQ(exit_code_, kExitDoNotRestart);
  const v1::Hello hello = fleet_->WaitFor(IsHello).hello();
  EXPECT_EQ(hello.oldest_protocol(), 1);
  EXPECT_GE(hello.protocol(), hello.oldest_protocol());
}

TEST_F(DaemonTest, AParkedDaemonStaysAndAsksAgainUntilItIsStopped) {
  parks_ = true;
  StartAll({.reject = "another daemon is node node-1"});
  EXPECT_TRUE(
      testing::Eventually(std::chrono::seconds(30), [&] { return fleet_->Count(IsHello) >= 3; }));
  daemon_->Stop("SIGTERM");
  thread_.join();
  EXPECT_EQ(exit_code_, kExitClean);
}

TEST_F(DaemonTest, StopTellsTheCoordinatorAndLeavesNoTrainer) {
  StartAll();
  LaunchReady("echo", 1, 2);
  daemon_->Stop("SIGTERM");
  thread_.join();
  EXPECT_EQ(exit_code_, kExitClean);
  const auto drain = [](const v1::Up& up) { return up.has_drain(); };
  fleet_->WaitFor(drain);
  EXPECT_EQ(fleet_->Count(drain), 1);
  for (int rank : {0, 1}) {
    EXPECT_EQ(fleet_->WaitFor(Exited(rank)).exited().exit_code(), 10);
  }
  EXPECT_TRUE(testing::ChildrenOf(getpid()).empty());
}

TEST_F(DaemonTest, TrainersLiveOnAfterADrainNoticeUntilTheCoordinatorStopsThem) {
  drain_limit_ = std::chrono::hours(1);
  StartAll();
  LaunchReady("echo", 1, 1);
  daemon_->Stop("SIGTERM");
  fleet_->WaitFor([](const v1::Up& up) { return up.has_drain(); });
  v1::Down save = MakeCommand(1, -1);
  save.mutable_trainer()->mutable_frame()->mutable_save()->set_sequence(1);
  fleet_->Send(save);
  fleet_->WaitFor(Frame(v1::TrainerUp::kSeal, 0));  // it was not told to stop yet
  fleet_->Send(MakeStop(1, 1000));
  thread_.join();
  EXPECT_EQ(exit_code_, kExitClean);
  EXPECT_TRUE(testing::ChildrenOf(getpid()).empty());
}

TEST_F(DaemonTest, WithoutACoordinatorThereIsNothingToWaitFor) {
  drain_limit_ = std::chrono::hours(1);
  StartAll();
  LaunchReady("echo", 1, 1);
  fleet_.reset();
  daemon_->Stop("SIGTERM");
  thread_.join();
  EXPECT_TRUE(testing::ChildrenOf(getpid()).empty());
}

TEST_F(DaemonTest, ProgramThatCannotBeExecutedIsNamed) {
  fleet_ = FakeFleet::Start({});
  daemon_ = std::make_unique<Daemon>(DaemonOptions{.coordinator = fleet_->address(),
                                                   .node_id = "node-1",
                                                   .data_address = "127.0.0.1",
                                                   .work_dir = scratch_.path(),
                                                   .trainer_program = "/nonexistent/trainer",
                                                   .version = "test",
                                                   .facts = {}});
  thread_ = std::thread([this] { exit_code_ = daemon_->Run(); });
  fleet_->WaitFor([](const v1::Up& up) { return up.has_hello(); });
  Launch("echo", 1, 1);
  const v1::TrainerExited exited = fleet_->WaitFor(Exited(0)).exited();
  EXPECT_EQ(exited.exit_code(), 127);
  EXPECT_THAT(exited.tail(), HasSubstr("cannot execute /nonexistent/trainer"));
}

// The binary itself.

// Neither gone nor a zombie that nobody has reaped yet.
bool Runs(pid_t pid) {
  const std::string status = testing::ReadText(absl::StrCat("/proc/", pid, "/status"));
  return !status.empty() && status.find("State:\tZ") == std::string::npos;
}

TEST(WorkerBinaryTest, KilledDaemonTakesItsTrainersAlong) {
  testing::ScratchFolder scratch;
  auto fleet = FakeFleet::Start({});
  auto worker = testing::ChildProcess::Start({.arguments = {WORKER_BINARY,
                                                            "--dev-loopback",
                                                            "--coordinator",
                                                            fleet->address(),
                                                            "--node-id",
                                                            "node-1",
                                                            "--work-dir",
                                                            scratch.path(),
                                                            "--trainer",
                                                            FAKE_TRAINER},
                                              .environment = {},
                                              .output_path = scratch.path() + "/out",
                                              .error_path = scratch.path() + "/out",
                                              .working_directory = ""});
  ASSERT_TRUE(worker.ok()) << worker.status();
  fleet->WaitFor(IsHello);
  fleet->Send(MakeLaunch("echo", 1, 2, "the plan"));
  fleet->WaitFor(Frame(v1::TrainerUp::kReady, 0));
  fleet->WaitFor(Frame(v1::TrainerUp::kReady, 1));
  const std::vector<pid_t> trainers = testing::ChildrenOf((*worker)->pid());
  ASSERT_EQ(trainers.size(), 2u);
  (*worker)->Kill();
  EXPECT_TRUE(
      testing::Eventually(seconds(30), [&] { return !Runs(trainers[0]) && !Runs(trainers[1]); }));
}

struct BadCommand {
  std::vector<std::string> arguments;
  int exit_code;
  std::string says;
};

TEST(WorkerBinaryTest, BadConfigurationIsNamedAndNotRetried) {
  testing::ScratchFolder scratch;
  const std::string folder = scratch.path() + "/work";
  const std::vector<BadCommand> commands = {
      {{"--node-id", "a", "--work-dir", folder, "--cpu-devices", "many"}, 2, "--cpu-devices"},
      {{"--dev-loopback", "--work-dir", folder}, 2, "--node-id"},
      {{"--node-id", "a"}, 2, "--work-dir"},
      {{"join", "--work-dir", folder, "ravel1.x"}, 2, "--coordinator"},
      {{"join", "--work-dir", folder, "--coordinator", "127.0.0.1:1", "ravel1.x"}, 2, "the token"},
      {{"--work-dir", folder, "--trainer", FAKE_TRAINER}, 93, "ravel-worker join"},
      {{"--node-id", "a", "--work-dir", folder, "--trainer", FAKE_TRAINER}, 93, "--dev-loopback"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", folder, "--coordinator", "10.0.0.1:7070"},
       93,
       "--coordinator 10.0.0.1:7070"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", folder, "--coordinator", "here"},
       93,
       "HOST:PORT"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", folder, "--data-address", "10.0.0.1"},
       93,
       "--advertise 10.0.0.1"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", folder, "--trainer", "/nowhere"},
       93,
       "/nowhere"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", folder, "--trainer", "/usr"},
       93,
       "expected a program"},
      {{"--dev-loopback", "--node-id", "a", "--work-dir", "/proc/no", "--trainer", FAKE_TRAINER},
       93,
       "/proc/no"}};
  for (const BadCommand& command : commands) {
    testing::ProcessOptions options;
    options.arguments = command.arguments;
    options.arguments.insert(options.arguments.begin(), WORKER_BINARY);
    const testing::RunResult result = testing::RunProgram(options, scratch.path(), seconds(30));
    EXPECT_EQ(result.exit_code, command.exit_code) << result.err;
    EXPECT_THAT(result.out + result.err, HasSubstr(command.says));
  }
}

}  // namespace
}  // namespace ravel::daemon
