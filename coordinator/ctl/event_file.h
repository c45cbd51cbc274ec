#pragma once

// Event files of TensorBoard: a job's steps as scalars, written without any library of its own. The
// format is TFRecord (length, masked CRC-32C, bytes, masked CRC-32C) around the protobuf message
// tensorflow.Event.

#include <memory>
#include <string>
#include <string_view>

#include "common/file_writer.h"
#include "common/status.h"
#include "common/step_record.h"

namespace ravel::ctl {

// One record of a TFRecord file.
std::string TfRecord(std::string_view bytes);
// The serialized tensorflow.Event that begins a file.
std::string FirstEvent(double wall_seconds);
// That of a step: loss, grad_norm, learning_rate, tokens_per_second, step_seconds, workers and
// epoch as scalars; validation_loss after an evaluation, loss_scale in fp16.
std::string StepEvent(const StepRecord& record);

// DIRECTORY/events.out.tfevents.NAME, which appears when it is published, in the place of one that
// an earlier call wrote. Thread-compatible.
class EventFile {
 public:
  // The folder is made if it is not there.
  static absl::StatusOr<std::unique_ptr<EventFile>> Create(const std::string& directory,
                                                           const std::string& name);
  absl::Status Add(const StepRecord& record);
  absl::Status Publish();
  int64_t steps() const { return steps_; }
  const std::string& path() const { return path_; }

 private:
  EventFile(std::string path, std::unique_ptr<FileWriter> file)
      : path_(std::move(path)), file_(std::move(file)) {}

  const std::string path_;
  const std::unique_ptr<FileWriter> file_;
  int64_t steps_ = 0;
};

}  // namespace ravel::ctl
