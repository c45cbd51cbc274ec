// Several hosts, as network namespaces with addresses of their own: a coordinator on one, daemons
// on two others, certificates everywhere, one shared folder. A job goes from `init` to an exported
// model with the losses of one host's run, bit for bit.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/mini_cluster.h"
#include "tests/testing/secure_cluster.h"

namespace ravel::testing {
namespace {

using ::testing::HasSubstr;

// loss_bits of each step, in order.
std::vector<std::string> LossBits(const std::string& jsonl) {
  std::vector<std::string> bits;
  for (const absl::string_view line : absl::StrSplit(jsonl, '\n', absl::SkipEmpty())) {
    const absl::StatusOr<json::Value> step = json::Parse(std::string(line));
    const json::Value* const value = step.ok() ? step->Find("loss_bits") : nullptr;
    bits.push_back(value == nullptr ? "none" : value->AsString());
  }
  return bits;
}

class HostsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) {
      ADD_FAILURE() << cluster_->Report();
    }
  }
  // Coordinator on host 0, a daemon on each of the others.
  void Start(bool six) {
    absl::StatusOr<std::unique_ptr<NetworkHosts>> hosts = NetworkHosts::Create(3);
    if (!hosts.ok()) {
      GTEST_SKIP() << hosts.status().message();
    }
    hosts_ = *std::move(hosts);
    absl::StatusOr<std::unique_ptr<SecureCluster>> started =
        SecureCluster::Start({.listen = six ? "[::]:0" : "0.0.0.0:0",
                              .names = {six ? hosts_->AddressV6(0) : hosts_->Address(0)},
                              .coordinator_host = hosts_->Prefix(0)});
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    const std::string token = cluster_->Token({"node", "--uses", "2"});
    for (const int host : {1, 2}) {
      const std::string node = absl::StrCat("n", host);
      const RunResult joined = cluster_->Join(node, token, hosts_->Prefix(host));
      ASSERT_EQ(joined.exit_code, 0) << joined.err;
      ASSERT_EQ(cluster_->StartWorker(node, hosts_->Prefix(host), {"--cpu-devices", "2"}),
                absl::OkStatus());
    }
    ASSERT_TRUE(cluster_->WaitForReady(2));
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& name, int64_t workers) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = workers,
            .steps = 12,
            .save_every_steps = 4};
  }
  // Losses of a job that succeeded.
  std::vector<std::string> Train(const TinyJob& job) {
    const std::string path = absl::StrCat(cluster_->folder(), "/", job.name, ".yaml");
    WriteText(path, ToYaml(job));
    const RunResult submitted = cluster_->Ctl({"submit", "-f", path});
    EXPECT_EQ(submitted.exit_code, 0) << submitted.err;
    const RunResult done = cluster_->Ctl({"wait", job.name, "--for=done", "--timeout", "60s"});
    EXPECT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", job.name}).out;
    return LossBits(cluster_->Ctl({"metrics", job.name, "-o", "jsonl"}).out);
  }

  std::unique_ptr<NetworkHosts> hosts_;
  std::unique_ptr<SecureCluster> cluster_;
};

TEST_F(HostsTest, TwoHostsTrainWhatOneTrains) {
  Start(false);
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  const std::vector<std::string> one = Train(Job("one", 2));  // both ranks on one node
  ASSERT_EQ(one.size(), 12u);
  const std::vector<std::string> four = Train(Job("four", 4));
  EXPECT_EQ(four, one);
  EXPECT_THAT(cluster_->Ctl({"events", "one"}).out, HasSubstr("over shm"));
  EXPECT_THAT(cluster_->Ctl({"events", "four"}).out, HasSubstr("over gloo"));
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "json"}).out, HasSubstr(hosts_->Address(2)));

  const RunResult exported = cluster_->Ctl({"checkpoints",
                                            "export",
                                            cluster_->folder() + "/store/four",
                                            "--output",
                                            cluster_->folder() + "/model"});
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_TRUE(std::filesystem::exists(cluster_->folder() + "/model/model.safetensors"));
}

TEST_F(HostsTest, AddressesMayBeOfIPv6) {
  Start(true);
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  EXPECT_EQ(Train(Job("four", 4)).size(), 12u);
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "json"}).out, HasSubstr(hosts_->AddressV6(1)));
}

}  // namespace
}  // namespace ravel::testing
