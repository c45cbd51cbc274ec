#include "common/http/prometheus_text.h"

#include <cmath>
#include <limits>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::http {
namespace {

using ::testing::HasSubstr;

TEST(PrometheusTextTest, WritesFamiliesWithHelpAndType) {
  PrometheusText text;
  text.Gauge("ravel_jobs", "Jobs by state.")
      .Add({{"state", "RUNNING"}}, 3)
      .Add({{"state", "QUEUED"}}, 0);
  text.Counter("ravel_restarts_total", "Ends of epochs.").Add(7);
  EXPECT_EQ(text.Take(),
            "# HELP ravel_jobs Jobs by state.\n"
            "# TYPE ravel_jobs gauge\n"
            "ravel_jobs{state=\"RUNNING\"} 3\n"
            "ravel_jobs{state=\"QUEUED\"} 0\n"
            "# HELP ravel_restarts_total Ends of epochs.\n"
            "# TYPE ravel_restarts_total counter\n"
            "ravel_restarts_total 7\n");
}

TEST(PrometheusTextTest, EscapesLabelsAndHelp) {
  PrometheusText text;
  text.Gauge("ravel_x", "a\\b\nc \"d\"").Add({{"job", "a\"b\\c\nd\xff"}, {"node", "é"}}, 1);
  EXPECT_EQ(text.Take(),
            "# HELP ravel_x a\\\\b\\nc \"d\"\n"
            "# TYPE ravel_x gauge\n"
            "ravel_x{job=\"a\\\"b\\\\c\\nd\xEF\xBF\xBD\",node=\"é\"} 1\n");
}

TEST(PrometheusTextTest, NumbersKeepTheirBitsAndTheirInfinities) {
  PrometheusText text;
  text.Gauge("ravel_x", "x");
  for (const double value : {0.1, 1e300, -2.5, 1790000000123.0}) {
    text.Add(value);
  }
  text.Add(std::numeric_limits<double>::infinity());
  text.Add(-std::numeric_limits<double>::infinity());
  text.Add(std::nan(""));
  const std::string page = text.Take();
  for (const char* line : {"ravel_x 0.1\n",
                           "ravel_x 1e+300\n",
                           "ravel_x -2.5\n",
                           "ravel_x 1790000000123\n",
                           "ravel_x +Inf\n",
                           "ravel_x -Inf\n",
                           "ravel_x NaN\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
}

TEST(PrometheusTextTest, HistogramsAreCumulative) {
  LatencyHistogram latency;
  latency.Record(0.0001);
  latency.Record(0.001);  // a bound is inside of its step
  latency.Record(0.3);
  latency.Record(100);
  latency.Record(-1);
  latency.Record(std::nan(""));
  PrometheusText text;
  text.Histogram("ravel_persist_seconds", "x").AddHistogram({{"rpc", "A"}}, latency.Get());
  const std::string page = text.Take();
  EXPECT_THAT(page, HasSubstr("# TYPE ravel_persist_seconds histogram\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"0.0005\"} 3\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"0.001\"} 4\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"0.25\"} 4\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"0.5\"} 5\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"10\"} 5\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_bucket{rpc=\"A\",le=\"+Inf\"} 6\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_sum{rpc=\"A\"} 100.3011\n"));
  EXPECT_THAT(page, HasSubstr("ravel_persist_seconds_count{rpc=\"A\"} 6\n"));
}

TEST(PrometheusTextTest, BoundsSeriesAndLabels) {
  PrometheusText text;
  text.Gauge("ravel_x", "x");
  for (int64_t i = 0; i < PrometheusText::kMaxSeries + 5; ++i) {
    text.Add({{"i", absl::StrCat(i)}}, 1);
  }
  EXPECT_EQ(text.dropped(), 5);
  text.Gauge("ravel_y", "y").Add({{"job", std::string(10'000, 'j')}}, 1);
  const std::string page = text.Take();
  EXPECT_THAT(page, HasSubstr(std::string(PrometheusText::kMaxLabelBytes - 3, 'j') + "...\"} 1\n"));
}

TEST(PrometheusTextDeathTest, WrongNamesAreBugs) {
  EXPECT_DEATH(PrometheusText().Counter("ravel_restarts", "x"), "_total");
  EXPECT_DEATH(PrometheusText().Gauge("ravel_restarts_total", "x"), "_total");
  EXPECT_DEATH(PrometheusText().Gauge("Ravel jobs", "x"), "IsName");
  EXPECT_DEATH(PrometheusText().Gauge("ravel_x", "x").Gauge("ravel_x", "x"), "families_");
  EXPECT_DEATH(PrometheusText().Gauge("ravel_x", "x").Add({{"a-b", "c"}}, 1), "IsName");
}

}  // namespace
}  // namespace ravel::http
