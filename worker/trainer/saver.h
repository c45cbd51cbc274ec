#pragma once

// When this rank saves, and what goes into a save beside the shards.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/plan/save/save_plan.h"
#include "common/status.h"
#include "common/store/object_store.h"
#include "worker/checkpoint/writer.h"
#include "worker/trainer/command_box.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Saves of one rank. All ranks take the same decisions, since these follow from the plan and from
// what they agreed on. Used only from the step thread.
class Saver {
 public:
  // Assignment, reporter, box and engine outlive it. Errors are marked with their exit code.
  static absl::StatusOr<std::unique_ptr<Saver>> Create(const Assignment& assignment,
                                                       Reporter& reporter,
                                                       CommandBox& box,
                                                       RankEngine& engine);

  // Returns true if state after `step` finished steps is saved: the job's interval, the last step,
  // a request with a new sequence.
  bool IsDue(int64_t step, const optim::ControlWord& agreed) const;

  // Returns true if the save that is due may begin: no rank still writes the one before, as far as
  // the ranks have agreed in the step `lag` steps ago. The same on all ranks.
  bool MayStart(int64_t step, const optim::ControlWord& agreed, int64_t lag) const;
  // The save that is due does not begin. One that was asked for stays due, a scheduled one is told.
  absl::Status Skip(int64_t step, const optim::ControlWord& agreed);
  // Copies the state and goes on; seal or failure are reported by the writer's thread. Waits only
  // for a save before that MayStart did not ask about: before the last save of a run.
  absl::Status Start(int64_t step, const optim::ControlWord& agreed);
  // Takes note of a save that has ended. A failed one is no error: the next may do better.
  absl::Status Poll();
  // Waits for the save in flight; its failure is an error.
  absl::Status Finish();
  // Host memory that holds what is being saved.
  std::span<const std::byte> staging() const { return writer_->arena(); }

 private:
  // State that the writer's thread needs, also when it is left behind.
  struct Target {
    plan::SavePlan plan;
    std::unique_ptr<store::ObjectStore> store;
  };
  Saver(const Assignment& assignment, Reporter& reporter, CommandBox& box, RankEngine& engine)
      : assignment_(assignment), reporter_(reporter), box_(box), engine_(engine) {}
  // On the writer's thread.
  void Tell(const checkpoint::SaveRequest& request, const absl::StatusOr<ckpt::Seal>& result);
  // The result of the save in flight, which is waited for and said so in the log.
  absl::StatusOr<ckpt::Seal> WaitForWriter(const char* why);
  std::vector<ckpt::Blob> Blobs(int64_t step) const;
  // Digests of CodeDigests, with names.
  std::vector<ckpt::SealedTensor> Quantized(const std::vector<uint64_t>& digests) const;

  const Assignment& assignment_;
  Reporter& reporter_;
  CommandBox& box_;
  RankEngine& engine_;
  std::unique_ptr<checkpoint::CheckpointWriter> writer_;
  int64_t served_sequence_ = 0;
  int64_t deferred_sequence_ = 0;  // newest request that had to wait
  std::optional<int64_t> started_step_;
};

}  // namespace ravel::trainer
