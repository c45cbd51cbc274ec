#include "worker/daemon/launch_settings_proto.h"

#include <filesystem>
#include <optional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/job_environment.h"
#include "proto/plan.pb.h"
#include "tests/testing/process.h"
#include "worker/daemon/job_secrets.h"

namespace ravel::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr char kText[] = "8f3-a-secret-text";

class LaunchSettingsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(chmod(root().c_str(), 0700), 0);
    rules_.allowed = *ParseNamePatterns(kDefaultJobEnvironment);
    rules_.allowed.emplace_back("MY_*");
    rules_.secrets_root = root();
    Put("team/s3/key", std::string(kText) + "\n");
    Put("other/s3/key", "of another namespace");
  }
  const std::string& root() const { return scratch_.path(); }
  void Put(const std::string& name, const std::string& text, mode_t mode = 0600) const {
    const std::string path = root() + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    testing::WriteText(path, text);
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
  }
  absl::StatusOr<LaunchSettings> Settings(const v1::PlannedJob& job) const {
    v1::Launch launch;
    launch.add_trainers()->set_job(job.SerializeAsString());
    return SettingsOf(launch, rules_);
  }
  static v1::PlannedJob JobWith(const std::string& name,
                                const std::string& value,
                                const std::string& secret) {
    v1::PlannedJob job;
    job.set_namespace_("team");
    v1::PlannedVariable& variable = *job.add_environment();
    variable.set_name(name);
    variable.set_value(value);
    variable.set_secret(secret);
    return job;
  }
  // The refusal of a job with that secret; no message holds a text.
  std::string Refusal(const std::string& secret) const {
    const absl::StatusOr<LaunchSettings> settings = Settings(JobWith("MY_KEY", "", secret));
    const std::string message(settings.status().message());
    EXPECT_FALSE(settings.ok()) << secret;
    EXPECT_THAT(message, HasSubstr("environment[0].secret: "));
    EXPECT_THAT(message, Not(HasSubstr(kText)));
    EXPECT_THAT(message, Not(HasSubstr("of another namespace")));
    return message;
  }

  testing::ScratchFolder scratch_;
  LaunchRules rules_;
};

TEST_F(LaunchSettingsTest, ValuesAndSecretsBecomeVariables) {
  v1::PlannedJob job = JobWith("NCCL_DEBUG", "INFO", "");
  *job.add_environment() = JobWith("MY_KEY", "", "s3/key").environment(0);
  const absl::StatusOr<LaunchSettings> settings = Settings(job);
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(settings->variables, ElementsAre("NCCL_DEBUG=INFO", std::string("MY_KEY=") + kText));
  EXPECT_EQ(settings->host_address, "");
}

TEST_F(LaunchSettingsTest, SecretsBeyondTheNamespaceAreRefused) {
  EXPECT_THAT(Refusal("../other"), HasSubstr("SECRET/KEY"));
  EXPECT_THAT(Refusal("../other/s3/key"), HasSubstr("SECRET/KEY"));
  fs::create_symlink("../../other/s3/key", root() + "/team/s3/link");
  EXPECT_THAT(Refusal("s3/link"), HasSubstr("leads out of"));
  fs::create_symlink(root() + "/other/s3", root() + "/team/absolute");
  EXPECT_THAT(Refusal("absolute/key"), HasSubstr("leads out of"));
  EXPECT_THAT(Refusal("s3/none"), HasSubstr("secret s3/none of namespace team on this node"));
  v1::PlannedJob job = JobWith("MY_KEY", "", "s3/key");
  for (const char* space : {"", "..", "../other", "nowhere", "."}) {
    job.set_namespace_(space);
    EXPECT_FALSE(Settings(job).ok()) << space;
  }
  fs::create_symlink("other", root() + "/alias");
  job.set_namespace_("alias");
  EXPECT_FALSE(Settings(job).ok()) << "a namespace's folder that is a link";
  rules_.secrets_root.clear();
  EXPECT_THAT(Refusal("s3/key"), HasSubstr("--secrets-root"));
}

// Links as Kubernetes makes them: KEY -> ..data/KEY, ..data -> ..2026.
TEST_F(LaunchSettingsTest, LinksWithinANamespacePass) {
  Put("team/mounted/..2026/key", "text");
  fs::create_symlink("..2026", root() + "/team/mounted/..data");
  fs::create_symlink("..data/key", root() + "/team/mounted/key");
  const absl::StatusOr<std::string> text = ReadSecret(root(), "team", "mounted/key");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "text");
}

TEST_F(LaunchSettingsTest, FilesThatOthersMayReadOrThatAreNoTextAreRefused) {
  Put("team/s3/open", kText, 0644);
  EXPECT_THAT(Refusal("s3/open"), HasSubstr("expected mode 0600"));
  Put("team/s3/group", kText, 0660);
  EXPECT_THAT(Refusal("s3/group"), HasSubstr("expected mode 0600"));
  Put("team/s3/empty", "\n");
  EXPECT_THAT(Refusal("s3/empty"), HasSubstr("1 to 16384 bytes"));
  Put("team/s3/long", std::string(kMaxSecretBytes + 1, 'x'));
  EXPECT_THAT(Refusal("s3/long"), HasSubstr("1 to 16384 bytes"));
  Put("team/s3/zero", std::string("a\0b", 3));
  EXPECT_THAT(Refusal("s3/zero"), HasSubstr("zero bytes"));
  ASSERT_EQ(mkfifo((root() + "/team/s3/pipe").c_str(), 0600), 0);
  EXPECT_THAT(Refusal("s3/pipe"), HasSubstr("regular file"));
  EXPECT_THAT(Refusal("s3/."), HasSubstr("SECRET/KEY"));
}

