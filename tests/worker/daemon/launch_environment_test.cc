// The environment and the user of trainers that a daemon starts: real children, a Fleet server in
// this process.

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/crypto.h"
#include "common/job_environment.h"
#include "proto/plan.pb.h"
#include "tests/testing/eventually.h"
#include "tests/testing/hung_mount.h"
#include "tests/testing/process.h"
#include "tests/testing/required.h"
#include "tests/worker/daemon/fake_fleet_service.h"
#include "worker/daemon/daemon.h"

namespace ravel::daemon {
namespace {

using std::chrono::seconds;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class LaunchEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(chmod(secrets_.path().c_str(), 0700), 0);
    std::filesystem::create_directories(secrets_.path() + "/team/s3");
    testing::WriteText(SecretFile(), text_ + "\n");
    ASSERT_EQ(chmod(SecretFile().c_str(), 0600), 0);
  }
  void TearDown() override {
    if (thread_.joinable()) {
      for (const pid_t trainer : Trainers()) {
        kill(trainer, SIGKILL);  // or the daemon waits for them
      }
      daemon_->Stop("test is over");
      thread_.join();
    }
  }
  std::string SecretFile() const { return secrets_.path() + "/team/s3/key"; }
  // A launch whose secrets do not answer for so long fails: far more than a busy disk takes.
  void StartAll(std::optional<TrainerUser> user = {},
                std::chrono::milliseconds preflight_limit = seconds(20)) {
    fleet_ = FakeFleet::Start({});
    DaemonOptions options{.coordinator = fleet_->address(),
                          .node_id = "node-1",
                          .data_address = "127.0.0.1",
                          .work_dir = scratch_.path(),
                          .trainer_program = FAKE_TRAINER,
                          .version = "test",
                          .facts = {.devices = {{"cpu", "a cpu", 1 << 30, "cpu-0"}},
                                    .device_message = {},
                                    .cpu_isa = "avx2",
                                    .host_id = "host"}};
    options.launch_rules = {.allowed = {"NCCL_*", "MY_*", "RAVEL_S3_SECRET_ACCESS_KEY"},
                            .secrets_root = secrets_.path(),
                            .networks = {{"local", {"lo", "127.0.0.1"}}}};
    options.preflight_limit = preflight_limit;
    options.trainer_user = std::move(user);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    thread_ = std::thread([this] { daemon_->Run(); });
    fleet_->WaitFor([](const v1::Up& up) { return up.has_hello(); });
  }
  // The answer to a launch of one trainer of that job.
  v1::CommandResult Launch(const v1::PlannedJob& job, int64_t epoch) {
    return ResultOf(SendLaunch(job, epoch));
  }
  int64_t SendLaunch(const v1::PlannedJob& job, int64_t epoch) {
    v1::Down down;
    v1::Launch& launch = *down.mutable_launch();
    launch.set_job_uid("job-uid");
    launch.set_epoch(epoch);
    launch.set_attempt(1);
    const Sha256Digest digest = Sha256("the plan");
    launch.set_plan_digest(std::string(digest.begin(), digest.end()));
    launch.add_trainers()->set_job_name("echo");
    launch.mutable_trainers(0)->set_job(job.SerializeAsString());
    return fleet_->Send(down);
  }
  v1::CommandResult ResultOf(int64_t id) const {
    return fleet_
        ->WaitFor(
            [id](const v1::Up& up) { return up.has_result() && up.result().command_id() == id; })
        .result();
  }
  static v1::PlannedJob Job() {
    v1::PlannedJob job;
    job.set_namespace_("team");
    v1::PlannedVariable& plain = *job.add_environment();
    plain.set_name("NCCL_DEBUG");
    plain.set_value("INFO");
    v1::PlannedVariable& secret = *job.add_environment();
    secret.set_name("MY_KEY");
    secret.set_secret("s3/key");
    return job;
  }
  // Of this process's children: the daemon runs in it.
  static std::vector<pid_t> Trainers() {
    std::vector<pid_t> found;
    for (const pid_t child : testing::ChildrenOf(getpid())) {
      if (absl::StrContains(testing::ReadText(absl::StrCat("/proc/", child, "/cmdline")),
                            FAKE_TRAINER)) {
        found.push_back(child);
      }
    }
    return found;
  }
  static std::vector<std::string> EnvironmentOf(pid_t pid) {
    return absl::StrSplit(testing::ReadText(absl::StrCat("/proc/", pid, "/environ")), '\0');
  }

  const std::string text_ = absl::StrCat("text-", RandomHex(16));
  testing::ScratchFolder scratch_;
  testing::ScratchFolder secrets_;
  std::unique_ptr<FakeFleet> fleet_;
  std::unique_ptr<Daemon> daemon_;
  std::thread thread_;
};

