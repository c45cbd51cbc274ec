// Hosts with two interfaces, as network namespaces: the coordinator is reached over one, trainers
// talk over the other, by the ports that their daemons were given, and also over a link that
// delays. The losses are those of one host, bit for bit.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/secure_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int kFirstPort = 21000;
constexpr int kLastPort = 21031;
constexpr int kDelayMs = 10;
constexpr int kDoNotRestart = 93;  // of ravel-worker
constexpr char kEstablished[] = "01";

// A connection as /proc/net/tcp has it: the address's bytes in the host's order, in hexadecimal.
struct Connection {
  std::string local_host;
  int local_port = 0;
  std::string remote_host;
  int remote_port = 0;
};

Connection ParseConnection(const std::vector<std::string>& fields) {
  Connection parsed;
  const auto take = [](const std::string& field, std::string* host, int* port) {
    const std::vector<std::string> parts = absl::StrSplit(field, ':');
    *host = parts.front();
    EXPECT_TRUE(absl::SimpleHexAtoi(parts.back(), port)) << field;
  };
  take(fields.at(1), &parsed.local_host, &parsed.local_port);
  take(fields.at(2), &parsed.remote_host, &parsed.remote_port);
  return parsed;
}

class NetworksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<NetworkHosts>> made = NetworkHosts::Create(3);
    if (!made.ok()) {
      SkipWithout("namespaces", made.status().message());
      return;
    }
    hosts_ = *std::move(made);
    ASSERT_EQ(hosts_->PartControl({1, 2}), absl::OkStatus());
    absl::StatusOr<std::unique_ptr<SecureCluster>> started =
        SecureCluster::Start({.listen = "0.0.0.0:0",
                              .names = {hosts_->Address(0)},
                              .coordinator_host = hosts_->Prefix(0)});
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    const std::string token = cluster_->Token({"node", "--uses", "2"});
    for (const int host : {1, 2}) {
      const RunResult joined = cluster_->Join(Node(host), token, hosts_->Prefix(host));
      ASSERT_EQ(joined.exit_code, 0) << joined.err;
    }
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) {
      ADD_FAILURE() << cluster_->Report();
    }
  }
  static std::string Node(int host) { return absl::StrCat("n", host); }
  std::string Hold(int64_t step) const { return absl::StrCat(control_.path(), "/hold.", step); }
  void StartNodes(const std::vector<std::string>& network = {"--data-interface", "eth1"}) {
    for (const int host : {1, 2}) {
      std::vector<std::string> flags = {"--cpu-devices",
                                        "2",
                                        "--data-ports",
                                        absl::StrCat(kFirstPort, "-", kLastPort),
                                        "--enable-faults"};
      flags.insert(flags.end(), network.begin(), network.end());
      const absl::Status up = cluster_->StartWorker(
          Node(host),
          hosts_->Prefix(host),
          flags,
          {{"RAVEL_FAULTS", absl::StrCat("trainer.step@*:hold=", control_.path(), "/hold")}});
      ASSERT_EQ(up, absl::OkStatus());
    }
    ASSERT_TRUE(cluster_->WaitForReady(2));
  }
  RunResult TrySubmit(const std::string& name,
                      int64_t workers,
                      const std::string& more_spec) const {
    const std::string path = absl::StrCat(cluster_->folder(), "/", name, ".yaml");
    WriteText(path,
              ToYaml({.name = name,
                      .tokens_path = cluster_->folder() + "/tokens.bin",
                      .store = cluster_->folder() + "/store",
                      .workers = workers,
                      .steps = 12,
                      .save_every_steps = 4,
                      .more_spec = more_spec}));
    return cluster_->Ctl({"submit", "-f", path});
  }
  void Submit(const std::string& name, int64_t workers, const std::string& more_spec = {}) const {
    const RunResult submitted = TrySubmit(name, workers, more_spec);
    ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  }
  // Waits for a step or the end of a job, which may take minutes where others use the disk.
  RunResult Await(const std::string& job, const std::string& what) const {
    return cluster_->Ctl(
        {"wait", job, absl::StrCat("--for=", what), "--timeout", "200s"}, "admin", seconds(220));
  }
  // loss_bits of each step of a job that succeeds.
  std::vector<std::string> Losses(const std::string& name) const {
    const RunResult done = Await(name, "done");
    EXPECT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", name}).out;
    std::vector<std::string> bits;
    const std::string rows = cluster_->Ctl({"metrics", name, "-o", "jsonl"}).out;
    for (const absl::string_view line : absl::StrSplit(rows, '\n', absl::SkipEmpty())) {
      const absl::StatusOr<json::Value> step = json::Parse(std::string(line));
      const json::Value* const value = step.ok() ? step->Find("loss_bits") : nullptr;
      bits.push_back(value == nullptr ? "none" : value->AsString());
    }
    return bits;
  }
  RunResult RunOn(int host, const std::vector<std::string>& command) const {
    std::vector<std::string> words = hosts_->Prefix(host);
    words.insert(words.end(), command.begin(), command.end());
    return cluster_->Run(words);
  }
  // Connections of that host that are up, but for those to the coordinator.
  std::vector<Connection> Connections(int host) const {
    std::vector<Connection> found;
    const std::string table = RunOn(host, {"/bin/cat", "/proc/net/tcp"}).out;
    for (const absl::string_view line : absl::StrSplit(table, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
      if (fields.size() > 3 && fields[3] == kEstablished) {
        const Connection connection = ParseConnection(fields);
        if (connection.remote_port != cluster_->port()) {
          found.push_back(connection);
        }
      }
    }
    return found;
  }
  // Milliseconds to connect from a host to the coordinator over the second interface.
  int64_t ConnectMs(int host) const {
    const std::string place =
        absl::StrCat("('", hosts_->DataAddress(0), "', ", cluster_->port(), ")");
    const RunResult timed = RunOn(host,
                                  {"/usr/bin/env",
                                   "python3",
                                   "-c",
                                   absl::StrCat("import socket, time\n"
                                                "begin = time.monotonic()\n"
                                                "socket.create_connection(",
                                                place,
                                                ", 30)\n"
                                                "print(int(1000 * (time.monotonic() - begin)))")});
    int64_t ms = -1;
    EXPECT_TRUE(absl::SimpleAtoi(timed.out, &ms)) << timed.err;
    return ms;
  }

  ScratchFolder control_;
  std::unique_ptr<NetworkHosts> hosts_;
  std::unique_ptr<SecureCluster> cluster_;
};

