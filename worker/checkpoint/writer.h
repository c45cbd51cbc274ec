#pragma once

// Saves one rank's part of the state while training goes on: Snapshot copies the rank's own bytes
// into file images, a thread writes, checksums and seals them.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/ckpt/manifest.h"
#include "common/mutex.h"
#include "common/plan/save_plan.h"
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
};

// The rank's shard of `role` (kParam, kExpAvg, kExpAvgSq) of group `group`: whole shard, from its
// first element, in the type that the save plan has for it. Called during Snapshot, on the caller's
// thread.
using ShardBytes = std::function<std::span<const std::byte>(int group, plan::StateRole role)>;
// The same for state that the host cannot read in place: copies the shard's bytes from `offset` on
// into `to`.
using ReadShard = std::function<absl::Status(
    int group, plan::StateRole role, int64_t offset, std::span<std::byte> to)>;

struct WriterOptions {
  int rank = 0;
  std::optional<uint32_t> job_tag = {};             // goes into the names of attempts
  std::vector<HuggingFaceFile> hugging_face_files;  // rank 0 only
};

// One save in flight. Used only from the trainer's step thread, but for its own thread.
class CheckpointWriter {
 public:
  // `store` is rooted at the job's checkpoint folder; it and the plan outlive the writer.
  CheckpointWriter(store::ObjectStore* store, const plan::SavePlan* plan, WriterOptions options);
  // Waits for the file being written, abandons the rest of the save.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Bytes of host memory that a rank's images take: allocated once, in the constructor.
  static int64_t ArenaBytes(const plan::SavePlan& plan, int rank);
  int64_t arena_bytes() const { return arena_bytes_; }
  std::span<const std::byte> arena() const {
    return {arena_.get(), static_cast<size_t>(arena_bytes_)};
  }

  // Copies this rank's bytes and returns; the rest happens on the writer's thread.
  // FailedPrecondition while a save is in flight or its result has not been taken; an error of
  // `read` is returned, and nothing is in flight.
  absl::Status Snapshot(SaveRequest request, const ReadShard& read);
  absl::Status Snapshot(SaveRequest request, const ShardBytes& shard_bytes);
  // From Snapshot until Poll or Wait has returned the result.
  bool busy() const { return in_flight_; }
  // The seal, or why there is none; empty while the save goes on or when there is none.
  std::optional<absl::StatusOr<ckpt::Seal>> Poll();
  // Blocks until the result is there; FailedPrecondition without a save in flight.
  absl::StatusOr<ckpt::Seal> Wait();

 private:
  struct FileImage {
    const plan::SaveFile* file = nullptr;
    std::byte* data = nullptr;  // in the arena
  };
  void Run();
  absl::StatusOr<ckpt::Seal> Write(const SaveRequest& request);
  absl::Status MakeFolders(const std::string& attempt);
  absl::Status WriteImage(const std::string& attempt, const FileImage& image, ckpt::Seal& seal);
  absl::Status WriteSmallFile(const std::string& attempt,
                              const HuggingFaceFile& file,
                              ckpt::Seal& seal);
  void DigestImages(ckpt::Seal& seal) const;

  store::ObjectStore* store_;
  const plan::SavePlan* plan_;
  WriterOptions options_;
  Sha256Digest plan_hash_;
  std::vector<FileImage> images_;
  std::unique_ptr<std::byte[]> arena_;
  int64_t arena_bytes_ = 0;
  bool in_flight_ = false;  // step thread only
  std::atomic<bool> stop_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::optional<SaveRequest> pending_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<ckpt::Seal>> result_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ravel::checkpoint