TEST_F(LaunchEnvironmentTest, ASecretReachesTheChildsEnvironmentAndNothingElse) {
  StartAll();
  v1::PlannedJob job = Job();
  job.set_network("local");
  const v1::CommandResult result = Launch(job, 1);
  ASSERT_TRUE(result.ok()) << result.message();
  ASSERT_TRUE(testing::Eventually(seconds(20), [] { return Trainers().size() == 1; }));
  const std::vector<std::string> variables = EnvironmentOf(Trainers()[0]);
  EXPECT_THAT(variables, Contains("NCCL_DEBUG=INFO"));
  EXPECT_THAT(variables, Not(Contains("NCCL_DEBUG=WARN")));
  EXPECT_THAT(variables, Contains("MY_KEY=" + text_));
  EXPECT_THAT(variables, Contains("NCCL_SOCKET_IFNAME==lo"));
  for (const v1::Up& up : fleet_->received()) {
    EXPECT_THAT(up.SerializeAsString(), Not(HasSubstr(text_)));
  }
  for (const auto& entry : testing::EntriesUnder(scratch_.path())) {
    EXPECT_THAT(testing::ReadText(entry.path()), Not(HasSubstr(text_))) << entry.path();
  }
}

// A token of the node's beside a job's own keys would make both useless.
TEST_F(LaunchEnvironmentTest, AJobsStoreKeysComeWithoutTheNodes) {
  setenv("RAVEL_S3_ACCESS_KEY_ID", "of-the-node", 1);
  setenv("RAVEL_S3_SESSION_TOKEN", "of-the-node", 1);
  StartAll();
  v1::PlannedJob job = Job();
  job.mutable_environment(1)->set_name("RAVEL_S3_SECRET_ACCESS_KEY");
  EXPECT_TRUE(Launch(job, 1).ok());
  unsetenv("RAVEL_S3_ACCESS_KEY_ID");
  unsetenv("RAVEL_S3_SESSION_TOKEN");
  ASSERT_TRUE(testing::Eventually(seconds(20), [] { return Trainers().size() == 1; }));
  const std::vector<std::string> variables = EnvironmentOf(Trainers()[0]);
  EXPECT_THAT(variables, Contains("RAVEL_S3_SECRET_ACCESS_KEY=" + text_));
  EXPECT_THAT(variables, Contains("RAVEL_S3_KEYS_OF_JOB=1"));
  EXPECT_THAT(variables, Not(Contains(HasSubstr("of-the-node"))));
}

TEST_F(LaunchEnvironmentTest, TheNodesStoreKeysReachJobsWithoutKeys) {
  setenv("RAVEL_S3_SESSION_TOKEN", "of-the-node", 1);
  setenv("RAVEL_S3_KEYS_OF_JOB", "1", 1);
  StartAll();
  EXPECT_TRUE(Launch(Job(), 1).ok());
  unsetenv("RAVEL_S3_SESSION_TOKEN");
  unsetenv("RAVEL_S3_KEYS_OF_JOB");
  ASSERT_TRUE(testing::Eventually(seconds(20), [] { return Trainers().size() == 1; }));
  const std::vector<std::string> variables = EnvironmentOf(Trainers()[0]);
  EXPECT_THAT(variables, Contains("RAVEL_S3_SESSION_TOKEN=of-the-node"));
  EXPECT_THAT(variables, Not(Contains("RAVEL_S3_KEYS_OF_JOB=1")));
}

TEST_F(LaunchEnvironmentTest, ARefusedLaunchStartsNothingAndSaysWhy) {
  StartAll();
  v1::PlannedJob job = Job();
  job.set_network("fast");
  v1::CommandResult result = Launch(job, 1);
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.reason(), "EnvironmentRefused");
  EXPECT_THAT(result.message(), HasSubstr("communication.network: this node has no network"));
  job = Job();
  job.mutable_environment(1)->set_name("THEIR_KEY");
  EXPECT_THAT(Launch(job, 2).message(), HasSubstr("environment[1].name: THEIR_KEY"));
  ASSERT_EQ(unlink(SecretFile().c_str()), 0);
  result = Launch(Job(), 3);
  EXPECT_EQ(result.reason(), "EnvironmentRefused");
  EXPECT_THAT(result.message(), HasSubstr("environment[1].secret: secret s3/key"));
  EXPECT_THAT(Trainers(), IsEmpty());
  // The file is read at each launch.
  testing::WriteText(SecretFile(), "anew");
  ASSERT_EQ(chmod(SecretFile().c_str(), 0600), 0);
  ASSERT_TRUE(Launch(Job(), 4).ok());
  ASSERT_TRUE(testing::Eventually(seconds(20), [] { return Trainers().size() == 1; }));
  EXPECT_THAT(EnvironmentOf(Trainers()[0]), Contains("MY_KEY=anew"));
}