TEST_F(NetworksTest, TrainersTalkOverTheNamedInterfaceByTheGivenPorts) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  ASSERT_NO_FATAL_FAILURE(Submit("one", 2));  // both ranks on one node
  const std::vector<std::string> one = Losses("one");
  ASSERT_EQ(one.size(), 12u);
  WriteText(Hold(6), "");
  ASSERT_NO_FATAL_FAILURE(Submit("four", 4));
  const RunResult waited = Await("four", "step=5");
  ASSERT_EQ(waited.exit_code, 0) << waited.err << cluster_->Ctl({"events", "four"}).out;
  for (const int host : {1, 2}) {
    const std::vector<Connection> connections = Connections(host);
    EXPECT_GE(connections.size(), 4u) << "two ranks here, two there";
    for (const Connection& each : connections) {
      EXPECT_EQ(each.local_host.substr(2), "085D0A") << "10.93.8.x: " << each.local_host;
      EXPECT_EQ(each.remote_host.substr(2), "085D0A") << "10.93.8.x: " << each.remote_host;
      const bool local = each.local_port >= kFirstPort && each.local_port <= kLastPort;
      const bool remote = each.remote_port >= kFirstPort && each.remote_port <= kLastPort;
      EXPECT_NE(local, remote) << each.local_port << " to " << each.remote_port;
    }
  }
  std::filesystem::remove(Hold(6));
  EXPECT_EQ(Losses("four"), one);
  EXPECT_THAT(cluster_->Ctl({"events", "four"}).out, HasSubstr("over mixed"));
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "json"}).out,
              HasSubstr(hosts_->DataAddress(2)));
}

