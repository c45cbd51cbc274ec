// The ledger is exact by construction: Observe adds what was held to `held_us_` and either to an
// entry or to `pending_us_`, and everything else only moves amounts between these. While devices
// start or train, what they do is known only afterwards: that time is pending until a report, or
// the end of the use, says what it was. Reports may arrive late and in a batch (after an outage of
// the coordinator), so each claims the time between it and the one before by the clock of its own
// host, and never more than is pending.
//
// A restart from step R throws away what was trained above R. How much that was is read off a curve
// of productive time by step; it has at most kMostPoints points, and every other one goes when it
// is full, so that it costs the same for a job of any length.

#include "coordinator/jobs/goodput.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

namespace ravel::coordinator {
namespace {

constexpr size_t kMostPoints = 128;
constexpr size_t kMostStoredPoints = 32;
constexpr double kMostStepSeconds = 1e6;

bool IsTraining(DeviceUse use) {
  return use == DeviceUse::kTraining || use == DeviceUse::kReshaping ||
         use == DeviceUse::kFinishing;
}

// Halves the points of a curve, keeping its ends.
void Thin(std::vector<std::pair<int64_t, int64_t>>& curve) {
  size_t kept = 0;
  for (size_t i = 0; i < curve.size(); ++i) {
    if (i % 2 == 0 || i + 1 == curve.size()) {
      curve[kept++] = curve[i];
    }
  }
  curve.resize(kept);
}

// What the time of devices was that did not end in a report, by what came after it.
DeviceTime Unreported(DeviceUse use, DeviceUse next) {
  if (use == DeviceUse::kStarting) {
    return DeviceTime::kStart;
  }
  if (next == DeviceUse::kDraining) {
    return DeviceTime::kDetect;
  }
  if (next == DeviceUse::kStopping) {
    return DeviceTime::kDrain;
  }
  return use == DeviceUse::kReshaping   ? DeviceTime::kReshape
         : use == DeviceUse::kFinishing ? DeviceTime::kCheckpointStall
                                        : DeviceTime::kDetect;
}

constexpr int64_t kMostDeviceUs = int64_t{1} << 60;  // 36,000 years of a device

// "a:1 b:2"
std::vector<std::pair<std::string, int64_t>> ParsePairs(const std::string& text) {
  std::vector<std::pair<std::string, int64_t>> pairs;
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits(':', 1));
    int64_t value = 0;
    if (absl::SimpleAtoi(parts.second, &value)) {
      pairs.emplace_back(parts.first, value);
    }
  }
  return pairs;
}

}  // namespace

std::string_view DeviceTimeName(DeviceTime time) {
  static constexpr std::string_view kNames[kDeviceTimes] = {"productive",
                                                            "replay",
                                                            "skipped_step",
                                                            "evaluation",
                                                            "checkpoint_stall",
                                                            "idle",
                                                            "detect",
                                                            "drain",
                                                            "reshape",
                                                            "start",
                                                            "restore"};
  return kNames[static_cast<size_t>(time)];
}

void Goodput::Settle(DeviceTime time) {
  Add(time, pending_us_);
  pending_us_ = 0;
}

void Goodput::Observe(int64_t now_ms, int64_t devices, DeviceUse use) {
  const int64_t passed_us = std::max<int64_t>(now_ms - since_ms_, 0) * 1000 * devices_;
  held_us_ += passed_us;
  pending_us_ += passed_us;
  if (!IsTraining(use_) && use_ != DeviceUse::kStarting) {
    Settle(DeviceTime::kDrain);  // kNone holds nothing
  } else if (use != use_ && !(IsTraining(use_) && IsTraining(use))) {
    // A start that went well was settled by Ready, but for the moments since then.
    Settle(Unreported(use_, use));
  }
  since_ms_ = now_ms;
  devices_ = devices;
  use_ = use;
}

void Goodput::Restart(int64_t step) {
  const int64_t kept_us = ProductiveAt(step);
  int64_t& productive_us = times_[static_cast<size_t>(DeviceTime::kProductive)];
  Add(DeviceTime::kReplay, productive_us - kept_us);
  productive_us = kept_us;
  std::erase_if(curve_, [step](const auto& point) { return point.first >= step; });
  curve_.emplace_back(step, kept_us);
  last_step_ = step;
  last_time_ms_ = 0;
  save_step_ = -1;
}

void Goodput::Ready(double restore_seconds, int64_t wall_ms) {
  const double seconds = std::clamp(restore_seconds, 0.0, kMostStepSeconds);
  const int64_t restore_us =
      std::min(static_cast<int64_t>(std::llround(seconds * 1e6)) * devices_, pending_us_);
  Add(DeviceTime::kRestore, restore_us);
  pending_us_ -= restore_us;
  Settle(DeviceTime::kStart);
  last_time_ms_ = wall_ms;
}

