#pragma once

// Jobs made canonical with what a node has found at the paths that they name. The coordinator opens
// none of them: its host may not have them, and a mount that hangs is the node's to hang in.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "common/status.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/api/job_file_proto.h"
#include "coordinator/fleet/node_looks.h"
#include "coordinator/jobs/executor.h"

namespace ravel::coordinator {

class JobController;

struct JobLookLimits {
  int64_t needs_ms = 4'000;  // for the needs beside paths, on all nodes at once
  int64_t node_ms = 20'000;  // for all paths, on one node
  int64_t all_ms = 26'000;   // for all of it; below what ravelctl waits for an answer
};

struct LookedJob {
  CanonicalJob job;
  std::set<std::string> refusing = {};  // nodes that would refuse its launch, while others may not
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
  // without. A variable, secret or network that no node gives is a violation too; that some node
  // does not give is a warning, and so is silence. Blocks; Cancelled soon after `gone` says that
  // nobody waits for it.
  absl::StatusOr<LookedJob> Look(const v1::TrainingJob& job, const std::function<bool()>& gone);

 private:
  using Gone = std::function<bool()>;
  // All nodes' answers about a job's needs beside paths.
  struct NeedsFindings {
    std::vector<JobViolation> violations = {};
    std::vector<std::string> warnings = {};
    std::set<std::string> refusing = {};  // as LookedJob
  };
  absl::StatusOr<NeedsFindings> AskForNeeds(const CanonicalJob& job, const Gone& gone);
  struct Asker {
    int64_t end_ms = 0;  // monotonic: it waits no longer
    const Gone& gone;
  };
  // `bare`: the job without facts.
  absl::StatusOr<CanonicalJob> LookAtPaths(const v1::TrainingJob& job,
                                           CanonicalJob bare,
                                           LookWish wish,
                                           const Asker& asker);
  LookAnswer AskNodes(LookWish wish, const Asker& asker);
  LookAnswer Ask(LookWish wish, const Gone& gone);
  // At least one answer; the last is not OK where some are missing.
  std::vector<LookAnswer> AskAll(LookWish wish, const Gone& gone);

  Executor* const strand_;
  JobController* const controller_;
  const JobLookLimits limits_;
  const NamespaceRootsFile* const roots_;
};

}  // namespace ravel::coordinator
