#pragma once

// Saves one rank's part of the state while training goes on: Snapshot copies the rank's own bytes
// into file images, a thread writes, checksums and seals them.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/step_layout.h"
#include "common/plan/save/save_plan.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::checkpoint {

// A small file that is saved verbatim under hf/: config.json, tokenizer.json, ...
struct HuggingFaceFile {
  std::string name;
  std::string content;
};

struct SaveRequest {
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;            // save attempt: never used before for this (step, epoch)
  int64_t sequence = 0;           // copied into the seal
  int64_t optimizer_step = 0;     // value of the state.<name>.step tensors
  std::vector<ckpt::Blob> blobs;  // rank 0 only: rng, data, hyper, schedule, algorithms
  std::vector<ckpt::SealedTensor> quantized = {};  // of the plan's quantized weights, in its order
};

// The rank's shard of `role` (not kStep) of group `group`: whole shard, from its
// first element, in the type that the save plan has for it. Called during Snapshot, on the caller's
// thread.
using ShardBytes =
    std::function<std::span<const std::byte>(plan::GroupId group, plan::StateRole role)>;
// The same for state that the host cannot read in place: copies the shard's bytes from `offset` on
// into `to`.
using ReadShard = std::function<absl::Status(
    plan::GroupId group, plan::StateRole role, int64_t offset, std::span<std::byte> to)>;

struct WriterOptions {
  int rank = 0;
  std::optional<uint32_t> job_tag = {};             // goes into the names of attempts
  std::vector<HuggingFaceFile> hugging_face_files;  // rank 0 only

  // Owns store and plan. With it a writer whose thread does not come back from the store is left
  // behind when the writer goes: a hung store must not hold the process. Without it the destructor
  // waits as long as it takes.
  std::shared_ptr<const void> owner = nullptr;
  std::chrono::milliseconds exit_wait = std::chrono::seconds(2);

  // These run on the writer's thread, and never after the destructor has begun to leave it behind.
  // Each result, before Poll or Wait can return it.
  std::function<void(const SaveRequest&, const absl::StatusOr<ckpt::Seal>&)> on_result = nullptr;
  // After a result, when the next save may begin.
  std::function<void()> on_idle = nullptr;
  // Returns true if the save of this step is no longer wanted; called before each write.
  std::function<bool(int64_t step)> abandoned = nullptr;
  // Newest step whose save was answered, committed or not.
  std::function<int64_t()> answered_step = nullptr;

  // With a limit of more than 0: complete attempts without an answer that this rank leaves in the
  // store (unacknowledged.h).
  int64_t most_unanswered = 0;
  int64_t ranks = 1;
  // On the writer's thread, as those above: a complete save beyond that limit is gone.
  std::function<void(const ckpt::AttemptKey& key, const std::string& message)> on_removed = nullptr;
};

// Writers that were left behind in this process: it then ends without waiting for threads.
int WritersLeftBehind();

// One save in flight. Used only from the trainer's step thread, but for its own thread.
class CheckpointWriter {
 public:
  // `store` is rooted at the job's checkpoint folder; it and the plan outlive the writer, or
  // options.owner holds them.
  CheckpointWriter(store::ObjectStore* store, const plan::SavePlan* plan, WriterOptions options);
  // Abandons the rest of a save. Waits for the operation of the store that is under way, with an
  // owner at most options.exit_wait.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Bytes of host memory that a rank's images take: allocated once, in the constructor.
  static int64_t ArenaBytes(const plan::SavePlan& plan, int rank);
  int64_t arena_bytes() const;
  std::span<const std::byte> arena() const;

  // Copies this rank's bytes and returns; the rest happens on the writer's thread.
  // FailedPrecondition while a save is in flight or its result has not been taken; an error of
  // `read` is returned, and nothing is in flight.
  absl::Status Snapshot(SaveRequest request, const ReadShard& read);
  absl::Status Snapshot(SaveRequest request, const ShardBytes& shard_bytes);
  // From Snapshot until Poll or Wait has returned the result.
  bool busy() const { return in_flight_step_.has_value(); }
  // The step of that save.
  std::optional<int64_t> in_flight_step() const { return in_flight_step_; }
  // The seal, or why there is none; empty while the save goes on or when there is none.
  std::optional<absl::StatusOr<ckpt::Seal>> Poll();
  // Blocks until the result is there; FailedPrecondition without a save in flight.
  absl::StatusOr<ckpt::Seal> Wait();

 private:
  class Worker;  // what the thread uses; shared with it

  const bool owned_;
  const std::chrono::milliseconds exit_wait_;
  std::shared_ptr<Worker> worker_;
  std::optional<int64_t> in_flight_step_;
  std::thread thread_;
};

}  // namespace ravel::checkpoint