// The beats that say it come while the secret is waited for.
TEST_F(LaunchEnvironmentTest, SecretsOnAMountThatHangsFailTheLaunchAndHoldUpNothing) {
  StartAll({}, seconds(1));
  std::optional<testing::HungMount> hung(secrets_.path() + "/team");
  if (!hung->mounted()) {
    testing::SkipWithout("fuse", "a mount that hangs needs FUSE and the right to mount");
    return;
  }
  const int64_t id = SendLaunch(Job(), 1);
  const auto launching = [](const v1::Up& up) {
    return up.has_beat() && up.beat().trainers(0).state() == "launching";
  };
  fleet_->WaitFor(launching, 5);
  const v1::CommandResult result = ResultOf(id);
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.reason(), "PreflightFailed");
  EXPECT_THAT(result.message(), HasSubstr("the job's secrets did not answer within 1000 ms"));
  EXPECT_THAT(Trainers(), IsEmpty());
  for (int64_t epoch = 2; epoch < 2 + LaunchSettingsReader::kMostHanging; ++epoch) {
    SendLaunch(Job(), epoch);
  }
  EXPECT_THAT(Launch(Job(), 20).message(), HasSubstr("earlier reads of secrets still hang"));
  v1::PlannedJob plain = Job();
  plain.mutable_environment()->RemoveLast();
  EXPECT_TRUE(Launch(plain, 21).ok()) << "it needs no secret";
  hung.reset();
}

TEST_F(LaunchEnvironmentTest, ATrainerOfAnotherUserHasNothingOfTheDaemons) {
  const absl::StatusOr<TrainerUser> user = FindTrainerUser("nobody");
  if (!user.ok() || !CheckMayBecome(*user).ok()) {
    testing::SkipWithout("namespaces", "needs root and a user nobody");
    return;
  }
  if (!AsTrainerUser(*user, [] {
         return faccessat(AT_FDCWD, FAKE_TRAINER, X_OK, AT_EACCESS) == 0
                    ? absl::OkStatus()
                    : absl::PermissionDeniedError(FAKE_TRAINER);
       }).ok()) {
    testing::SkipWithout("namespaces", "nobody cannot reach the build's folder");
    return;
  }
  EXPECT_FALSE(AsTrainerUser(*user, [this] {
                 return faccessat(AT_FDCWD, SecretFile().c_str(), R_OK, AT_EACCESS) == 0
                            ? absl::OkStatus()
                            : absl::PermissionDeniedError("as it should be");
               }).ok());
  EXPECT_EQ(access(SecretFile().c_str(), R_OK), 0) << "this thread has kept its rights";
  StartAll(*user);
  const v1::CommandResult result = Launch(Job(), 1);
  ASSERT_TRUE(result.ok()) << result.message();
  ASSERT_TRUE(testing::Eventually(seconds(20), [] { return Trainers().size() == 1; }));
  const std::string status = testing::ReadText(absl::StrCat("/proc/", Trainers()[0], "/status"));
  const std::string uid = absl::StrCat(user->uid);
  EXPECT_THAT(status, HasSubstr(absl::StrCat("Uid:\t", uid, "\t", uid, "\t", uid, "\t", uid)));
  EXPECT_THAT(status, ::testing::ContainsRegex("\nGroups:[ \t]*\n"));
  EXPECT_THAT(status, HasSubstr("\nNoNewPrivs:\t1\n"));
  for (const char* set : {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}) {
    EXPECT_THAT(status, HasSubstr(absl::StrCat("\n", set, ":\t0000000000000000\n")));
  }
  EXPECT_THAT(EnvironmentOf(Trainers()[0]), Contains("USER=nobody"));
  EXPECT_THAT(EnvironmentOf(Trainers()[0]), Contains("MY_KEY=" + text_));
}

TEST(TrainerUserTest, RootAndUsersThatAreNotHereAreRefused) {
  for (const char* bad : {"root", "no-such-user", "nobody:no-such-group", "nobody:root", ""}) {
    EXPECT_FALSE(FindTrainerUser(bad).ok()) << bad;
  }
  if (geteuid() == 65534) {
    EXPECT_FALSE(FindTrainerUser("nobody").ok()) << "the user of this process";
  }
}

}  // namespace
}  // namespace ravel::daemon
