#pragma once

// Trainers' output, kept per job, attempt and rank, so that logs of dead nodes and earlier attempts
// stay. DIRECTORY/<job uid>/attempt-<A>/rank-<R>.log, a line each: seq, time, node, text, separated
// by tabs.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel::coordinator {

struct LogLine {
  int64_t seq = 0;
  int64_t time_ms = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  std::string node;
  std::string text;
};

// Used only from the controller's strand.
class LogStore {
 public:
  explicit LogStore(std::string directory);

  // Lines of one (attempt, rank) of a job. Lines that were stored before (by seq: a daemon sends
  // again after a broken stream) are left out; a gap becomes a line that says how much is missing.
  // Returns the lines that were new. Above kMaxJobBytes lines are dropped, which is said once.
  absl::StatusOr<std::vector<LogLine>> Append(const std::string& job_uid,
                                              std::vector<LogLine> lines);
  // rank -1: all; attempt 0: all. By attempt, then time.
  std::vector<LogLine> Read(const std::string& job_uid, int64_t attempt, int64_t rank) const;

  // Deletes what there is of a job that is gone.
  void Remove(const std::string& job_uid);

  static constexpr int64_t kMaxJobBytes = 256LL << 20;

 private:
  struct Source {
    int64_t next_seq = 0;
  };
  std::string PathOf(const std::string& job_uid, int64_t attempt, int64_t rank) const;

  std::string directory_;
  std::map<std::string, Source> sources_;  // by path
  std::map<std::string, int64_t> job_bytes_;
};

}  // namespace ravel::coordinator
