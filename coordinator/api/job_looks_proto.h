#pragma once

// Jobs made canonical with what a node has found at the paths that they name. The coordinator opens
// none of them: its host may not have them, and a mount that hangs is the node's to hang in.

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "common/status.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/api/job_file_proto.h"
#include "coordinator/fleet/node_looks.h"
#include "coordinator/jobs/executor.h"

namespace ravel::coordinator {

class JobController;

struct JobLookLimits {
  int64_t node_ms = 20'000;  // for all paths, on one node
  int64_t all_ms = 26'000;   // with a second node; below what ravelctl waits for an answer
};

// Thread-safe.
class JobLooks {
 public:
  // `roots`: of the operator; null: jobs may name any path.
  JobLooks(Executor* strand,
           JobController* controller,
           JobLookLimits limits,
           const NamespaceRootsFile* roots)
      : strand_(strand), controller_(controller), limits_(limits), roots_(roots) {}

  // The job with its defaults and all that is wrong with it or with its paths, as a node sees them;
  // another node is asked once if that one or a path there does not answer. Without a node that
  // answers: a warning, or Unavailable when there is model.from, whose config.json no plan can do
  // without. Blocks; Cancelled soon after `gone` says that nobody waits for it.
  absl::StatusOr<CanonicalJob> Look(const v1::TrainingJob& job, const std::function<bool()>& gone);

 private:
  LookAnswer AskNodes(const PathQuery& query, bool cpu_devices, const std::function<bool()>& gone);
  LookAnswer Ask(LookWish wish, const std::function<bool()>& gone);

  Executor* const strand_;
  JobController* const controller_;
  const JobLookLimits limits_;
  const NamespaceRootsFile* const roots_;
};

}  // namespace ravel::coordinator
