#pragma once

// A checkpoint store without bytes: which steps are committed, bad, or sealed and unheard of, by
// job name. A test sets what it answers.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/saves/checkpoint_keeper.h"

namespace ravel::coordinator {

class FakeKeeper : public CheckpointKeeper {
 public:
  std::string Root(const plan::JobSpec& spec) const override { return "/ckpt/" + spec.name; }
  absl::Status Check(const CheckpointJob& /*job*/) override { return absl::OkStatus(); }
  absl::Status PinStart(const CheckpointJob& /*job*/, int64_t /*for_seconds*/) override {
    return absl::OkStatus();
  }
  absl::StatusOr<CommittedSave> Commit(const CheckpointJob& job,
                                       const SaveRequest& request) override;
  absl::StatusOr<std::optional<CommittedSave>> Settle(const CheckpointJob& job,
                                                      const SaveRequest& request) override;
  absl::StatusOr<RestorePoint> PrepareRestore(const CheckpointJob& job,
                                              const RestoreQuery& query) override;
  absl::Status RemoveAttempt(const CheckpointJob& /*job*/, ckpt::AttemptKey key) override {
    removed.emplace_back(key.step, key.epoch, key.attempt);
    return absl::OkStatus();
  }
  void EndRestore(const std::string& job_uid) override { ended_restores.insert(job_uid); }
  absl::StatusOr<std::string> CheckRollback(const CheckpointJob& job, int64_t step) override;
  absl::StatusOr<StepVerdict> Condemn(const CheckpointJob& job,
                                      int64_t step,
                                      const std::string& reason) override;
  absl::StatusOr<std::vector<int64_t>> Retain(const CheckpointJob& job,
                                              int64_t in_use_step) override;
  absl::StatusOr<std::optional<SettledSave>> Release(const CheckpointJob& job,
                                                     const RestoreQuery& query) override;
  absl::Status Mark(const CheckpointJob& /*job*/,
                    int64_t /*step*/,
                    MarkChange /*change*/,
                    const std::string& /*reason*/) override {
    return absl::OkStatus();
  }
  absl::Status RemoveAll(const CheckpointJob& job) override {
    RETURN_IF_ERROR(remove_failure);
    steps.erase(job.spec.name);
    return absl::OkStatus();
  }
  absl::StatusOr<FolderView> Look(const CheckpointJob& job,
                                  const std::set<std::string>& known_saves) override;

  std::map<std::string, std::map<int64_t, int64_t>>
      steps;  // by job name: epoch of each committed step
  std::set<std::pair<std::string, int64_t>> bad;
  // Attempts with all their seals, by job name: step and epoch.
  std::map<std::string, std::map<int64_t, int64_t>> sealed;
  std::vector<FoundSave> found;  // told of unless their ids are known, as if there were one job
  absl::Status commit_failure;
  std::set<int64_t> gone;  // steps whose attempts their trainers have removed
  absl::Status remove_failure;
  absl::Status restore_failure;  // the store is away, say
  absl::Status retain_failure;
  absl::Status release_failure;
  std::string numerics_change;  // of every step against every job
  StepVerdict verdict = StepVerdict::kDamaged;
  std::set<std::string> ended_restores;  // by uid
  std::vector<int64_t> rolled_back;      // targets, as PrepareRestore saw them
  std::vector<std::tuple<int64_t, int64_t, int64_t>> removed;  // step, epoch, save attempt
  int retained = 0;
  int settled = 0;
  int cleaned = 0;
  int prepared = 0;

 private:
  std::vector<FoundSave> Unknown(const std::set<std::string>& known_saves) const;
};

}  // namespace ravel::coordinator
