#pragma once

// A recording as bytes, from one process of a program to another of the same program.

#include <string>

#include "common/status.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {

std::string RecordingBytes(const Recording& recording);
// InvalidArgument where `bytes` end too early, or too late.
absl::StatusOr<Recording> RecordingOfBytes(const std::string& bytes);

}  // namespace ravel::trainer
