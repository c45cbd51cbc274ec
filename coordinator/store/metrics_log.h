#pragma once

// Per-step records of a job: one JSON object per line, appended and handed to the kernel before the
// step counts as reported. On disk: names are never reused.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/step_record.h"

namespace ravel::coordinator {

// Returns the final history: a record of a step replaces the earlier records of that step and of
// all later steps.
std::vector<StepRecord> SurvivingHistory(const std::vector<StepRecord>& all);

struct MetricsEnds {
  StepRecord first;
  StepRecord last;
};

// DIRECTORY/<job uid>.jsonl. Used from one thread.
class MetricsLog {
 public:
  explicit MetricsLog(std::string directory);
  ~MetricsLog();

  absl::Status Append(const std::string& job_uid, const StepRecord& record);
  // Everything, in the order of arrival; a torn last line (a crash in the middle of an append) is
  // left out. A job without records has an empty history.
  absl::StatusOr<std::vector<StepRecord>> Read(const std::string& job_uid) const;
  // First and last record of a job's file, without reading all of it; nullopt without records.
  absl::StatusOr<std::optional<MetricsEnds>> Ends(const std::string& job_uid) const;
  // Closes the file of a job that is over.
  void Close(const std::string& job_uid);
  // Deletes what there is of a job that is gone.
  void Remove(const std::string& job_uid);

 private:
  absl::StatusOr<int> Open(const std::string& job_uid);
  std::string PathOf(const std::string& job_uid) const;

  std::string directory_;
  struct File {
    int descriptor = -1;
    int64_t used = 0;  // the newest Append, counted
  };
  static constexpr size_t kMaxOpen = 256;
  std::map<std::string, File> files_;  // by job
  int64_t appends_ = 0;
};

}  // namespace ravel::coordinator
