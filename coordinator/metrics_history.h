#pragma once

// Reading of step records by range: an index of each file says where its stretches of rising steps
// lie, so that neither the whole file nor its records are ever in memory.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "coordinator/metrics_log.h"

namespace ravel::coordinator {

struct StepRange {
  int64_t from = 0;
  int64_t to = INT64_MAX;  // inclusive
  int64_t every = 1;       // only steps that it divides
  int64_t last = 0;        // > 0: only that many steps up to the newest
  bool all = false;        // also records that a later restart replaced
};

// A stretch of a file in which each step is above the one before.
struct MetricsStretch {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_step = 0;
  int64_t last_step = 0;
  // About every kLineBlockBytes: the step of the line that begins there.
  std::vector<std::pair<int64_t, int64_t>> marks;  // step, offset
};

// One pass over the records of a range, oldest first, and then over what is appended. Not
// thread-safe; may be used from one thread after another.
class MetricsReader {
 public:
  MetricsReader(std::string path,
                const std::vector<MetricsStretch>& stretches,
                int64_t end,
                StepRange range);
  // The next records, of about kLineBlockBytes of the file; none: nothing more at present.
  absl::StatusOr<std::vector<StepRecord>> Next();

 private:
  struct Span {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t to = 0;
  };
  bool Wants(int64_t step) const;
  absl::StatusOr<int64_t> Read(const Span& span, std::vector<StepRecord>& records) const;

  std::string path_;
  StepRange range_;
  std::vector<Span> spans_;  // what was there at first; the last one is next
  int64_t tail_ = 0;         // what is appended
};

// DIRECTORY/<job uid>.jsonl, which a MetricsLog writes. Thread-safe.
class MetricsHistory {
 public:
  explicit MetricsHistory(std::string directory);
  // Reads through what the file has gained since the last time.
  absl::StatusOr<std::unique_ptr<MetricsReader>> Open(const std::string& job_uid, StepRange range);
  void Forget(const std::string& job_uid);

 private:
  static constexpr size_t kMaxIndices = 64;
  struct Index {
    Mutex mutex;
    int64_t end ABSL_GUARDED_BY(mutex) = 0;
    std::vector<MetricsStretch> stretches ABSL_GUARDED_BY(mutex);
  };
  static absl::Status Extend(const std::string& path, Index& index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(index.mutex);

  const std::string directory_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Index>> indices_ ABSL_GUARDED_BY(mutex_);
};

// The number of a line's step without reading the rest of it; -1: it is no record.
int64_t StepOfLine(std::string_view line);

// The first and the last record of a file, from its ends only; empty without records.
absl::StatusOr<std::optional<MetricsEnds>> ReadMetricsEnds(const std::string& path);

}  // namespace ravel::coordinator
