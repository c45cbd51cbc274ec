#include "coordinator/metrics_log.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <fstream>
#include <limits>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/json.h"
#include "coordinator/metrics_history.h"

namespace ravel::coordinator {
namespace {

std::string Bits(float value) {
  return absl::StrFormat("%08x", std::bit_cast<uint32_t>(value));
}

float FloatOf(const json::Value& object, std::string_view name, std::string_view bits_name) {
  const json::Value* bits = object.Find(bits_name);
  uint32_t pattern = 0;
  if (bits != nullptr && bits->is_string() && absl::SimpleHexAtoi(bits->AsString(), &pattern)) {
    return std::bit_cast<float>(pattern);
  }
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_number() ? static_cast<float>(value->AsDouble())
                                                : std::numeric_limits<float>::quiet_NaN();
}

double DoubleOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_number() ? value->AsDouble()
                                                : std::numeric_limits<double>::quiet_NaN();
}

int64_t IntOf(const json::Value& object, std::string_view name) {
  const json::Value* value = object.Find(name);
  return value != nullptr && value->is_int() ? value->AsInt() : 0;
}

}  // namespace

std::string FormatStepRecord(const StepRecord& record) {
  json::Value line;
  line.Set("step", record.step);
  line.Set("loss", json::Value::FromFloat(record.loss));
  line.Set("loss_bits", Bits(record.loss));
  line.Set("grad_norm", record.grad_norm);
  line.Set("lr", record.lr);
  line.Set("tokens", record.tokens);
  line.Set("tokens_per_second", record.tokens_per_second);
  line.Set("step_seconds", record.step_seconds);
  line.Set("world_size", record.world_size);
  line.Set("epoch", record.epoch);
  line.Set("attempt", record.attempt);
  line.Set("time_ms", record.time_ms);
  line.Set("planned_bytes", record.planned_bytes);
  line.Set("measured_bytes", record.measured_bytes);
  if (record.skipped) {
    line.Set("skipped", true);
  }
  if (record.has_validation_loss) {
    line.Set("validation_loss", json::Value::FromFloat(record.validation_loss));
    line.Set("validation_loss_bits", Bits(record.validation_loss));
  }
  return json::Serialize(line);
}

absl::StatusOr<StepRecord> ParseStepRecord(std::string_view text) {
  ASSIGN_OR_RETURN(const json::Value line, json::Parse(text));
  if (!line.is_object() || line.Find("step") == nullptr) {
    return absl::DataLossError("a metrics line must be an object with `step`");
  }
  StepRecord record;
  record.step = IntOf(line, "step");
  record.loss = FloatOf(line, "loss", "loss_bits");
  record.grad_norm = DoubleOf(line, "grad_norm");
  record.lr = DoubleOf(line, "lr");
  record.tokens = IntOf(line, "tokens");
  record.tokens_per_second = DoubleOf(line, "tokens_per_second");
  record.step_seconds = DoubleOf(line, "step_seconds");
  record.world_size = IntOf(line, "world_size");
  record.epoch = IntOf(line, "epoch");
  record.attempt = IntOf(line, "attempt");
  record.time_ms = IntOf(line, "time_ms");
  record.planned_bytes = IntOf(line, "planned_bytes");
  record.measured_bytes = IntOf(line, "measured_bytes");
  record.skipped = line.Find("skipped") != nullptr;
  record.has_validation_loss = line.Find("validation_loss") != nullptr;
  if (record.has_validation_loss) {
    record.validation_loss = FloatOf(line, "validation_loss", "validation_loss_bits");
  }
  return record;
}

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
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
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
  const std::string line = FormatStepRecord(record) + "\n";
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

}  // namespace ravel::coordinator