TEST_F(LaunchSettingsTest, NamesThatTheNodeDoesNotAllowAreRefused) {
  const auto refusal = [&](const std::string& name, const std::string& secret) {
    return std::string(Settings(JobWith(name, "x", secret)).status().message());
  };
  EXPECT_THAT(refusal("THEIRS", ""), HasSubstr("environment[0].name: THEIRS: this node allows no"));
  rules_.allowed = {"LD_*", "PATH", "NCCL_*"};
  EXPECT_THAT(refusal("LD_PRELOAD", ""), HasSubstr("environment[0].name: expected a name that"));
  EXPECT_THAT(refusal("PATH", ""), HasSubstr("environment[0].name: expected a name that"));
  EXPECT_THAT(refusal("NCCL_DEBUG", "s3/key"), HasSubstr("that no library prints"));
  v1::PlannedJob twice = JobWith("NCCL_DEBUG", "INFO", "");
  *twice.add_environment() = twice.environment(0);
  EXPECT_THAT(std::string(Settings(twice).status().message()), HasSubstr("each name once"));
  v1::PlannedJob many = JobWith("NCCL_DEBUG", "INFO", "");
  for (int i = 0; i < kMaxJobVariables; ++i) {
    *many.add_environment() = JobWith("NCCL_A" + std::to_string(i), "", "").environment(0);
  }
  EXPECT_THAT(std::string(Settings(many).status().message()), HasSubstr("at most 64"));
}

TEST_F(LaunchSettingsTest, ANetworkGivesAddressAndInterface) {
  absl::StatusOr<std::map<std::string, JobNetwork>> networks = ParseNetworks({"local=lo"});
  ASSERT_TRUE(networks.ok()) << networks.status();
  rules_.networks = *networks;
  v1::PlannedJob job;
  job.set_network("local");
  const absl::StatusOr<LaunchSettings> settings = Settings(job);
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->host_address, "127.0.0.1");
  EXPECT_THAT(settings->variables, ElementsAre("NCCL_SOCKET_IFNAME==lo"));
  job.set_network("fast");
  EXPECT_THAT(
      std::string(Settings(job).status().message()),
      HasSubstr(
          "communication.network: this node has no network 'fast' (--network); it has local"));
  for (const char* bad : {"local", "=lo", "local=", "Local=lo", "local=none7"}) {
    EXPECT_FALSE(ParseNetworks({bad}).ok()) << bad;
  }
  EXPECT_FALSE(ParseNetworks({"a=lo", "a=lo"}).ok());
}

TEST_F(LaunchSettingsTest, AnotherUserGetsACertificateForAStoreThatAsksForOne) {
  v1::PlannedJob job;
  const auto certifies = [&](const std::string& restore) {
    v1::Launch launch;
    launch.add_trainers()->set_job(job.SerializeAsString());
    launch.mutable_trainers(0)->set_restore_path(restore);
    const absl::StatusOr<LaunchSettings> settings = SettingsOf(launch, rules_);
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings.ok() && settings->certify_trainers;
  };
  job.set_store("ravel://store:7443/a");
  EXPECT_FALSE(certifies("")) << "trainers that are this user read the node's own";
  rules_.certify_trainers = true;
  EXPECT_TRUE(certifies(""));
  job.set_store("s3://bucket/a");
  EXPECT_FALSE(certifies(""));
  EXPECT_TRUE(certifies("ravel://store:7443/a/step-0000000020"));
}

TEST_F(LaunchSettingsTest, NeedsMeetTheRefusalOfTheirLaunch) {
  const auto refusal = [&](const JobNeeds& needs) {
    const std::optional<NeedRefusal> refused = RefusalOf(needs, rules_);
    return refused ? refused->field + ": " + refused->why : "";
  };
  JobNeeds needs{.namespace_name = "team",
                 .environment = {{"NCCL_DEBUG"}, {"MY_KEY", "s3/key"}},
                 .network = "local"};
  rules_.networks = {{"local", {"lo", "127.0.0.1"}}};
  EXPECT_EQ(refusal(needs), "");
  needs.network = "fast";
  EXPECT_EQ(refusal(needs),
            "communication.network: this node has no network 'fast' (--network); it has local");
  fs::remove(root() + "/team/s3/key");
  EXPECT_THAT(refusal(needs), HasSubstr("environment[1].secret: secret s3/key of namespace team"));
  needs.environment[0].name = "THEIRS";
  EXPECT_THAT(refusal(needs), HasSubstr("environment[0].name: THEIRS: this node allows no"));
}

TEST_F(LaunchSettingsTest, ARootThatOthersMayChangeIsRefused) {
  EXPECT_EQ(CheckSecretsRoot(root()), absl::OkStatus());
  EXPECT_FALSE(CheckSecretsRoot(root() + "/none").ok());
  EXPECT_FALSE(CheckSecretsRoot("relative").ok());
  ASSERT_EQ(chmod(root().c_str(), 0770), 0);
  EXPECT_FALSE(CheckSecretsRoot(root()).ok());
}

}  // namespace
}  // namespace ravel::daemon
