#pragma once

// The paths that a rank's job names, held against the folders that its daemon opens for jobs. The
// daemon has looked before, at the first launch of the job on this node; here every rank looks once
// more, at each of its starts and before it opens anything.

#include "common/path_roots.h"
#include "common/status.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// PermissionDenied by the field of the first path that lies beneath no root of its use.
absl::Status CheckJobPaths(const Assignment& assignment, const RootFolders& folders);

}  // namespace ravel::trainer
