#pragma once

// Trainers' output, kept per job, attempt and rank, so that logs of dead nodes and earlier attempts
// stay. DIRECTORY/<job uid>/attempt-<A>/rank-<R>.log and, when that is full, rank-<R>.1.log and so
// on; a line each: seq, time, node, text, separated by tabs.

#include <cstdint>
#include <map>
#include <memory>
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

// No daemon comes near it; a number above is a fault, of its sender or of the disk.
inline constexpr int64_t kMaxLogSeq = int64_t{1} << 60;

struct LogFile {
  int64_t attempt = 0;
  int64_t rank = 0;
  int64_t part = 0;
  int64_t bytes = 0;
  std::string path;
};

// A job's files in DIRECTORY, by attempt, rank and part. rank -1: all; attempt 0: all.
std::vector<LogFile> ListLogFiles(const std::string& directory,
                                  const std::string& job_uid,
                                  int64_t attempt,
                                  int64_t rank);
// False: it is no stored line.
bool ParseLogLine(std::string_view stored, LogLine& line);

struct LogLimits {
  int64_t job_bytes = 256LL << 20;  // of all attempts and ranks; the oldest parts are dropped
  int64_t part_bytes = 16LL << 20;
};

// The one writer. Used from one thread.
class LogStore {
 public:
  explicit LogStore(std::string directory, LogLimits limits = {});
  ~LogStore();

  // Lines of one (attempt, rank) of a job. Lines that were stored before (by seq: a daemon sends
  // again after a broken stream) are left out; a gap becomes a line that says how much is missing,
  // and so does what had to be dropped for the job's limit. Returns the lines that were new.
  absl::StatusOr<std::vector<LogLine>> Append(const std::string& job_uid,
                                              std::vector<LogLine> lines);
  // Everything of a filter, by attempt, then time; see LogReader for what may be long.
  std::vector<LogLine> Read(const std::string& job_uid, int64_t attempt, int64_t rank) const;
  // Closes the files of a job that is over.
  void Close(const std::string& job_uid);
  const std::string& directory() const { return directory_; }
  // Deletes what there is of a job that is gone.
  void Remove(const std::string& job_uid);

 private:
  static constexpr size_t kMaxOpen = 256;
  struct Source {
    std::string job_uid;
    std::string folder;
    int64_t rank = 0;
    int64_t next_seq = 0;
    int64_t part = 0;
    int64_t part_bytes = 0;
    int file = -1;
    int64_t used = 0;
  };
  absl::StatusOr<Source*> Find(const std::string& job_uid, int64_t attempt, int64_t rank);
  absl::Status Open(Source& source);
  absl::Status Write(Source& source, const std::string& text);
  // Drops the oldest parts of a job that is above its limit, but not `kept`; true if it did.
  bool DropOldest(const std::string& job_uid, const std::string& kept);

  const std::string directory_;
  const LogLimits limits_;
  std::map<std::string, Source> sources_;  // by folder and rank
  std::map<std::string, int64_t> job_bytes_;
  int64_t appends_ = 0;
};

}  // namespace ravel::coordinator
