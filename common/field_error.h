#pragma once

// A refusal of one field, whoever finds it: planner, rules of job files, stores. It travels as a
// status whose payload keeps the parts, so that nobody has to take the message apart.

#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel {

struct FieldError {
  std::string path;  // "training.globalBatch", as the job file names it, from `spec` on
  std::string expected;
  std::string got;  // may be empty
  bool operator==(const FieldError&) const = default;
};

// InvalidArgument "PATH: expected EXPECTED, got GOT".
absl::Status FieldRefusal(std::string path, std::string expected, std::string got = "");

// The refusals that a status carries, also when it was annotated or has another code; empty: none.
std::vector<FieldError> FieldErrorsOf(const absl::Status& status);

// The same status, carrying these.
absl::Status WithFieldErrors(absl::Status status, const std::vector<FieldError>& errors);

}  // namespace ravel
