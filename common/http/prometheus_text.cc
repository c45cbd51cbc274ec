#include "common/http/prometheus_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

#include "common/check.h"
#include "common/plain_text.h"
#include "common/utf8.h"

namespace ravel::http {
namespace {

// Lower case, digits and underscores, a letter first: less than Prometheus takes, and all we use.
bool IsName(std::string_view name) {
  return !name.empty() && absl::ascii_islower(static_cast<unsigned char>(name.front())) &&
         std::all_of(name.begin(), name.end(), [](char c) {
           const auto letter = static_cast<unsigned char>(c);
           return absl::ascii_islower(letter) || absl::ascii_isdigit(letter) || c == '_';
         });
}

std::string NumberText(double value) {
  if (std::isnan(value)) {
    return "NaN";
  }
  if (std::isinf(value)) {
    return value > 0 ? "+Inf" : "-Inf";
  }
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-6 && size < 1e15);  // as people write it
  char digits[64];
  const std::to_chars_result end =
      std::to_chars(digits,
                    digits + sizeof(digits),
                    value,
                    plain ? std::chars_format::fixed : std::chars_format::scientific);
  return std::string(digits, end.ptr);
}

std::string LabelText(const std::string& value) {
  return absl::StrReplaceAll(CutText(ReplaceInvalidUtf8(value), PrometheusText::kMaxLabelBytes),
                             {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
}

}  // namespace

PrometheusText& PrometheusText::Counter(std::string_view name, std::string_view help) {
  CHECK(name.ends_with("_total"));
  return Begin(Kind::kCounter, name, help);
}

PrometheusText& PrometheusText::Gauge(std::string_view name, std::string_view help) {
  CHECK(!name.ends_with("_total"));
  return Begin(Kind::kGauge, name, help);
}

PrometheusText& PrometheusText::Histogram(std::string_view name, std::string_view help) {
  CHECK(name.ends_with("_seconds"));
  return Begin(Kind::kHistogram, name, help);
}

PrometheusText& PrometheusText::Begin(Kind kind, std::string_view name, std::string_view help) {
  static constexpr const char* kWords[] = {"", "counter", "gauge", "histogram"};
  CHECK(IsName(name));
  CHECK(families_.emplace(name).second);
  family_ = std::string(name);
  kind_ = kind;
  series_ = 0;
  const std::string escaped =
      absl::StrReplaceAll(std::string(help), {{"\\", "\\\\"}, {"\n", "\\n"}});
  absl::StrAppend(&text_, "# HELP ", family_, " ", escaped, "\n");
  absl::StrAppend(&text_, "# TYPE ", family_, " ", kWords[static_cast<size_t>(kind)], "\n");
  return *this;
}

PrometheusText& PrometheusText::Add(const Labels& labels, double value) {
  CHECK(kind_ == Kind::kCounter || kind_ == Kind::kGauge);
  Line("", labels, value);
  return *this;
}

PrometheusText& PrometheusText::AddHistogram(const Labels& labels,
                                             const LatencyHistogram::Look& look) {
  return AddHistogram(labels, LatencyHistogram::kBoundsSeconds, look.counts, look.sum_seconds);
}

PrometheusText& PrometheusText::AddHistogram(const Labels& labels,
                                             std::span<const double> bounds,
                                             std::span<const int64_t> counts,
                                             double sum) {
  CHECK(counts.size() == bounds.size() + 1);
  CHECK(kind_ == Kind::kHistogram);
  if (series_ >= kMaxSeries) {
    ++dropped_;
    return *this;
  }
  int64_t below = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    Labels with_bound = labels;
    with_bound.emplace_back("le", i < bounds.size() ? NumberText(bounds[i]) : "+Inf");
    Line("_bucket", with_bound, static_cast<double>(below));
  }
  Line("_sum", labels, sum);
  Line("_count", labels, static_cast<double>(below));
  return *this;
}

void PrometheusText::Line(std::string_view suffix, const Labels& labels, double value) {
  // A histogram is written whole: AddHistogram looks whether there is room for one more.
  if (series_ >= kMaxSeries && kind_ != Kind::kHistogram) {
    ++dropped_;
    return;
  }
  ++series_;
  absl::StrAppend(&text_, family_, absl::string_view(suffix.data(), suffix.size()));
  char before = '{';
  for (const auto& [name, text] : labels) {
    CHECK(IsName(name));
    text_ += before;
    absl::StrAppend(
        &text_, absl::string_view(name.data(), name.size()), "=\"", LabelText(text), "\"");
    before = ',';
  }
  absl::StrAppend(&text_, before == ',' ? "} " : " ", NumberText(value), "\n");
}

}  // namespace ravel::http
