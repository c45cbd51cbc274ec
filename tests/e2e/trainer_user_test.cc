// Trainers as another user (--trainer-user), with the real programs. Needs root.

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/secure_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr char kUser[] = "nobody";
constexpr int kDoNotRestart = 93;  // of ravel-worker

// The folder and all that is made in it may be changed by that user, as `setfacl -m u:USER:rwx -m
// d:u:USER:rwx` has it.
bool ShareByAcl(const std::string& folder, uint32_t user) {
  struct Entry {
    uint16_t tag;
    uint16_t rights;
    uint32_t id;
  };
  struct {
    uint32_t version = 2;
    Entry entries[5];
  } list = {2,
            {{0x01, 7, UINT32_MAX},
             {0x02, 7, user},
             {0x04, 7, UINT32_MAX},
             {0x10, 7, UINT32_MAX},
             {0x20, 0, UINT32_MAX}}};
  return setxattr(folder.c_str(), "system.posix_acl_access", &list, sizeof list, 0) == 0 &&
         setxattr(folder.c_str(), "system.posix_acl_default", &list, sizeof list, 0) == 0;
}

class UserTest : public ::testing::Test {
 protected:
  // False: this test is skipped.
  bool FindUser() {
    const passwd* const user = getpwnam(kUser);  // NOLINT(concurrency-mt-unsafe): one thread
    if (geteuid() != 0 || user == nullptr) {
      SkipWithout("namespaces", "needs root and a user nobody");
      return false;
    }
    uid_ = user->pw_uid;
    gid_ = user->pw_gid;
    return true;
  }
  // errno of opening that file as the trainers' user; 0: it was opened.
  int OpenAs(const std::string& path) const {
    const pid_t child = fork();
    if (child == 0) {
      const bool changed = setgroups(0, nullptr) == 0 && setgid(gid_) == 0 && setuid(uid_) == 0;
      _exit(!changed ? 255 : open(path.c_str(), O_RDONLY) < 0 ? errno : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  }

  uint32_t uid_ = 0;
  uint32_t gid_ = 0;
};

class TrainerUserTest : public UserTest {
 protected:
  void SetUp() override {
    if (!FindUser()) {
      return;
    }
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    ASSERT_EQ(chmod(cluster_->folder().c_str(), 0711), 0);
    for (const char* folder : {"data", "stores", "w0/identity", "secrets/default/team"}) {
      fs::create_directories(At(folder));
    }
    ASSERT_EQ(chmod(At("data").c_str(), 0755), 0);
    ASSERT_EQ(chmod(At("w0/identity").c_str(), 0700), 0);
    ASSERT_EQ(chmod(At("secrets").c_str(), 0700), 0);
    WriteText(At("w0/identity/key.pem"), "the node's key");
    WriteText(At("secrets/default/team/key"), "a secret");
    ASSERT_EQ(chmod(At("secrets/default/team/key").c_str(), 0600), 0);
    WriteTokens(At("data/tokens.bin"), 5000, TinyJob().vocabulary);
    ASSERT_EQ(chmod(At("data/tokens.bin").c_str(), 0644), 0);
    if (!ShareByAcl(At("stores"), uid_)) {
      SkipWithout("namespaces", "needs a file system with access control lists");
    }
  }
  std::string At(const std::string& rest) const { return cluster_->folder() + "/" + rest; }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = At("data/tokens.bin"),
            .store = At("stores"),
            .workers = 2,
            .steps = 8,
            .save_every_steps = 4};
  }
  std::vector<std::string> Flags() const {
    return {"--trainer-user",
            kUser,
            "--read-root",
            At("data"),
            "--write-root",
            At("stores"),
            "--secrets-root",
            At("secrets")};
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(TrainerUserTest, AJobTrainsAndSavesAsThatUserAndCannotReadTheNodesKey) {
  cluster_->SetWorkerFlags(Flags());
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("one")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("one", 2, seconds(60)), absl::OkStatus())
      << cluster_->Report("one");
  const std::vector<pid_t> trainers = cluster_->AllTrainers();
  ASSERT_EQ(trainers.size(), 2u);
  for (const pid_t trainer : trainers) {
    const std::string status = ReadText(absl::StrCat("/proc/", trainer, "/status"));
    const std::string uid = absl::StrCat(uid_, "\t", uid_, "\t", uid_, "\t", uid_, "\n");
    const std::string gid = absl::StrCat(gid_, "\t", gid_, "\t", gid_, "\t", gid_, "\n");
    EXPECT_THAT(status, HasSubstr("Uid:\t" + uid));
    EXPECT_THAT(status, HasSubstr("Gid:\t" + gid));
    EXPECT_THAT(status, HasSubstr("\nGroups:\t \n"));
    EXPECT_THAT(status, HasSubstr("\nNoNewPrivs:\t1\n"));
    for (const char* set : {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}) {
      EXPECT_THAT(status, HasSubstr(absl::StrCat("\n", set, ":\t0000000000000000\n")));
    }
    const std::string environment = ReadText(absl::StrCat("/proc/", trainer, "/environ"));
    EXPECT_THAT(environment, HasSubstr("USER=nobody"));
  }
  EXPECT_EQ(OpenAs(At("w0/identity/key.pem")), EACCES);
  EXPECT_EQ(OpenAs(At("secrets/default/team/key")), EACCES);
  EXPECT_EQ(OpenAs(At("w0/logs")), EACCES);
  EXPECT_EQ(OpenAs(At("data/tokens.bin")), 0) << "the means of this test";
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("one", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::map<int64_t, std::string>> steps = cluster_->Checkpoints("one");
  ASSERT_TRUE(steps.ok() && steps->contains(8)) << steps.status();
  int of_trainers = 0;
  for (const fs::directory_entry& entry : EntriesUnder(steps->at(8))) {
    struct stat facts = {};
    ASSERT_EQ(stat(entry.path().c_str(), &facts), 0);
    of_trainers += facts.st_uid == uid_ ? 1 : 0;
  }
  EXPECT_GT(of_trainers, 0);
  // A daemon that is killed takes its trainers along, whoever they are.
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("two")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("two", 2, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> left = cluster_->Trainers("w0");
  cluster_->KillWorker("w0");
  for (const pid_t trainer : left) {
    EXPECT_TRUE(Eventually(seconds(10), [&] {
      return !fs::exists(absl::StrCat("/proc/", trainer)) ||
             absl::StrContains(ReadText(absl::StrCat("/proc/", trainer, "/status")), "State:\tZ");
    })) << trainer;
  }
}

TEST_F(TrainerUserTest, AStoreThatTheUserCannotWriteToIsToldBeforeAnyTrainerStarts) {
  cluster_->SetWorkerFlags(Flags());
  ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
  fs::create_directories(At("stores/closed"));
  ASSERT_EQ(removexattr(At("stores/closed").c_str(), "system.posix_acl_access"), 0);
  ASSERT_EQ(removexattr(At("stores/closed").c_str(), "system.posix_acl_default"), 0);
  ASSERT_EQ(chmod(At("stores/closed").c_str(), 0700), 0);
  TinyJob job = Job("closed");
  job.store = At("stores/closed");
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  EXPECT_TRUE(Eventually(seconds(40), [&] {
    const std::string events = cluster_->Ctl({"events", "closed"}).out;
    return absl::StrContains(events, "checkpoint.store: ") &&
           absl::StrContains(events, "Permission denied");
  })) << cluster_->Report("closed");
  EXPECT_THAT(cluster_->AllTrainers(), ::testing::IsEmpty());
}

TEST_F(TrainerUserTest, AUserThatIsNoneOrRootOrOutOfReachIsRefusedAtStart) {
  const auto start = [&](const std::vector<std::string>& prefix,
                         const std::string& user,
                         const std::vector<std::string>& more) {
    std::vector<std::string> words = prefix;
    for (const std::string& word : {BinaryPath("ravel-worker"),
                                    std::string("--dev-loopback"),
                                    std::string("--node-id"),
                                    std::string("x"),
                                    std::string("--work-dir"),
                                    At("x"),
                                    std::string("--trainer-user"),
                                    user}) {
      words.push_back(word);
    }
    words.insert(words.end(), more.begin(), more.end());
    const RunResult refused = RunProgram({.arguments = words}, cluster_->folder(), seconds(20));
    EXPECT_EQ(refused.exit_code, kDoNotRestart) << refused.err;
    return refused.err;
  };
  EXPECT_THAT(start({}, "root", {}),
              HasSubstr("--trainer-user: root: expected a user and a group "
                        "other than root"));
  EXPECT_THAT(start({}, "nobody:root", {}), HasSubstr("other than root"));
  EXPECT_THAT(start({}, "no-such-user", {}), HasSubstr("no user no-such-user here"));
  EXPECT_THAT(start({}, "nobody:no-such-group", {}), HasSubstr("no group no-such-group here"));
  ASSERT_EQ(chmod(At("secrets").c_str(), 0755), 0);
  EXPECT_THAT(start({}, kUser, {"--secrets-root", At("secrets"), "--read-root", At("data")}),
              HasSubstr("expected a folder of secrets that this user cannot enter"));
  fs::create_directories(At("x/identity"));
  ASSERT_EQ(chmod(At("x/identity").c_str(), 0755), 0);
  EXPECT_THAT(start({}, kUser, {}), HasSubstr("the node's key is there"));
  fs::remove_all(At("x"));
  ASSERT_TRUE(fs::create_directories(At("x")) && chown(At("x").c_str(), 1, 1) == 0);
  EXPECT_THAT(
      start({"/usr/bin/setpriv", "--reuid", "1", "--regid", "1", "--clear-groups"}, kUser, {}),
      HasSubstr("which this one lacks: CAP_SETUID, CAP_SETGID, CAP_KILL, CAP_CHOWN, CAP_FSETID"));
}

// The trainers of a node, whose key they cannot read, save to a ravel-store with certificates.
class TrainerCertificateTest : public UserTest {
 protected:
  void SetUp() override {
    if (!FindUser()) {
      return;
    }
    // Certificates of trainers then last 8 s.
    absl::StatusOr<std::unique_ptr<SecureCluster>> started =
        SecureCluster::Start({.certificate_time = "32s"});
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    ASSERT_EQ(chmod(cluster_->folder().c_str(), 0711), 0);
    fs::create_directories(cluster_->folder() + "/data");
    ASSERT_EQ(chmod((cluster_->folder() + "/data").c_str(), 0755), 0);
    WriteTokens(Tokens(), 5000, TinyJob().vocabulary);
    ASSERT_EQ(chmod(Tokens().c_str(), 0644), 0);
    store_ = std::make_unique<StoreProcess>(StorePlace{
        .folder = cluster_->folder() + "/server",
        .flags = {"--identity", cluster_->CertifyStore(), "--coordinator", cluster_->address()}});
    ASSERT_EQ(store_->Start(), absl::OkStatus());
    ASSERT_EQ(cluster_->Join("n1", cluster_->Token({"node"})).exit_code, 0);
    ASSERT_EQ(StartWorker(), absl::OkStatus());
    ASSERT_TRUE(cluster_->WaitForReady(1)) << cluster_->Report();
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) {
      ADD_FAILURE() << cluster_->Report() << cluster_->Ctl({"events", "one"}).out
                    << cluster_->Ctl({"logs", "one"}).out << store_->Log();
    }
  }
  std::string Tokens() const { return cluster_->folder() + "/data/tokens.bin"; }
  absl::Status StartWorker() {
    return cluster_->StartWorker("n1", {}, {"--trainer-user", kUser, "--cpu-devices", "2"});
  }
  int64_t Committed() const {
    const absl::StatusOr<json::Value> view =
        json::Parse(cluster_->Ctl({"get", "one", "-o", "json"}).out);
    const json::Value* const newest = view.ok() ? view->Find("committedStep") : nullptr;
    int64_t step = 0;
    if (newest != nullptr && newest->is_string()) {
      EXPECT_TRUE(absl::SimpleAtoi(newest->AsString(), &step));
    } else if (newest != nullptr) {
      step = newest->AsInt();
    }
    return step;
  }
  bool CommitsMore() const {
    const int64_t before = Committed();
    return Eventually(seconds(60), [&] { return Committed() > before; });
  }
  std::vector<pid_t> Trainers() const { return ChildrenOf(cluster_->Worker("n1").pid()); }
  // Files of the node with a private key in them.
  std::vector<std::string> Keys() const {
    std::vector<std::string> found;
    for (const fs::directory_entry& entry : EntriesUnder(cluster_->WorkDir("n1"))) {
      if (entry.is_regular_file() && absl::StrContains(ReadText(entry.path()), "PRIVATE KEY")) {
        found.push_back(entry.path().lexically_relative(cluster_->WorkDir("n1")));
      }
    }
    return found;
  }
  int Renewals() const {
    const std::string log = cluster_->Log("n1");
    const std::string text = "the trainers' certificate was renewed";
    int found = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) {
      ++found;
    }
    return found;
  }

  std::unique_ptr<SecureCluster> cluster_;
  std::unique_ptr<StoreProcess> store_;
};

TEST_F(TrainerCertificateTest, AJobSavesToAStoreByACertificateOfItsOwnAndGoesOnAfterKills) {
  const TinyJob job = {.name = "one",
                       .tokens_path = Tokens(),
                       .store = store_->Url("team"),
                       .workers = 2,
                       .steps = 10'000'000,
                       .keep_last = 3};
  WriteText(cluster_->folder() + "/job.yaml", ToYaml(job));
  const RunResult submitted = cluster_->Ctl({"submit", "-f", cluster_->folder() + "/job.yaml"});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  ASSERT_TRUE(CommitsMore());
  const std::vector<pid_t> trainers = Trainers();
  ASSERT_EQ(trainers.size(), 2u);
  for (const pid_t trainer : trainers) {
    EXPECT_THAT(ReadText(absl::StrCat("/proc/", trainer, "/status")),
                HasSubstr(absl::StrCat("Uid:\t", uid_, "\t")));
    EXPECT_THAT(ReadText(absl::StrCat("/proc/", trainer, "/environ")),
                ::testing::Not(HasSubstr("PRIVATE KEY")));
  }
  const std::string key = "identity/key.pem";
  EXPECT_EQ(OpenAs(cluster_->WorkDir("n1") + "/" + key), EACCES);
  EXPECT_THAT(Keys(), ::testing::ElementsAre(key)) << "those of trainers are in no file";
  // The first certificate has ended when the second renewal is there.
  ASSERT_TRUE(Eventually(seconds(60), [&] { return Renewals() >= 2; }));
  EXPECT_TRUE(CommitsMore());
  EXPECT_EQ(Trainers(), trainers) << "nothing was started again for it";

  kill(trainers[0], SIGKILL);
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    const std::vector<pid_t> now = Trainers();
    return now.size() == 2 && now[0] != trainers[0] && now[0] != trainers[1];
  }));
  EXPECT_TRUE(CommitsMore()) << "from what it has restored";
  cluster_->Worker("n1").Kill();
  EXPECT_THAT(Keys(), ::testing::ElementsAre(key));
  ASSERT_EQ(StartWorker(), absl::OkStatus());
  // A save of the trainers that are gone may still be committed.
  ASSERT_TRUE(Eventually(seconds(60), [&] { return Trainers().size() == 2; }));
  EXPECT_TRUE(CommitsMore());
  EXPECT_THAT(Keys(), ::testing::ElementsAre(key));
  ASSERT_EQ(cluster_->Ctl({"cancel", "one", "--wait"}).exit_code, 0);
  EXPECT_GE(cluster_->Audited("node/n1", "Access.CertifyTrainer", "OK"), 5)
      << "three launches, two renewals";
}

}  // namespace
}  // namespace ravel::testing