TEST_F(NetworksTest, AJobChoosesANetworkByName) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({"--network", "fast=eth1", "--network", "slow=eth0"}));
  WriteText(Hold(6), "");
  ASSERT_NO_FATAL_FAILURE(Submit("fast", 4, "  communication: {network: fast}\n"));
  const RunResult waited = Await("fast", "step=5");
  ASSERT_EQ(waited.exit_code, 0) << waited.err << cluster_->Ctl({"events", "fast"}).out;
  for (const int host : {1, 2}) {
    const std::vector<Connection> connections = Connections(host);
    EXPECT_GE(connections.size(), 4u) << "two ranks here, two there";
    for (const Connection& each : connections) {
      EXPECT_EQ(each.local_host.substr(2), "085D0A") << "10.93.8.x: " << each.local_host;
    }
  }
  std::filesystem::remove(Hold(6));
  EXPECT_EQ(Losses("fast").size(), 12u);
  const RunResult absent = TrySubmit("absent", 4, "  communication: {network: other}\n");
  EXPECT_EQ(absent.exit_code, 2) << absent.out;
  for (const int host : {1, 2}) {
    EXPECT_THAT(absent.err,
                HasSubstr(absl::StrCat("node ", Node(host), ": this node has no network 'other'")));
  }
  EXPECT_THAT(absent.err, HasSubstr("spec.communication.network: node n1"));
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "wide"}).out, HasSubstr("  fast,slow  "));
  const std::string store = cluster_->folder() + "/store";
  EXPECT_THAT(cluster_->Ctl({"list", "-o", "wide"}).out, HasSubstr(store));
  for (const std::string& place : {std::string("fast"), store + "/fast"}) {
    const RunResult steps = cluster_->Ctl({"checkpoints", "list", place, "-o", "wide"});
    EXPECT_THAT(steps.out, HasSubstr("SAVE")) << steps.err;
    EXPECT_THAT(steps.out, HasSubstr(store + "/fast/step-0000000012")) << steps.err;
  }
}

TEST_F(NetworksTest, BadNetworksAreNamed) {
  const auto start = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> words = {
        BinaryPath("ravel-worker"), "--work-dir", cluster_->WorkDir("n1")};
    words.insert(words.end(), flags.begin(), flags.end());
    const RunResult refused = RunOn(1, words);
    EXPECT_EQ(refused.exit_code, kDoNotRestart) << refused.err;
    return refused.err;
  };
  EXPECT_THAT(start({"--data-interface", "eth7"}), HasSubstr("--data-interface: this host has no"));
  EXPECT_THAT(start({"--data-interface", "eth7"}), HasSubstr("there are eth0, eth1, lo"));
  EXPECT_THAT(start({"--network", "fast=eth7"}),
              HasSubstr("--network: fast=eth7: this host has no"));
  EXPECT_THAT(start({"--network", "eth1"}), HasSubstr("expected NAME=INTERFACE"));
  EXPECT_THAT(start({"--data-ports", "9-8"}), HasSubstr("--data-ports: expected FIRST-LAST"));
  EXPECT_THAT(start({"--data-interface", "eth1", "--advertise", "10.93.8.11"}),
              HasSubstr("expected one of --advertise and --data-interface"));
}

TEST_F(NetworksTest, ALinkThatDelaysChangesNoBit) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  ASSERT_NO_FATAL_FAILURE(Submit("one", 2));
  const std::vector<std::string> one = Losses("one");
  const int64_t before_ms = ConnectMs(1);
  const absl::StatusOr<std::unique_ptr<ChildProcess>> delay =
      hosts_->Delay(1, milliseconds(kDelayMs));
  ASSERT_TRUE(delay.ok()) << delay.status();
  RecordProperty("delayed_by", *delay == nullptr ? "netem" : "delay_link.py");
  EXPECT_GE(ConnectMs(1), 2 * kDelayMs) << "without it " << before_ms;
  ASSERT_NO_FATAL_FAILURE(Submit("four", 4));
  EXPECT_EQ(Losses("four"), one);
  EXPECT_THAT(cluster_->Ctl({"events", "four"}).out, HasSubstr("over mixed"));
}

}  // namespace
}  // namespace ravel::testing
