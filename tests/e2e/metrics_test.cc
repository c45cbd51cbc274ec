// Probes and metrics of the real programs, through a job that loses a worker: what is exported,
// that the device time sums up, and that a dashboard or an alert names nothing else.

#include <chrono>
#include <cmath>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/http_client.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kJob[] = "namespace=\"default\",job=\"watched\"";

int PortIn(const std::string& path) {
  int port = 0;
  Eventually(seconds(30),
             [&] { return absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadText(path)), &port); });
  return port;
}

std::string Of(const std::string& family, const std::string& more = "") {
  return absl::StrCat(family, "{", kJob, more.empty() ? "" : ",", more, "}");
}

// Sum of the samples whose lines begin so.
double SumOf(const std::string& page, const std::string& head) {
  double sum = 0;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, head) &&
        absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) {
      sum += value;
    }
  }
  return sum;
}

// Names of metrics in a file of deploy/monitoring.
std::set<std::string> NamesIn(const std::string& file) {
  const std::string text = ReadText(absl::StrCat(RAVEL_MONITORING_FOLDER, "/", file));
  std::set<std::string> names;
  const std::regex name("ravel_[a-z_]+");
  for (std::sregex_iterator at(text.begin(), text.end(), name), end; at != end; ++at) {
    names.insert(at->str());
  }
  return names;
}

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    ASSERT_EQ(cluster_->StartWorkers(3, cluster_->HoldFaults()), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    job_ = {.name = "watched",
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 3,
            .steps = 40,
            .global_batch = 8};
  }
  std::string Metrics() { return GetPage(HttpPort(), "/metrics").body; }
  int HttpPort() { return PortIn(cluster_->folder() + "/http-port"); }

  std::unique_ptr<MiniCluster> cluster_;
  TinyJob job_;
};

TEST_F(MetricsTest, ProbesSayWhatIsWrongAndNothingElse) {
  const int coordinator = HttpPort();
  const int worker = PortIn(cluster_->folder() + "/w0/http-port");
  for (const int port : {coordinator, worker}) {
    EXPECT_EQ(GetPage(port, "/livez").status, 200);
    EXPECT_EQ(GetPage(port, "/readyz").status, 200);
    EXPECT_EQ(GetPage(port, "/").status, 404);
    EXPECT_EQ(SendHttp(port, "POST /livez HTTP/1.1\r\n\r\n").status, 405);
  }
  const std::string page = GetPage(worker, "/metrics").body;
  EXPECT_EQ(SampleOf(page, "ravel_worker_registered"), 1) << page;
  EXPECT_EQ(SampleOf(page, "ravel_worker_devices{kind=\"cpu\"}"), 1) << page;
  cluster_->KillCoordinator();
  EXPECT_TRUE(Eventually(seconds(30), [&] { return GetPage(worker, "/readyz").status == 503; }));
  EXPECT_THAT(GetPage(worker, "/readyz").body, HasSubstr("no coordinator"));
  EXPECT_EQ(GetPage(worker, "/livez").status, 200) << "a restart of the daemon would not help";
  EXPECT_EQ(GetPage(coordinator, "/livez").status, 0);
}

TEST_F(MetricsTest, AStoppedCoordinatorIsNotAlive) {
  const int port = HttpPort();
  cluster_->coordinator().Signal(SIGSTOP);
  EXPECT_TRUE(Eventually(seconds(30), [&] {  // a signal takes its time
    return SendHttp(port, "GET /livez HTTP/1.1\r\n\r\n", seconds(1)).status == 0;
  }));
  cluster_->coordinator().Signal(SIGCONT);
  EXPECT_TRUE(Eventually(seconds(30), [&] { return GetPage(port, "/livez").status == 200; }));
}

