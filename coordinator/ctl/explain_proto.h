#pragma once

#include <string>

#include "common/json.h"
#include "common/status.h"

namespace ravel::ctl {

// Help on a field of the job file from the comments of jobs.proto: its type, what it means, and for
// a group its fields. `path` is that of the file ("spec.training.optimizer.lr"); a leading "spec."
// may be left out; empty: the whole file. NotFound with a suggestion when there is no such field.
absl::StatusOr<std::string> ExplainField(const std::string& path);

}  // namespace ravel::ctl
