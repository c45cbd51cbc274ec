#pragma once

// The step that checkpoint.resumeFrom names, in the job's folder or elsewhere, whether it was
// computed as the job computes, and a history that begins there.

#include <optional>
#include <string>

#include "common/model/job_spec.h"
#include "common/status.h"
#include "common/store/open_store.h"
#include "coordinator/saves/checkpoint_keeper.h"

namespace ravel::coordinator {

// resumeFrom is a step number, a path or a URL, not auto or none.
bool NamesStart(const plan::JobSpec& spec);

// The step that a path or URL in resumeFrom names; none when it names none.
absl::StatusOr<std::optional<store::StorePlace>> StartElsewhere(const plan::JobSpec& spec);

// Finds the start of a job without a commit when resumeFrom names a step. `files` is the job's
// folder.
absl::StatusOr<RestorePoint> NamedStart(const store::ObjectStore& files, const plan::JobSpec& spec);

// Begins the history of a job without a commit whose resumeFrom is not auto: at the step that it
// names, or with initial weights. Later steps of other jobs go out of the way.
absl::StatusOr<RestorePoint> BeginHistory(store::ObjectStore& files, const CheckpointJob& job);
// Lets go of the start that PinStart of the keeper has pinned elsewhere, if there is one.
// Unavailable when the pin stays.
absl::Status UnpinStart(const CheckpointJob& job);

// Before admission: the step is there, and has the numerics of the job, or the job allows others.
// Errors name the field.
absl::Status CheckNamedStart(const store::ObjectStore& files, const plan::JobSpec& spec);

// plan::NumericsChange from the step at `path`, which was just found good, to the job. Unavailable
// when it cannot be read.
absl::StatusOr<std::string> NumericsChangeSince(const std::string& path, const plan::JobSpec& spec);

}  // namespace ravel::coordinator
