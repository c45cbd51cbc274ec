#pragma once

// Job files made canonical with what this machine has at the paths that they name, for verbs that
// work without a coordinator.

#include "coordinator/api/job_file_proto.h"

namespace ravel::ctl {

// The paths that are opened here.
enum class PathScope {
  kNone,   // this machine may not have them
  kModel,  // config.json of model.from; a plan needs no more
  kAll,    // the data and the tokenizer, too
};

// Blocks for as long as the file systems do.
CanonicalJob CanonicalizeHere(const v1::TrainingJob& job, PathScope scope);

}  // namespace ravel::ctl
