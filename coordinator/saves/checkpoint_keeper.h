#pragma once

// The checkpoint store as the controller uses it. Every call may take long and runs on the pool;
// every one may be repeated after a crash. Calls for one job never overlap, but for Retain.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/step_layout.h"
#include "common/model/job_spec.h"
#include "common/status.h"
#include "coordinator/jobs/planner.h"

namespace ravel::coordinator {

// Whose checkpoints a call is for. Its folder carries both ids in OWNER; a folder that does not is
// neither read nor changed: Unavailable when it looks as if it were away, FailedPrecondition when
// it is another's.
struct CheckpointJob {
  std::string cluster_id;
  std::string uid;  // empty in Check only: not accepted yet
  plan::JobSpec spec;
};

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
  std::string save_id;    // hex
  std::string mesh = {};  // "shard 2, tensor 2"
};

// A save whose seals were all there but had not reached the coordinator: committed afterwards.
struct SettledSave {
  CommittedSave save;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t world_size = 0;
};

// A committed step of the job's folder that its record lacks, as COMMIT and manifest tell it.
struct FoundSave {
  SettledSave saved;
  int64_t created_ms = 0;
  bool bad = false;
};

// The parts of a job's record that decide about its restore point.
struct RestoreQuery {
  int64_t committed_step = -1;  // newest commit; -1: none
  bool has_commit = false;      // has, or had: then it never starts from initial weights
  bool has_run = false;         // trainers ran: its folder exists and carries its OWNER
  int64_t rollback_step = -1;   // >= 0: steps above it are moved aside first
  // The epoch that is prepared, or the job's when it ended; names the folder that they go to. 0:
  // the job has had none.
  int64_t rollback_epoch = 0;
  // The plan of a size, to settle saves with; null: nothing is settled.
  std::function<absl::StatusOr<std::shared_ptr<const PlannedWorld>>(int64_t ranks)> plan = {};
  std::set<std::string> known_saves = {};  // ids of the saves that the record has
};
struct RestorePoint {
  int64_t step = -1;  // -1: none, start from initial weights
  std::string path;
  bool own = true;  // a commit of this job's folder, not of another one named by the user
  // Why `step` is below the recorded commit: proven damage, by step.
  std::string fallback_reason = {};
  std::optional<SettledSave> settled = {};  // by this call
  // The difference between the numerics of `step` and the job's (plan::NumericsChange), or empty.
  std::string numerics_change = {};
  // Where `step` is above the recorded commit: the saves that the record lacks, oldest first.
  std::vector<FoundSave> found = {};
};

// The result of a second look at a step that a trainer could not use.
enum class StepVerdict { kDamaged, kGood, kUnreadable };

// A change of a step's marks that a person asks for.
enum class MarkChange { kPin, kUnpin, kUnmarkBad };

struct LeftoverView {
  std::string path;  // absolute
  std::string kind;  // "unfinished save", ...
  std::string reason;
  int64_t changed_ms = 0;  // Unix time; 0: not known
};
// The actual content of a job's folder.
struct FolderView {
  std::vector<int64_t> steps;         // committed; BAD ones too
  std::vector<int64_t> pinned_steps;  // by whomever
  std::vector<LeftoverView> leftovers;
  std::vector<FoundSave> found = {};  // none of these ids was known
};

// Thread-safe.
class CheckpointKeeper {
 public:
  virtual ~CheckpointKeeper() = default;
  // The job's folder in its store, an absolute path.
  virtual std::string Root(const plan::JobSpec& spec) const = 0;
  // Before admission, changing nothing: the store can be written, the folder is free, and what
  // resumeFrom asks for is there. Errors name the field.
  virtual absl::Status Check(const CheckpointJob& job) = 0;
  // Keeps the step that resumeFrom names from being deleted, `for_seconds` long (0: until Release
  // or the first own commit). OK when it names none.
  virtual absl::Status PinStart(const CheckpointJob& job, int64_t for_seconds) = 0;
  virtual absl::StatusOr<CommittedSave> Commit(const CheckpointJob& job,
                                               const SaveRequest& request) = 0;
  // Finishes a commit that was intended when the coordinator died; empty when it cannot be
  // finished.
  virtual absl::StatusOr<std::optional<CommittedSave>> Settle(const CheckpointJob& job,
                                                              const SaveRequest& request) = 0;
  // Before a launch, while no trainer of the job runs: makes the folder the job's own, settles the
  // newest finished save above the recorded commit, removes the other attempts, and says where to
  // begin. What resumeFrom says counts only while the job has no commit. DataLoss when no good step
  // is left; every other error may pass.
  virtual absl::StatusOr<RestorePoint> PrepareRestore(const CheckpointJob& job,
                                                      const RestoreQuery& query) = 0;
  // The launch has read its restore point: that step may be deleted again. Does no I/O.
  virtual void EndRestore(const std::string& job_uid) = 0;
  // A step may be rolled back to: it is committed and good. Its path. Until the next launch after a
  // rollback, or the job's end, retention of this process keeps it.
  virtual absl::StatusOr<std::string> CheckRollback(const CheckpointJob& job, int64_t step) = 0;
  // Reads a step that trainers found damaged once more, whole; marks it BAD if it is.
  virtual absl::StatusOr<StepVerdict> Condemn(const CheckpointJob& job,
                                              int64_t step,
                                              const std::string& reason) = 0;
  // Applies `keep`; returns the steps that are gone.
  virtual absl::StatusOr<std::vector<int64_t>> Retain(const CheckpointJob& job,
                                                      int64_t in_use_step) = 0;
  // Removes one attempt folder, of a save that will not be committed; none is fine. Ranks may still
  // write in it: then it fails, and is asked again when they have stopped.
  virtual absl::Status RemoveAttempt(const CheckpointJob& job, ckpt::AttemptKey key) = 0;
  // The job is over and nobody writes any more: settles and removes attempts as PrepareRestore,
  // lets go of its pins. After an error, and after a settled save, it is asked again:
  // FailedPrecondition alone, of a folder that is another job's, stays.
  virtual absl::StatusOr<std::optional<SettledSave>> Release(const CheckpointJob& job,
                                                             const RestoreQuery& query) = 0;
  virtual absl::Status Mark(const CheckpointJob& job,
                            int64_t step,
                            MarkChange change,
                            const std::string& reason) = 0;
  // `known_saves`: ids of the saves that the job's record has.
  virtual absl::StatusOr<FolderView> Look(const CheckpointJob& job,
                                          const std::set<std::string>& known_saves) = 0;
  // Deletes the job's checkpoints, but for pinned ones, and lets go of its own pins: the job is
  // deleted and nobody writes.
  virtual absl::Status RemoveAll(const CheckpointJob& job) = 0;
};

}  // namespace ravel::coordinator
