#include "coordinator/ctl/event_file.h"

#include <bit>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/crc32c.h"

namespace ravel::ctl {
namespace {

// Wire types of protobuf.
constexpr uint64_t kVarint = 0;
constexpr uint64_t kFixed64 = 1;
constexpr uint64_t kBytes = 2;
constexpr uint64_t kFixed32 = 5;

// Fields of tensorflow.Event, tensorflow.Summary and tensorflow.Summary.Value.
constexpr uint64_t kWallTime = 1;
constexpr uint64_t kStep = 2;
constexpr uint64_t kFileVersion = 3;
constexpr uint64_t kSummary = 5;
constexpr uint64_t kSummaryValue = 1;
constexpr uint64_t kTag = 1;
constexpr uint64_t kSimpleValue = 2;

template <typename Unsigned>
void AppendFixed(Unsigned value, std::string& out) {
  for (size_t i = 0; i < sizeof(value); ++i) {
    out.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>((value & 0x7f) | 0x80));
  }
  out.push_back(static_cast<char>(value));
}

void AppendKey(uint64_t field, uint64_t type, std::string& out) {
  AppendVarint(field << 3 | type, out);
}

void AppendBytes(uint64_t field, std::string_view bytes, std::string& out) {
  AppendKey(field, kBytes, out);
  AppendVarint(bytes.size(), out);
  out.append(bytes);
}

uint32_t MaskedCrc(std::string_view bytes) {
  const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
  return std::rotr(crc, 15) + 0xa282ead8u;
}

std::string EventHead(double wall_seconds) {
  std::string event;
  AppendKey(kWallTime, kFixed64, event);
  AppendFixed(std::bit_cast<uint64_t>(wall_seconds), event);
  return event;
}

void AppendScalar(std::string_view tag, double value, std::string& summary) {
  std::string scalar;
  AppendBytes(kTag, tag, scalar);
  AppendKey(kSimpleValue, kFixed32, scalar);
  AppendFixed(std::bit_cast<uint32_t>(static_cast<float>(value)), scalar);
  AppendBytes(kSummaryValue, scalar, summary);
}

}  // namespace

std::string TfRecord(std::string_view bytes) {
  std::string record;
  AppendFixed(static_cast<uint64_t>(bytes.size()), record);
  AppendFixed(MaskedCrc(record), record);
  record.append(bytes);
  AppendFixed(MaskedCrc(bytes), record);
  return record;
}

std::string FirstEvent(double wall_seconds) {
  std::string event = EventHead(wall_seconds);
  AppendBytes(kFileVersion, "brain.Event:2", event);
  return event;
}

std::string StepEvent(const StepRecord& record) {
  std::string event = EventHead(static_cast<double>(record.time_ms) / 1000);
  AppendKey(kStep, kVarint, event);
  AppendVarint(static_cast<uint64_t>(record.step), event);
  std::string summary;
  AppendScalar("loss", record.loss, summary);
  AppendScalar("grad_norm", record.grad_norm, summary);
  AppendScalar("learning_rate", record.lr, summary);
  AppendScalar("tokens_per_second", record.tokens_per_second, summary);
  AppendScalar("step_seconds", record.step_seconds, summary);
  AppendScalar("workers", static_cast<double>(record.world_size), summary);
  AppendScalar("epoch", static_cast<double>(record.epoch), summary);
  if (record.has_validation_loss) {
    AppendScalar("validation_loss", record.validation_loss, summary);
  }
  if (record.loss_scale != 0) {
    AppendScalar("loss_scale", record.loss_scale, summary);
  }
  AppendBytes(kSummary, summary, event);
  return event;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Create(const std::string& directory,
                                                             const std::string& name) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat(directory, ": ", error.message()));
  }
  std::string path = absl::StrCat(directory, "/events.out.tfevents.", name);
  ASSIGN_OR_RETURN(std::unique_ptr<FileWriter> file, FileWriter::Create(path));
  return std::unique_ptr<EventFile>(new EventFile(std::move(path), std::move(file)));
}

absl::Status EventFile::Add(const StepRecord& record) {
  if (steps_ == 0) {
    RETURN_IF_ERROR(file_->Write(TfRecord(FirstEvent(static_cast<double>(record.time_ms) / 1000))));
  }
  ++steps_;
  return file_->Write(TfRecord(StepEvent(record)));
}

absl::Status EventFile::Publish() {
  return file_->Publish();
}

}  // namespace ravel::ctl
