#pragma once

// The changes that a retry makes in a job (RetryJobRequest).

#include <vector>

#include "common/model/job_spec.h"
#include "coordinator/api/job_file_proto.h"

namespace ravel {

struct RetriedJob {
  v1::TrainingJob job;  // canonical, changed
  plan::JobSpec spec;   // of the file alone: without what a look at its paths has found
  std::vector<JobViolation> violations;
};

// The canonical `job` with the request's changes, judged again by every rule of the job file. With
// another parallelism.tensor the device counts that whole groups cannot fill are no longer allowed,
// the wanted one becomes the largest that is, and sequence parallelism ends with the groups.
RetriedJob ApplyRetry(const v1::RetryJobRequest& request, v1::TrainingJob job);

}  // namespace ravel
