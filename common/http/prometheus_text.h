#pragma once

// Writes the text format of Prometheus, version 0.0.4: families of samples with HELP and TYPE.

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/latency_histogram.h"

namespace ravel::http {

using Labels = std::vector<std::pair<std::string_view, std::string>>;

// A wrong name is a bug of ours and ends the process: a family that comes twice, a
// counter without `_total`, a name that Prometheus does not take. Values of labels may be any text:
// they are escaped, cut at kMaxLabelBytes, and bytes that are not UTF-8 are replaced. A family
// takes kMaxSeries samples and drops the rest, so that no input makes a page without end.
// Thread-compatible.
class PrometheusText {
 public:
  static constexpr std::string_view kContentType = "text/plain; version=0.0.4; charset=utf-8";
  static constexpr size_t kMaxLabelBytes = 256;
  static constexpr int64_t kMaxSeries = 20'000;

  // The samples that follow belong to this family.
  PrometheusText& Counter(std::string_view name, std::string_view help);
  PrometheusText& Gauge(std::string_view name, std::string_view help);
  // One family of one histogram per set of labels.
  PrometheusText& Histogram(std::string_view name, std::string_view help);

  PrometheusText& Add(const Labels& labels, double value);
  PrometheusText& Add(double value) { return Add({}, value); }
  PrometheusText& AddHistogram(const Labels& labels, const LatencyHistogram::Look& look);
  // `counts`: the number of records up to each bound and above the one before; the last, which has
  // no bound: above all of them.
  PrometheusText& AddHistogram(const Labels& labels,
                               std::span<const double> bounds,
                               std::span<const int64_t> counts,
                               double sum);

  // Samples that were dropped so far.
  int64_t dropped() const { return dropped_; }
  std::string Take() { return std::move(text_); }

 private:
  enum class Kind { kNone, kCounter, kGauge, kHistogram };
  PrometheusText& Begin(Kind kind, std::string_view name, std::string_view help);
  void Line(std::string_view suffix, const Labels& labels, double value);

  std::string text_;
  std::string family_;
  Kind kind_ = Kind::kNone;
  int64_t series_ = 0;
  int64_t dropped_ = 0;
  std::set<std::string> families_;
};

}  // namespace ravel::http
