// Merges the log files of many ranks by time with bounded memory. Each rank's parts form a chain
// that is read through a small buffer; the merge takes the smallest head, attempt by attempt. With
// a tail limit the positions of each rank's last lines are found from the end of its files first,
// so that showing the last lines costs the same for long logs. After the history, appended lines
// are read file by file as they come.

#include "coordinator/store/log_reader.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/check.h"
#include "coordinator/store/line_file.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kBufferBytes = 256 << 10;  // of all chains together

auto Order(const LogLine& line) {
  return std::tie(line.time_ms, line.rank, line.seq);
}

}  // namespace

LogReader::LogReader(std::string directory, std::string job_uid, LogFilter filter)
    : directory_(std::move(directory)), job_uid_(std::move(job_uid)), filter_(filter) {
  CHECK_LE(filter_.tail, LogFilter::kMaxTail);
  files_ = ListLogFiles(directory_, job_uid_, filter_.attempt, filter_.rank);
  for (const LogFile& file : files_) {
    read_[file.path] = 0;
  }
}

absl::Status LogReader::BeginAttempt() {
  const int64_t attempt = files_.front().attempt;
  while (!files_.empty() && files_.front().attempt == attempt) {
    LogFile file = std::move(files_.front());
    files_.erase(files_.begin());
    if (chains_.empty() || chains_.back().parts.front().rank != file.rank) {
      chains_.emplace_back();
    }
    chains_.back().parts.push_back(std::move(file));
  }
  refill_bytes_ =
      std::clamp<int64_t>(kBufferBytes / static_cast<int64_t>(chains_.size()), 1024, kBlockBytes);
  for (Chain& chain : chains_) {
    std::reverse(chain.parts.begin(), chain.parts.end());
    chain.offset = begin_[chain.parts.back().path];
    RETURN_IF_ERROR(Refill(chain));
  }
  return absl::OkStatus();
}

absl::Status LogReader::Refill(Chain& chain) {
  while (chain.lines.empty() && !chain.parts.empty()) {
    const LogFile& part = chain.parts.back();
    const auto take = [&](std::string_view stored, int64_t) {
      LogLine line;
      line.attempt = part.attempt;
      line.rank = part.rank;
      if (ParseLogLine(stored, line) && Wants(line)) {
        chain.lines.push_back(std::move(line));
      }
      return true;
    };
    ASSIGN_OR_RETURN(const int64_t behind,
                     ReadLines(part.path, chain.offset, part.bytes, refill_bytes_, take));
    const bool over = behind == chain.offset || behind >= part.bytes;
    chain.offset = behind;
    read_[part.path] = behind;
    if (over) {
      chain.parts.pop_back();
      chain.offset = chain.parts.empty() ? 0 : begin_[chain.parts.back().path];
    }
  }
  std::reverse(chain.lines.begin(), chain.lines.end());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<LogLine>> LogReader::NextOfHistory() {
  std::vector<LogLine> lines;
  int64_t bytes = 0;
  while (bytes < kBlockBytes) {
    std::erase_if(chains_, [](const Chain& chain) { return chain.lines.empty(); });
    if (chains_.empty()) {
      if (!lines.empty() || files_.empty()) {
        break;
      }
      RETURN_IF_ERROR(BeginAttempt());
      continue;
    }
    const auto next =
        std::min_element(chains_.begin(), chains_.end(), [](const Chain& a, const Chain& b) {
          return Order(a.lines.back()) < Order(b.lines.back());
        });
    bytes += static_cast<int64_t>(next->lines.back().text.size()) + 64;
    lines.push_back(std::move(next->lines.back()));
    next->lines.pop_back();
    if (next->lines.empty()) {
      RETURN_IF_ERROR(Refill(*next));
    }
  }
  return lines;
}

absl::StatusOr<std::vector<LogLine>> LogReader::NextOfTail() {
  std::vector<LogLine> lines;
  int64_t bytes = 0;
  for (const LogFile& file : ListLogFiles(directory_, job_uid_, filter_.attempt, filter_.rank)) {
    int64_t& read = read_[file.path];
    const auto take = [&](std::string_view stored, int64_t) {
      LogLine line;
      line.attempt = file.attempt;
      line.rank = file.rank;
      if (ParseLogLine(stored, line) && Wants(line)) {
        bytes += static_cast<int64_t>(stored.size());
        lines.push_back(std::move(line));
      }
      return bytes < kBlockBytes;
    };
    if (read < file.bytes && bytes < kBlockBytes) {
      ASSIGN_OR_RETURN(read, ReadLines(file.path, read, file.bytes, kBlockBytes, take));
    }
  }
  return lines;
}

// Each rank gives at most `tail` lines, and of these the merge drops the first ones.
absl::Status LogReader::CutToTail() {
  std::map<std::pair<int64_t, int64_t>, std::vector<LogFile*>> ranks;
  for (LogFile& file : files_) {
    ranks[{file.attempt, file.rank}].push_back(&file);
  }
  // (time, attempt, rank): where each of the newest lines lies.
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, const LogFile*>> newest;
  for (const auto& [key, parts] : ranks) {
    int64_t left = filter_.tail;
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      LogFile& file = **part;
      int64_t begin = file.bytes;
      if (left > 0) {
        ASSIGN_OR_RETURN(begin, OffsetOfLastLines(file.path, file.bytes, left));
      }
      int64_t at = begin;
      const auto note = [&](std::string_view stored, int64_t behind) {
        LogLine line;
        if (ParseLogLine(stored, line) && Wants(line)) {
          newest.emplace_back(file.attempt, line.time_ms, file.rank, at, &file);
          --left;
        }
        at = behind;
        return true;
      };
      RETURN_IF_ERROR(ReadLines(file.path, begin, file.bytes, file.bytes, note).status());
    }
    std::sort(newest.begin(), newest.end());
    if (newest.size() > static_cast<size_t>(filter_.tail)) {
      newest.erase(newest.begin(), newest.end() - filter_.tail);
    }
  }
  for (const LogFile& file : files_) {
    begin_[file.path] = read_[file.path] = file.bytes;
  }
  for (const auto& [attempt, time_ms, rank, at, file] : newest) {
    begin_[file->path] = std::min(begin_[file->path], at);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<LogLine>> LogReader::Next() {
  if (filter_.tail > 0) {
    RETURN_IF_ERROR(CutToTail());
    filter_.tail = 0;
  }
  ASSIGN_OR_RETURN(std::vector<LogLine> lines, NextOfHistory());
  if (!lines.empty()) {
    return lines;
  }
  return NextOfTail();
}

}  // namespace ravel::coordinator