void Goodput::Report(const TrainedStep& step) {
  if (step.step <= last_step_) {
    return;
  }
  const int64_t steps = last_step_ < 0 ? step.step : step.step - last_step_;  // logEvery
  const double seconds = step.seconds > 0 ? std::min(step.seconds, kMostStepSeconds) : 0;
  const auto step_us = static_cast<int64_t>(
      std::min(std::round(seconds * 1e6) * static_cast<double>(steps), kMostStepSeconds * 1e6));
  const int64_t between_us = last_time_ms_ > 0 ? (step.time_ms - last_time_ms_) * 1000 : 0;
  const int64_t claimed_us =
      std::min(std::max(between_us, step_us) * std::max<int64_t>(devices_, 1), pending_us_);
  const int64_t trained_us = std::min(step_us * devices_, claimed_us);
  const int64_t skipped_us = step.skipped ? trained_us / steps : 0;
  const bool saved = save_step_ >= last_step_ && save_step_ < step.step && save_step_ >= 0;
  Add(DeviceTime::kProductive, trained_us - skipped_us);
  Add(DeviceTime::kSkippedStep, skipped_us);
  Add(step.evaluated ? DeviceTime::kEvaluation
      : saved        ? DeviceTime::kCheckpointStall
                     : DeviceTime::kIdle,
      claimed_us - trained_us);
  pending_us_ -= claimed_us;
  last_step_ = step.step;
  last_time_ms_ = step.time_ms;
  if (curve_.size() >= kMostPoints) {
    Thin(curve_);
  }
  curve_.emplace_back(step.step, times_[static_cast<size_t>(DeviceTime::kProductive)]);
}

int64_t Goodput::ProductiveAt(int64_t step) const {
  const auto above =
      std::lower_bound(curve_.begin(), curve_.end(), step, [](const auto& point, int64_t at) {
        return point.first < at;
      });
  if (above == curve_.end()) {  // nothing above it was reported
    return times_[static_cast<size_t>(DeviceTime::kProductive)];
  }
  const std::pair<int64_t, int64_t> below =
      above == curve_.begin() ? std::pair<int64_t, int64_t>{0, 0} : *std::prev(above);
  if (above->first <= below.first || step <= below.first) {
    return step >= above->first ? above->second : below.second;
  }
  const double part =
      static_cast<double>(step - below.first) / static_cast<double>(above->first - below.first);
  return below.second + std::llround(part * static_cast<double>(above->second - below.second));
}

double Goodput::Ratio() const {
  const auto productive = static_cast<double>(times_[static_cast<size_t>(DeviceTime::kProductive)]);
  return accounted_us() > 0 ? productive / static_cast<double>(accounted_us()) : -1;
}

GoodputRow Goodput::Row(const std::string& job_uid, int64_t wall_ms) const {
  GoodputRow row = {.job_uid = job_uid,
                    .pending_us = pending_us_,
                    .devices = devices_,
                    .wall_ms = wall_ms,
                    .last_step = last_step_,
                    .last_time_ms = last_time_ms_};
  for (size_t i = 0; i < kDeviceTimes; ++i) {
    const std::string_view name = DeviceTimeName(static_cast<DeviceTime>(i));
    if (times_[i] != 0) {
      absl::StrAppend(&row.times,
                      row.times.empty() ? "" : " ",
                      absl::string_view(name.data(), name.size()),
                      ":",
                      times_[i]);
    }
  }
  std::vector<std::pair<int64_t, int64_t>> curve = curve_;
  while (curve.size() > kMostStoredPoints) {
    Thin(curve);
  }
  for (const auto& [step, productive_us] : curve) {
    absl::StrAppend(&row.curve, row.curve.empty() ? "" : " ", step, ":", productive_us);
  }
  return row;
}

void Goodput::Load(const GoodputRow& row, int64_t now_ms, int64_t wall_ms, DeviceUse use) {
  times_ = {};
  curve_.clear();
  held_us_ = 0;
  for (const auto& [name, device_us] : ParsePairs(row.times)) {
    // A newer release's entry counts as one that is known, so that nothing is lost.
    DeviceTime time = DeviceTime::kIdle;
    for (size_t i = 0; i < kDeviceTimes; ++i) {
      const std::string_view known = DeviceTimeName(static_cast<DeviceTime>(i));
      time = known == name ? static_cast<DeviceTime>(i) : time;
    }
    // A row that is not ours adds up to nothing that overflows.
    const int64_t added = std::clamp<int64_t>(device_us, 0, kMostDeviceUs - held_us_);
    Add(time, added);
    held_us_ += added;
  }
  for (const auto& [text, productive_us] : ParsePairs(row.curve)) {
    int64_t step = 0;
    if (absl::SimpleAtoi(text, &step) && step >= 0 && productive_us >= 0 &&
        productive_us <= kMostDeviceUs) {
      curve_.emplace_back(step, productive_us);
    }
  }
  std::sort(curve_.begin(), curve_.end());
  // A job that is over holds none any more, whatever its last row says.
  devices_ = use == DeviceUse::kNone ? 0 : row.devices;
  use_ = devices_ > 0 ? use : DeviceUse::kNone;
  pending_us_ = row.pending_us + std::max<int64_t>(wall_ms - row.wall_ms, 0) * 1000 * devices_;
  held_us_ += pending_us_;
  if (devices_ == 0) {
    Settle(DeviceTime::kDrain);
  }
  since_ms_ = now_ms;
  last_step_ = row.last_step;
  last_time_ms_ = row.last_time_ms;
}

}  // namespace ravel::coordinator
