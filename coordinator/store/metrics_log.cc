#include "coordinator/store/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/json.h"
#include "coordinator/store/metrics_history.h"

namespace ravel::coordinator {

std::vector<StepRecord> SurvivingHistory(const std::vector<StepRecord>& all) {
  std::vector<StepRecord> kept;
  for (const StepRecord& record : all) {
    while (!kept.empty() && kept.back().step >= record.step) {
      kept.pop_back();
    }
    kept.push_back(record);
  }
  return kept;
}

MetricsLog::MetricsLog(std::string directory) : directory_(std::move(directory)) {}

MetricsLog::~MetricsLog() {
  for (const auto& [uid, file] : files_) {
    close(file.descriptor);
  }
}

std::string MetricsLog::PathOf(const std::string& job_uid) const {
  return absl::StrCat(directory_, "/", job_uid, ".jsonl");
}

absl::StatusOr<int> MetricsLog::Open(const std::string& job_uid) {
  const auto found = files_.find(job_uid);
  if (found != files_.end()) {
    found->second.used = ++appends_;
    return found->second.descriptor;
  }
  if (files_.size() >= kMaxOpen) {
    const auto oldest =
        std::min_element(files_.begin(), files_.end(), [](const auto& a, const auto& b) {
          return a.second.used < b.second.used;
        });
    close(oldest->second.descriptor);
    files_.erase(oldest);
  }
  const std::string path = PathOf(job_uid);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (file < 0) {
    return ErrnoStatus(errno, path);
  }
  struct stat facts = {};
  char last = '\n';
  if (fstat(file, &facts) == 0 && facts.st_size > 0 &&
      pread(file, &last, 1, facts.st_size - 1) == 1 && last != '\n') {
    if (write(file, "\n", 1) != 1) {  // the line that a crash tore stays torn, and alone
      close(file);
      return ErrnoStatus(errno, path);
    }
  }
  files_[job_uid] = {file, ++appends_};
  return file;
}

absl::Status MetricsLog::Append(const std::string& job_uid, const StepRecord& record) {
  ASSIGN_OR_RETURN(const int file, Open(job_uid));
  const std::string line = json::Serialize(StepRecordJson(record)) + "\n";
  const ssize_t written = write(file, line.data(), line.size());  // O_APPEND: one write is one line
  if (written != static_cast<ssize_t>(line.size())) {
    return written < 0
               ? ErrnoStatus(errno, PathOf(job_uid))
               : absl::ResourceExhaustedError(absl::StrCat(PathOf(job_uid), ": short write"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StepRecord>> MetricsLog::Read(const std::string& job_uid) const {
  std::vector<StepRecord> records;
  std::ifstream input(PathOf(job_uid));
  std::string line;
  while (std::getline(input, line)) {
    absl::StatusOr<StepRecord> record = ParseStepRecord(line);
    if (record.ok()) {
      records.push_back(*std::move(record));
    }
  }
  return records;
}

absl::StatusOr<std::optional<MetricsEnds>> MetricsLog::Ends(const std::string& job_uid) const {
  return ReadMetricsEnds(PathOf(job_uid));
}

void MetricsLog::Close(const std::string& job_uid) {
  const auto found = files_.find(job_uid);
  if (found != files_.end()) {
    close(found->second.descriptor);
    files_.erase(found);
  }
}

void MetricsLog::Remove(const std::string& job_uid) {
  Close(job_uid);
  unlink(PathOf(job_uid).c_str());
}

}  // namespace ravel::coordinator
