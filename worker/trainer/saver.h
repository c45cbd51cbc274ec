#pragma once

// When this rank saves, and what goes into a save beside the shards.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/plan/save_plan.h"
#include "common/status.h"
#include "common/store/file_store.h"
#include "worker/checkpoint/writer.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Saves of one rank. All ranks take the same decisions, since these follow from the plan and from
// what they agreed on. Used only from the step thread.
class Saver {
 public:
  // Assignment, reporter and engine outlive it. Errors are marked with their exit code.
  static absl::StatusOr<std::unique_ptr<Saver>> Create(const Assignment& assignment,
                                                       Reporter& reporter,
                                                       RankEngine& engine);

  // Whether state after `step` finished steps is saved: the job's interval, the last step, a
  // request with a new sequence.
  bool IsDue(int64_t step, const optim::ControlWord& agreed) const;

  // Copies the state and goes on; the seal is reported when it is there. Waits for the save before,
  // if that is still being written. A save that could not be written is logged: the next one may do
  // better.
  absl::Status Start(int64_t step, const optim::ControlWord& agreed);
  // Reports the seal of a save that has ended in the meantime.
  absl::Status Poll();
  // Waits for the save in flight; its failure is an error.
  absl::Status Finish();
  // Host memory that holds what is being saved.
  std::span<const std::byte> staging() const { return writer_->arena(); }

 private:
  Saver(const Assignment& assignment, Reporter& reporter, RankEngine& engine)
      : assignment_(assignment), reporter_(reporter), engine_(engine) {}
  absl::Status Take(absl::StatusOr<ckpt::Seal> result, bool must_succeed);
  std::vector<ckpt::Blob> Blobs(int64_t step) const;

  const Assignment& assignment_;
  Reporter& reporter_;
  RankEngine& engine_;
  plan::SavePlan plan_;
  std::unique_ptr<store::FileStore> store_;
  std::unique_ptr<checkpoint::CheckpointWriter> writer_;
  int64_t served_sequence_ = 0;
};

}  // namespace ravel::trainer
