#pragma once

// Paths and stores of a job that lie outside of its namespace's roots.

#include <vector>

#include "common/model/job_spec.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/api/job_file_proto.h"

namespace ravel::coordinator {

// One for each field that names such a path; nothing is opened. Fields that are not filled in, as
// those of a job with other faults, pass.
std::vector<JobViolation> RootViolations(const NamespaceRoots& roots, const plan::JobSpec& spec);
// The store and the step to start from as this host sees them: a symbolic link does not lead out of
// the namespace's folders. The error begins with the field.
absl::Status CheckStoreBeneath(const NamespaceRoots& roots, const plan::JobSpec& spec);

}  // namespace ravel::coordinator
