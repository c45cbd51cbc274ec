// Reads a job's step records without holding them. A job that went back to a checkpoint writes some
// steps again, so the file is cut into stretches of rising steps, and of a step that occurs twice
// the later one counts: stretches are visited from the newest back, each limited to steps before
// those already covered. The index has a mark per block, so a range of steps starts near its first
// line. Only the number in front of a line is parsed until the step is wanted.

#include "coordinator/store/metrics_history.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "coordinator/store/line_file.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kManyLines = 64;  // torn lines at the end of a file are few

}  // namespace

int64_t StepOfLine(std::string_view line) {
  constexpr std::string_view kStart = "{\"step\":";
  int64_t step = -1;
  if (line.starts_with(kStart) && line.ends_with('}')) {
    const char* end = line.data() + line.size();
    const auto [rest, error] = std::from_chars(line.data() + kStart.size(), end, step);
    if (error == std::errc() && rest != end && (*rest == ',' || *rest == '}')) {
      return step;
    }
  }
  const absl::StatusOr<StepRecord> record = ParseStepRecord(line);
  return record.ok() ? record->step : -1;
}

MetricsReader::MetricsReader(std::string path,
                             const std::vector<MetricsStretch>& stretches,
                             int64_t end,
                             StepRange range)
    : path_(std::move(path)), range_(range), tail_(end) {
  if (range_.last > 0 && !stretches.empty()) {
    range_.from = std::max(range_.from, stretches.back().last_step - range_.last + 1);
  }
  int64_t replaced = INT64_MAX;  // first step that a later stretch has again
  for (auto stretch = stretches.rbegin(); stretch != stretches.rend(); ++stretch) {
    const int64_t to = range_.all ? range_.to : std::min(range_.to, replaced - 1);
    replaced = std::min(replaced, stretch->first_step);
    if (stretch->first_step > to || stretch->last_step < range_.from) {
      continue;
    }
    const auto mark = std::upper_bound(
        stretch->marks.begin(), stretch->marks.end(), std::make_pair(range_.from, INT64_MAX));
    const int64_t begin = mark == stretch->marks.begin() ? stretch->begin : std::prev(mark)->second;
    spans_.push_back({begin, stretch->end, to});  // the oldest ends up last
  }
}

bool MetricsReader::Wants(int64_t step) const {
  return step >= range_.from && step <= range_.to &&
         (range_.every <= 1 || step % range_.every == 0);
}

absl::StatusOr<int64_t> MetricsReader::Read(const Span& span,
                                            std::vector<StepRecord>& records) const {
  return ReadLines(
      path_, span.begin, span.end, kLineBlockBytes, [&](std::string_view line, int64_t) {
        const int64_t step = StepOfLine(line);
        if (step <= span.to && step >= 0 && Wants(step)) {
          absl::StatusOr<StepRecord> record = ParseStepRecord(line);
          if (record.ok()) {
            records.push_back(*std::move(record));
          }
        }
        return true;
      });
}

absl::StatusOr<std::vector<StepRecord>> MetricsReader::Next() {
  std::vector<StepRecord> records;
  while (records.empty() && !spans_.empty()) {
    Span& span = spans_.back();
    ASSIGN_OR_RETURN(const int64_t behind, Read(span, records));
    const bool stuck = behind == span.begin;
    span.begin = behind;
    if (stuck || span.begin >= span.end || (!records.empty() && records.back().step >= span.to)) {
      spans_.pop_back();
    }
  }
  if (records.empty()) {
    int64_t before = -1;
    while (records.empty() && tail_ != before) {
      before = tail_;
      ASSIGN_OR_RETURN(tail_, Read({tail_, FileSize(path_), INT64_MAX}, records));
    }
  }
  return records;
}

MetricsHistory::MetricsHistory(std::string directory) : directory_(std::move(directory)) {}

absl::Status MetricsHistory::Extend(const std::string& path, Index& index) {
  const int64_t size = FileSize(path);
  if (size < index.end) {  // another file under the same name
    index.end = 0;
    index.stretches.clear();
  }
  int64_t begin = index.end;
  const auto note = [&index, &begin](std::string_view line, int64_t behind) {
    const int64_t at = std::exchange(begin, behind);
    const int64_t step = StepOfLine(line);
    if (step < 0) {
      return true;
    }
    if (index.stretches.empty() || step <= index.stretches.back().last_step) {
      index.stretches.push_back({at, behind, step, step, {{step, at}}});
    }
    MetricsStretch& stretch = index.stretches.back();
    stretch.end = behind;
    stretch.last_step = step;
    if (at - stretch.marks.back().second >= kLineBlockBytes) {
      stretch.marks.emplace_back(step, at);
    }
    return true;
  };
  ASSIGN_OR_RETURN(index.end, ReadLines(path, index.end, size, size, note));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<MetricsReader>> MetricsHistory::Open(const std::string& job_uid,
                                                                    StepRange range) {
  std::shared_ptr<Index> index;  // shared with other readers of the job
  {
    MutexLock lock(mutex_);
    if (indices_.size() >= kMaxIndices && !indices_.contains(job_uid)) {
      indices_.erase(indices_.begin());
    }
    std::shared_ptr<Index>& known = indices_[job_uid];
    if (known == nullptr) {
      known = std::make_shared<Index>();
    }
    index = known;
  }
  const std::string path = absl::StrCat(directory_, "/", job_uid, ".jsonl");
  MutexLock lock(index->mutex);
  RETURN_IF_ERROR(Extend(path, *index));
  return std::make_unique<MetricsReader>(path, index->stretches, index->end, range);
}

void MetricsHistory::Forget(const std::string& job_uid) {
  MutexLock lock(mutex_);
  indices_.erase(job_uid);
}

absl::StatusOr<std::optional<MetricsEnds>> ReadMetricsEnds(const std::string& path) {
  const int64_t size = FileSize(path);
  std::optional<MetricsEnds> ends;
  const auto take_first = [&ends](std::string_view line, int64_t) {
    absl::StatusOr<StepRecord> record = ParseStepRecord(line);
    if (record.ok()) {
      ends = MetricsEnds{*record, *record};
    }
    return !ends.has_value();
  };
  ASSIGN_OR_RETURN(const int64_t behind, ReadLines(path, 0, size, 1, take_first));
  if (!ends) {  // torn lines come first
    RETURN_IF_ERROR(ReadLines(path, behind, size, size, take_first).status());
  }
  bool found = !ends.has_value();
  const auto take_last = [&ends, &found](std::string_view line, int64_t) {
    absl::StatusOr<StepRecord> record = ParseStepRecord(line);
    if (record.ok()) {
      ends->last = *std::move(record);
      found = true;
    }
    return true;
  };
  for (int64_t lines = 1; !found && lines <= kManyLines; lines *= 8) {
    ASSIGN_OR_RETURN(const int64_t begin, OffsetOfLastLines(path, size, lines));
    RETURN_IF_ERROR(ReadLines(path, begin, size, size - begin, take_last).status());
  }
  return ends;
}

}  // namespace ravel::coordinator
