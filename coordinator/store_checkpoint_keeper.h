#pragma once

#include "coordinator/checkpoint_keeper.h"

namespace ravel::coordinator {

// CheckpointKeeper over coordinator/saves and a POSIX directory: STORE/<job name>, or
// STORE/<namespace>.<job name> outside of the namespace default.
class StoreCheckpointKeeper : public CheckpointKeeper {
 public:
  std::string Root(const plan::JobSpec& spec) const override;
  absl::Status Check(const plan::JobSpec& spec) override;
  absl::StatusOr<CommittedSave> Commit(const plan::JobSpec& spec,
                                       const SaveRequest& request) override;
  absl::StatusOr<std::optional<CommittedSave>> Settle(const plan::JobSpec& spec,
                                                      const SaveRequest& request) override;
  absl::StatusOr<RestorePoint> FindRestore(const plan::JobSpec& spec, bool has_commit) override;
  absl::Status MarkBad(const plan::JobSpec& spec, int64_t step, const std::string& reason) override;
  absl::StatusOr<std::vector<int64_t>> Retain(const plan::JobSpec& spec,
                                              int64_t in_use_step) override;
  absl::Status SetAside(const plan::JobSpec& spec,
                        const std::string& job_uid,
                        const RestorePoint& start) override;
  absl::Status CleanAttempts(const plan::JobSpec& spec) override;
};

}  // namespace ravel::coordinator
