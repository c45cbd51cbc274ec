#include "coordinator/ctl/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <unistd.h>

#include "common/time_text.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

std::string ShortNumber(double number) {
  if (!std::isfinite(number)) {
    return "-";
  }
  constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  std::size_t unit = 0;
  while (std::fabs(number) >= 999.5 && unit + 1 < std::size(kUnits)) {
    number /= 1000;
    ++unit;
  }
  return unit == 0 || number >= 99.5 ? absl::StrFormat("%.0f%s", number, kUnits[unit])
                                     : absl::StrFormat("%.1f%s", number, kUnits[unit]);
}

std::string Bar(double part) {
  constexpr int kCells = 10;
  static constexpr const char* kEighths[] = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::clamp(part, 0.0, 1.0) * kCells * 8);
  std::string out = "▕";
  for (int cell = 0; cell < kCells; ++cell) {
    const int filled = std::clamp(eighths - cell * 8, 0, 8);
    out += filled == 8 ? "█" : kEighths[filled];
  }
  return out + "▏";
}

std::string ProgressLine(const JobView& job) {
  const double part = job.total_steps > 0
                          ? static_cast<double>(job.step) / static_cast<double>(job.total_steps)
                          : 0;
  std::string out = absl::StrFormat(
      "step %d/%d %s %d%%", job.step, job.total_steps, Bar(part), static_cast<int>(part * 100));
  if (job.state != "RUNNING") {
    absl::StrAppend(&out, " ", job.state, job.reason.empty() ? "" : " (" + job.reason + ")");
  } else if (job.step > 0) {
    absl::StrAppend(&out,
                    " ",
                    ShortNumber(job.tokens_per_second),
                    " tok/s loss ",
                    absl::StrFormat("%.3g", job.loss));
    if (job.eta_seconds >= 0) {
      absl::StrAppend(&out, " ETA ", FormatDuration(static_cast<int64_t>(job.eta_seconds * 1000)));
    }
  }
  absl::StrAppend(&out,
                  " | epoch ",
                  job.epoch,
                  ", ",
                  job.world_size,
                  job.world_size == 1 ? " worker" : " workers");
  return out;
}

std::string MeshText(const std::vector<MeshAxisView>& mesh) {
  return absl::StrJoin(mesh, " x ", [](std::string* out, const MeshAxisView& axis) {
    absl::StrAppend(out, axis.name, " ", axis.size);
  });
}

json::Value MeshDocument(const std::vector<MeshAxisView>& mesh) {
  json::Value axes{json::Array()};
  for (const MeshAxisView& axis : mesh) {
    json::Value entry;
    entry.Set("axis", axis.name).Set("size", axis.size);
    axes.Append(std::move(entry));
  }
  return axes;
}

std::string EventLine(const EventView& event) {
  std::string out = absl::StrCat(FormatTime(event.time_ms).substr(11, 8), " ", event.type);
  if (!event.reason.empty() && event.reason != event.type) {
    absl::StrAppend(&out, " ", event.reason);
  }
  if (!event.node.empty()) {
    absl::StrAppend(&out, " ", event.node);
  }
  if (!event.message.empty()) {
    absl::StrAppend(&out, ": ", event.message);
  }
  const std::string step = event.step < 0 ? "" : absl::StrCat("step ", event.step, ", ");
  return OneLine(absl::StrCat(out, " (", step, "epoch ", event.epoch, ")"));
}

ProgressView::ProgressView() : ProgressView(isatty(STDERR_FILENO) == 1) {}

void ProgressView::ShowJob(const JobView& job) {
  MutexLock lock(mutex_);
  line_ = ForStream(ProgressLine(job), STDERR_FILENO);
  if (on_terminal_) {
    Draw();
    return;
  }
  const int64_t tenth = job.total_steps > 0 ? job.step * 10 / job.total_steps : 0;
  if (job.step > 0 && job.state == "RUNNING" && tenth != last_tenth_) {
    last_tenth_ = tenth;
    std::fprintf(stderr, "%s\n", line_.c_str());
  }
}

void ProgressView::ShowEvent(const EventView& event) {
  ShowLine(EventLine(event));
}

void ProgressView::ShowLine(const std::string& raw) {
  const std::string line = ForStream(raw, STDERR_FILENO);
  MutexLock lock(mutex_);
  if (on_terminal_ && drawn_) {
    std::fputs("\r\033[K", stderr);
  }
  std::fprintf(stderr, "%s\n", line.c_str());
  if (on_terminal_ && drawn_) {
    Draw();
  }
}

void ProgressView::Finish() {
  MutexLock lock(mutex_);
  if (drawn_) {
    std::fputs("\n", stderr);
    drawn_ = false;
  }
}

void ProgressView::Draw() {
  std::fprintf(stderr, "\r\033[K%s", line_.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

std::string GoodputText(const json::Value& job) {
  const json::Value* const goodput = job.Find("goodput");
  const json::Value* const held = goodput == nullptr ? nullptr : goodput->Find("heldDeviceSeconds");
  if (held == nullptr || !held->is_number()) {
    return "";
  }
  const json::Value* const ratio = goodput->Find("ratio");
  std::vector<std::pair<double, std::string>> lost;
  const json::Value* const times = goodput->Find("times");
  for (const json::Value& time : times == nullptr ? json::Array() : times->AsArray()) {
    const json::Value* const cause = time.Find("cause");
    const json::Value* const seconds = time.Find("deviceSeconds");
    if (cause != nullptr && seconds != nullptr && cause->AsString() != "productive") {
      lost.emplace_back(seconds->AsDouble(), cause->AsString());
    }
  }
  std::sort(lost.rbegin(), lost.rend());
  std::string text = absl::StrFormat("%.1f %% of %.1f device-seconds",
                                     ratio == nullptr ? 0 : 100 * ratio->AsDouble(),
                                     held->AsDouble());
  for (size_t i = 0; i < lost.size(); ++i) {
    absl::StrAppend(
        &text, i == 0 ? "; lost: " : ", ", lost[i].second, absl::StrFormat(" %.1f", lost[i].first));
  }
  return text;
}

}  // namespace ravel::ctl
