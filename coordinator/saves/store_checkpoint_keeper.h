#pragma once

#include <map>
#include <string>

#include <absl/base/thread_annotations.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/saves/step_claims.h"

namespace ravel::coordinator {

// CheckpointKeeper over coordinator/saves and a folder of a store: STORE/<job name>, or
// STORE/<namespace>.<job name> outside of the namespace default.
class StoreCheckpointKeeper : public CheckpointKeeper {
 public:
  explicit StoreCheckpointKeeper(const Clock* clock = &SystemClock::Get()) : clock_(clock) {}
  std::string Root(const plan::JobSpec& spec) const override;
  absl::Status Check(const CheckpointJob& job) override;
  absl::Status PinStart(const CheckpointJob& job, int64_t for_seconds) override;
  absl::StatusOr<CommittedSave> Commit(const CheckpointJob& job,
                                       const SaveRequest& request) override;
  absl::StatusOr<std::optional<CommittedSave>> Settle(const CheckpointJob& job,
                                                      const SaveRequest& request) override;
  absl::StatusOr<RestorePoint> PrepareRestore(const CheckpointJob& job,
                                              const RestoreQuery& query) override;
  void EndRestore(const std::string& job_uid) override;
  absl::StatusOr<std::string> CheckRollback(const CheckpointJob& job, int64_t step) override;
  absl::StatusOr<StepVerdict> Condemn(const CheckpointJob& job,
                                      int64_t step,
                                      const std::string& reason) override;
  absl::StatusOr<std::vector<int64_t>> Retain(const CheckpointJob& job,
                                              int64_t in_use_step) override;
  absl::Status RemoveAttempt(const CheckpointJob& job, ckpt::AttemptKey key) override;
  absl::StatusOr<std::optional<SettledSave>> Release(const CheckpointJob& job,
                                                     const RestoreQuery& query) override;
  absl::Status Mark(const CheckpointJob& job,
                    int64_t step,
                    MarkChange change,
                    const std::string& reason) override;
  absl::Status RemoveAll(const CheckpointJob& job) override;
  absl::StatusOr<FolderView> Look(const CheckpointJob& job,
                                  const std::set<std::string>& known_saves) override;

 private:
  int64_t NowSeconds() const { return clock_->WallMs() / 1000; }
  absl::StatusOr<std::string> FindGoodStep(const CheckpointJob& job, int64_t step) const;

  const Clock* clock_;
  StepClaims claims_;
  Mutex mutex_;
  std::map<std::string, int64_t> tidied_ms_ ABSL_GUARDED_BY(mutex_);  // monotonic, by uid
};

}  // namespace ravel::coordinator