TEST_F(MetricsTest, AKilledWorkersSecondsAreInTheirPlaceAndAllSumUp) {
  job_.more_spec = "  elastic: {min: 2, max: 3, growDelay: 60s}\n";
  cluster_->HoldTrainersAt(15);
  ASSERT_EQ(cluster_->Submit(job_), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("watched", 14, seconds(60)), absl::OkStatus());
  const std::string while_it_trains = Metrics();
  EXPECT_EQ(SampleOf(while_it_trains, Of("ravel_job_devices", "kind=\"held\"")), 3);
  cluster_->KillWorker("w2");
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("watched", seconds(60)), absl::OkStatus());

  std::string page;  // once the last trainer is gone
  EXPECT_TRUE(Eventually(seconds(30), [&] {
    page = Metrics();
    return SampleOf(page, Of("ravel_job_devices", "kind=\"held\"")) == 0;
  }));
  EXPECT_EQ(SampleOf(page, "ravel_jobs{state=\"SUCCEEDED\"}"), 1) << page;
  // Of what speaks first: the node, or the peers that it left.
  EXPECT_GE(SumOf(page, "ravel_restarts_total{reason="), 1) << page;
  EXPECT_EQ(SampleOf(page, Of("ravel_job_step")), 40) << page;
  EXPECT_GE(SampleOf(page, Of("ravel_job_step_seconds_count")), 40) << page;
  EXPECT_GT(SampleOf(page, Of("ravel_job_tokens_per_second_per_device")), 0) << page;
  EXPECT_GT(SampleOf(page, Of("ravel_job_tflops")), 0) << page;
  EXPECT_EQ(SampleOf(page, Of("ravel_job_gemm_info", "class=\"forward\",path=\"fp32\"")), 1)
      << page;
  // The hold and the loss: time in which devices were held and made no step.
  EXPECT_GT(SampleOf(page, Of("ravel_lost_device_seconds_total", "cause=\"detect\"")), 0) << page;
  EXPECT_GT(SampleOf(page, Of("ravel_lost_device_seconds_total", "cause=\"replay\"")), 0) << page;
  EXPECT_EQ(SampleOf(page, Of("ravel_lost_device_seconds_total", "cause=\"reshape\"")), 0) << page;
  const double held = SampleOf(page, Of("ravel_held_device_seconds_total"));
  const double productive = SampleOf(page, Of("ravel_productive_device_seconds"));
  EXPECT_GT(productive, 0);
  EXPECT_NEAR(productive + SumOf(page, absl::StrCat("ravel_lost_device_seconds_total{", kJob)),
              held,
              1e-3 * held);
  EXPECT_NEAR(SampleOf(page, Of("ravel_goodput_ratio")), productive / held, 1e-6);

  const std::string worker = GetPage(PortIn(cluster_->folder() + "/w0/http-port"), "/metrics").body;
  EXPECT_GE(SampleOf(worker, "ravel_worker_trainer_exits_total{reason=\"Done\"}"), 1) << worker;
  const std::string all = absl::StrCat("\n", while_it_trains, page, worker);
  for (const char* file : {"dashboard.json", "alerts.yaml"}) {
    const std::set<std::string> names = NamesIn(file);
    EXPECT_GT(names.size(), 8u);
    for (const std::string& name : names) {  // a sample, not only its family
      if (name == "ravel_store_trust_heard_seconds") {
        continue;  // a store's: remote_store_test runs one that has a coordinator
      }
      // This run has no certificates, and CPUs no known peak.
      if (name == "ravel_certificate_end_time_seconds" || name == "ravel_job_mfu_ratio") {
        EXPECT_THAT(all, HasSubstr(absl::StrCat("# HELP ", name, " ")));
        continue;
      }
      EXPECT_TRUE(absl::StrContains(all, absl::StrCat("\n", name, "{")) ||
                  absl::StrContains(all, absl::StrCat("\n", name, " ")))
          << file << " names " << name << ", which this run does not export";
    }
  }

  const RunResult text = cluster_->Ctl({"describe", "watched"});
  EXPECT_THAT(text.out, AllOf(HasSubstr("device-seconds; lost: "), HasSubstr("detect ")))
      << text.out;
  // A new coordinator goes on with the same sums.
  cluster_->KillCoordinator();
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  page = Metrics();
  EXPECT_NEAR(SampleOf(page, Of("ravel_held_device_seconds_total")), held, 0.01 * held);
  EXPECT_NEAR(SampleOf(page, Of("ravel_productive_device_seconds")), productive, 0.01 * held);
}

TEST_F(MetricsTest, CallsOfTheApiAreCounted) {
  ASSERT_NE(cluster_->Ctl({"get", "nobody"}).exit_code, 0);
  const std::string page = Metrics();
  EXPECT_GE(SampleOf(page, "ravel_rpc_handled_total{method=\"GetJob\",code=\"NOT_FOUND\"}"), 1)
      << page;
  EXPECT_GE(SampleOf(page, "ravel_rpc_handled_total{method=\"ListNodes\",code=\"OK\"}"), 1) << page;
  EXPECT_GE(SampleOf(page, "ravel_rpc_handling_seconds_count{method=\"GetJob\"}"), 1) << page;
  EXPECT_GE(SampleOf(page, "ravel_persist_seconds_count"), 1) << page;
  EXPECT_EQ(SampleOf(page, "ravel_store_writable"), 1) << page;
}

// Plaintext stays on this host; who cannot listen says so and ends.
TEST(HttpListenTest, OtherAddressesThanLoopbackAreRefusedByName) {
  const ScratchFolder scratch;
  for (const std::string address :
       {"0.0.0.0:0", "192.0.2.1:7071", "localhost.example.org:0", "7071"}) {
    for (const char* program : {"ravel-coordinator", "ravel-worker"}) {
      const bool coordinator = std::string(program) == "ravel-coordinator";
      ProcessOptions options;
      options.arguments = {BinaryPath(program), "--dev-loopback", "--http-listen", address};
      const std::vector<std::string> more =
          coordinator
              ? std::vector<std::string>{"--state-dir", scratch.path() + "/state"}
              : std::vector<std::string>{"--node-id", "w", "--work-dir", scratch.path() + "/work"};
      options.arguments.insert(options.arguments.end(), more.begin(), more.end());
      const RunResult result = RunProgram(options, scratch.path(), seconds(30));
      EXPECT_EQ(result.exit_code, coordinator ? 2 : 93) << program << " " << address;
      EXPECT_THAT(result.err, AllOf(HasSubstr("--http-listen"), HasSubstr(address))) << program;
    }
  }
}

TEST_F(MetricsTest, AnAddressInUseEndsASecondProgram) {
  const std::string taken = absl::StrCat("127.0.0.1:", HttpPort());
  ProcessOptions options;
  options.arguments = {BinaryPath("ravel-coordinator"),
                       "--dev-loopback",
                       "--listen",
                       "127.0.0.1:0",
                       "--state-dir",
                       cluster_->folder() + "/other",
                       "--http-listen",
                       taken};
  const RunResult result = RunProgram(options, cluster_->folder(), seconds(30));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, AllOf(HasSubstr("--http-listen"), HasSubstr("in use")));
}

}  // namespace
}  // namespace ravel::testing
