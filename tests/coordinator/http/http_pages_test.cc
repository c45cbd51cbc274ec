// The coordinator's pages without a coordinator: what a page says of hostile names and many jobs,
// and what probes say when the strand or the store does not work.

#include "coordinator/http/http_pages.h"

#include <atomic>
#include <memory>
#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/http_client.h"

namespace ravel::coordinator {
namespace {

using testing::GetPage;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SampleOf;

JobMetrics FullJob(const std::string& name) {
  JobMetrics job;
  job.namespace_name = "default";
  job.name = name;
  job.state = JobState::kRunning;
  job.numerics = "compute=bf16 determinism=exact device=cpu gemmPath=cpu_reference recipe=mxfp8";
  job.quantized = true;
  job.any_step = true;
  job.loss = 2.5;
  job.eta_seconds = job.progress_age_seconds = job.queue_wait_seconds = 1;
  job.checkpoint_age_seconds = job.goodput_ratio = 0.5;
  job.tokens_per_second = 4000;
  job.meter = {.steps = 3,
               .tokens = 300,
               .planned_bytes = 10,
               .measured_bytes = 9,
               .devices = 4,
               .scale = {.epoch = 1, .flops_per_token = 5e10, .peak_flops = 1e14}};
  job.meter.step_seconds.Add(0.3);
  job.meter.step_seconds.Add(300);
  for (size_t i = 0; i < kDeviceTimes; ++i) {
    job.device_seconds.emplace_back(DeviceTimeName(static_cast<DeviceTime>(i)), 1);
  }
  return job;
}

int64_t SeriesOf(const std::string& page, const std::string& text) {
  int64_t count = 0;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    count += !absl::StartsWith(line, "#") && absl::StrContains(line, text) ? 1 : 0;
  }
  return count;
}

TEST(MetricsPageTest, AJobHasABoundedNumberOfSeries) {
  ControllerMetrics metrics;
  metrics.by_job = {FullJob("a"), FullJob("b")};
  const std::string page = MetricsPage(metrics, {});
  EXPECT_LE(SeriesOf(page, "job=\"a\""), 90) << page;
  EXPECT_EQ(SeriesOf(page, "job=\"a\""), SeriesOf(page, "job=\"b\""));
  EXPECT_EQ(SampleOf(page, "ravel_job_loss{namespace=\"default\",job=\"a\"}"), 2.5);
}

TEST(MetricsPageTest, TellsTheSpeedOfEachDevice) {
  ControllerMetrics metrics;
  metrics.by_job = {FullJob("a")};
  const std::string labels = "{namespace=\"default\",job=\"a\"";
  std::string page = MetricsPage(metrics, {});
  EXPECT_EQ(SampleOf(page, "ravel_job_tokens_per_second_per_device" + labels + "}"), 1000);
  EXPECT_EQ(SampleOf(page, "ravel_job_tflops" + labels + "}"), 50);
  EXPECT_EQ(SampleOf(page, "ravel_job_mfu_ratio" + labels + "}"), 0.5);
  EXPECT_EQ(SampleOf(page, "ravel_job_step_seconds_bucket" + labels + ",le=\"0.2\"}"), 0);
  EXPECT_EQ(SampleOf(page, "ravel_job_step_seconds_bucket" + labels + ",le=\"0.3\"}"), 1);
  EXPECT_EQ(SampleOf(page, "ravel_job_step_seconds_bucket" + labels + ",le=\"+Inf\"}"), 2);
  EXPECT_EQ(SampleOf(page, "ravel_job_step_seconds_sum" + labels + "}"), 300.3);

  metrics.by_job[0].meter.scale.peak_flops = 0;
  page = MetricsPage(metrics, {});
  EXPECT_EQ(SampleOf(page, "ravel_job_tflops" + labels + "}"), 50);
  EXPECT_THAT(page, Not(HasSubstr("ravel_job_mfu_ratio{"))) << "no peak is known";
  metrics.by_job[0].meter.scale.flops_per_token = 0;
  page = MetricsPage(metrics, {});
  EXPECT_THAT(page, Not(HasSubstr("ravel_job_tflops{"))) << "some tensors are frozen";
}

TEST(MetricsPageTest, ReasonsOfRestartsBeginWithZero) {
  ControllerMetrics metrics;
  metrics.counts.restarts.Add("NodeLost", 2);
  const std::string page = MetricsPage(metrics, {});
  EXPECT_EQ(SampleOf(page, "ravel_restarts_total{reason=\"NodeLost\",class=\"infrastructure\"}"),
            2);
  EXPECT_EQ(SampleOf(page, "ravel_restarts_total{reason=\"Stall\",class=\"infrastructure\"}"), 0);
}

TEST(MetricsPageTest, SaysHowTheGemmsOfARecipeAreComputed) {
  ControllerMetrics metrics;
  metrics.by_job = {FullJob("a")};
  const std::string page = MetricsPage(metrics, {});
  const std::string head = "ravel_job_gemm_info{namespace=\"default\",job=\"a\",class=";
  for (const char* of : {"forward", "input_gradient", "weight_gradient"}) {
    EXPECT_EQ(SampleOf(page, absl::StrCat(head, "\"", of, "\",path=\"cpu_reference\"}")), 1)
        << page;
  }
  EXPECT_EQ(SampleOf(page, head + "\"unquantized\",path=\"bf16\"}"), 1) << page;
}

TEST(MetricsPageTest, WhatIsNotKnownIsNotThere) {
  ControllerMetrics metrics;
  JobMetrics job;
  job.namespace_name = "default";
  job.name = "new";
  metrics.by_job = {job};
  const std::string page = MetricsPage(metrics, {});
  EXPECT_THAT(page, Not(HasSubstr("NaN")));
  EXPECT_THAT(page, Not(HasSubstr("ravel_job_loss{")));
  EXPECT_THAT(page, Not(HasSubstr("ravel_goodput_ratio{")));
  EXPECT_THAT(page, Not(HasSubstr("ravel_job_tokens_per_second_per_device{")));
  EXPECT_THAT(page, Not(HasSubstr("ravel_job_step_seconds_bucket{")));
}

TEST(MetricsPageTest, EndsOfCertificatesAreThereWhereThereAreCertificates) {
  EXPECT_THAT(MetricsPage({}, {}), Not(HasSubstr("\nravel_certificate_end_time_seconds{")));
  ProcessMetrics process;
  process.server_certificate_end = 1'800'000'000;
  process.authority_end = 2'100'000'000;
  const std::string page = MetricsPage({}, process);
  EXPECT_EQ(SampleOf(page, "ravel_certificate_end_time_seconds{of=\"server\"}"), 1.8e9);
  EXPECT_EQ(SampleOf(page, "ravel_certificate_end_time_seconds{of=\"authority\"}"), 2.1e9);
}

TEST(BoundedCountsTest, WordsBeyondTheLimitAreOneWord) {
  BoundedCounts counts;
  for (int i = 0; i < 1000; ++i) {
    counts.Add(absl::StrCat("reason-", i));
  }
  EXPECT_LE(counts.counts().size(), BoundedCounts::kMost + 1);
  EXPECT_EQ(counts.counts().at("other"), 1000 - static_cast<int64_t>(BoundedCounts::kMost));
  counts.Add("reason-0");
  EXPECT_EQ(counts.counts().at("reason-0"), 2);
}

TEST(RpcMeterTest, CountsByMethodAndCode) {
  RpcMeter meter;
  meter.Record("GetJob", "OK", 0.01);
  meter.Record("GetJob", "NOT_FOUND", 0.02);
  meter.Record("StreamLogs", "CANCELLED", -1);
  for (int i = 0; i < 1000; ++i) {
    meter.Record(absl::StrCat("M", i), "OK", 0);
  }
  const std::vector<RpcLook> looks = meter.Get();
  EXPECT_EQ(looks.size(), RpcMeter::kMostMethods);
  EXPECT_EQ(looks[0].method, "GetJob");
  EXPECT_EQ(looks[0].seconds.Count(), 2);
  EXPECT_EQ(looks[0].by_code.at("NOT_FOUND"), 1);
}

// A strand whose turn never comes, or at once.
class FakeStrand : public Executor {
 public:
  void Post(std::function<void()> work) override {
    if (!stuck) {
      work();
    }
  }
  std::atomic<bool> stuck = false;
};

TEST(HttpPagesTest, ProbesSayWhetherTheStrandAndTheStoreWork) {
  FakeStrand strand;
  std::atomic<bool> writable = true;
  const auto server = ServeHttpPages({.listen = "127.0.0.1:0", .token_file = {}},
                                     {.strand = &strand,
                                      .writable = [&writable] { return writable.load(); },
                                      .process = [] { return ProcessMetrics(); }});
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  EXPECT_EQ(GetPage(port, "/livez").status, 200);
  EXPECT_EQ(GetPage(port, "/readyz").status, 200);
  writable = false;
  EXPECT_EQ(GetPage(port, "/readyz").status, 503);
  EXPECT_THAT(GetPage(port, "/readyz").body, HasSubstr("takes no changes"));
  EXPECT_EQ(GetPage(port, "/livez").status, 200) << "a restart would not help a full disk";
  strand.stuck = true;
  EXPECT_EQ(GetPage(port, "/livez").status, 503);
}

}  // namespace
}  // namespace ravel::coordinator
