#pragma once

// One pass over a job's log files, in bounded blocks: what is there, merged by attempt and time,
// and then what is appended.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/log_store.h"

namespace ravel::coordinator {

struct LogFilter {
  int64_t attempt = 0;   // 0: all
  int64_t rank = -1;     // -1: all
  int64_t since_ms = 0;  // wall time of a line
  int64_t tail = 0;      // > 0: only that many lines of what is there, at most kMaxTail
  static constexpr int64_t kMaxTail = 10'000;
};

// Not thread-safe; may be used from one thread after another.
class LogReader {
 public:
  LogReader(std::string directory, std::string job_uid, LogFilter filter);
  // The next lines, about kBlockBytes of them; none: nothing more at present.
  absl::StatusOr<std::vector<LogLine>> Next();

  static constexpr int64_t kBlockBytes = 64 << 10;

 private:
  // The parts of one rank in one attempt, read one after the other.
  struct Chain {
    std::vector<LogFile> parts;  // the last one is next
    int64_t offset = 0;          // in parts.back()
    std::vector<LogLine> lines;  // read, the last one is next
  };
  // Fills chains_ from the oldest attempt that is left.
  absl::Status BeginAttempt();
  absl::Status Refill(Chain& chain);
  absl::StatusOr<std::vector<LogLine>> NextOfHistory();
  absl::StatusOr<std::vector<LogLine>> NextOfTail();
  absl::Status CutToTail();
  bool Wants(const LogLine& line) const { return line.time_ms >= filter_.since_ms; }

  const std::string directory_;
  const std::string job_uid_;
  LogFilter filter_;
  std::vector<LogFile> files_;            // of attempts that were not begun
  std::map<std::string, int64_t> read_;   // how far, by path
  std::map<std::string, int64_t> begin_;  // where the tail begins, by path
  std::vector<Chain> chains_;
  int64_t refill_bytes_ = kBlockBytes;
};

}  // namespace ravel::coordinator
