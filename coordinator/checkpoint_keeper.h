#pragma once

// What the controller asks of a checkpoint store. Every call may take long and runs on the pool;
// every one may be repeated after a crash.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/plan/job_spec.h"
#include "common/status.h"
#include "coordinator/planner.h"

namespace ravel::coordinator {

struct SaveRequest {
  std::string job_uid;
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;  // save attempt
  int64_t created_ms = 0;
  std::shared_ptr<const PlannedWorld> world;  // shared with the run that made the seals
  std::vector<ckpt::Seal> seals;              // by writer; empty for Settle
};

struct CommittedSave {
  int64_t step = -1;
  std::string path;  // absolute
  int64_t bytes = 0;
  int64_t files = 0;
  std::string save_id;  // hex
};

struct RestorePoint {
  int64_t step = -1;  // -1: none, start from initial weights
  std::string path;
  bool own = true;  // a commit of this job's folder, not of another one named by the user
};

// Thread-safe.
class CheckpointKeeper {
 public:
  virtual ~CheckpointKeeper() = default;
  // The job's folder in its store, an absolute path.
  virtual std::string Root(const plan::JobSpec& spec) const = 0;
  // Before admission: the store can be created and written, and what resumeFrom asks for is there.
  // Errors name the field.
  virtual absl::Status Check(const plan::JobSpec& spec) = 0;
  virtual absl::StatusOr<CommittedSave> Commit(const plan::JobSpec& spec,
                                               const SaveRequest& request) = 0;
  // Finishes a commit that was intended when the coordinator died; empty when it cannot be
  // finished.
  virtual absl::StatusOr<std::optional<CommittedSave>> Settle(const plan::JobSpec& spec,
                                                              const SaveRequest& request) = 0;
  // The newest good step. What resumeFrom says counts only while the job has no commit of its own.
  virtual absl::StatusOr<RestorePoint> FindRestore(const plan::JobSpec& spec, bool has_commit) = 0;
  virtual absl::Status MarkBad(const plan::JobSpec& spec,
                               int64_t step,
                               const std::string& reason) = 0;
  // Applies `keep`; returns the steps that are gone.
  virtual absl::StatusOr<std::vector<int64_t>> Retain(const plan::JobSpec& spec,
                                                      int64_t in_use_step) = 0;
  // Before the job's first commit, when resumeFrom says where it begins: later steps of other jobs
  // in its folder are moved out of its way, into old-<uid>/.
  virtual absl::Status SetAside(const plan::JobSpec& spec,
                                const std::string& job_uid,
                                const RestorePoint& start) = 0;
  // Removes attempt folders: nobody writes in this job any more.
  virtual absl::Status CleanAttempts(const plan::JobSpec& spec) = 0;
};

}  // namespace ravel::coordinator
