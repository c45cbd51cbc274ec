#pragma once

// Restores state from a committed step or from a Hugging Face directory, for any mesh: each rank
// reads exactly what it owns.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/safetensors.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/owned_boxes.h"
#include "common/plan/save/save_plan.h"
#include "common/status.h"
#include "common/store/committed_step.h"
#include "common/store/object_store.h"

namespace ravel::checkpoint {

// Says if elements that are read count in the digest check: each element counts on exactly one
// rank.
enum class DigestShare { kOwner, kReplica };

// Thread-compatible; store and inventory outlive it. Usage: Open, ReadPieces for every group and
// role, exchange digest_sums() between the ranks (add element-wise modulo 2^64), CheckDigests with
// the sums of all ranks.
class StepLoader {
 public:
  // Opens and verifies COMMIT and manifest, then compares names, shapes and dtypes with the
  // inventory; all differences are in one FailedPrecondition. No data file is touched. `optimizer`:
  // that of the job, whose states have to be there; none: only weights are read.
  static absl::StatusOr<StepLoader> Open(const store::ObjectStore* store,
                                         std::string_view directory,
                                         const plan::ModelInventory* inventory,
                                         std::optional<plan::OptimizerKind> optimizer);

  const ckpt::Manifest& manifest() const { return step_.manifest(); }
  int64_t step() const { return step_.manifest().step; }
  // A blob; NotFound naming it and the step.
  absl::StatusOr<std::string> Blob(std::string_view name) const;
  // The optimizer step that the state.<name>.step tensors hold; DataLoss if they disagree. Counts
  // in the digests on the rank that passes kOwner.
  absl::StatusOr<int64_t> ReadOptimizerStep(DigestShare share);

  // What was saved of a tensor's delayed scales, in its shape; false: nothing, or in another shape.
  absl::StatusOr<bool> ReadScales(const plan::TensorSpec& tensor,
                                  plan::StateRole role,
                                  const Shape& shape,
                                  std::span<float> to,
                                  DigestShare share);

  // Pieces of the tensors of `role` (not kStep) into `shard`: piece p goes to elements
  // [p.shard_offset, ...) of it. States that were saved as bf16 or fp8 are widened, which is exact.
  // Pieces of a role of scales are those of plan::ScalePieces. DataLoss names file, tensor, block.
  absl::Status ReadPieces(plan::StateRole role,
                          std::span<const plan::OwnedPiece> pieces,
                          std::span<float> shard,
                          DigestShare share = DigestShare::kOwner);

  // The same as it is stored: piece p goes to bytes [p.shard_offset * b, ...) of `shard`, where b
  // is what an element takes in the file.
  absl::Status ReadStored(plan::StateRole role,
                          std::span<const plan::OwnedPiece> pieces,
                          std::span<std::byte> shard,
                          DigestShare share = DigestShare::kOwner);
  // The type in which a state was saved; that of the first trained tensor.
  DType StoredType(plan::StateRole role) const;

  // Per tensor of the manifest, in its order: the sum of what this rank read as owner.
  const std::vector<uint64_t>& digest_sums() const { return digest_sums_; }
  // `sums` of all ranks added; every tensor must equal the manifest's digest64. DataLoss names the
  // tensors.
  absl::Status CheckDigests(std::span<const uint64_t> sums) const;

  int64_t bytes_read() const { return step_.bytes_read(); }

 private:
  StepLoader(store::CommittedStep step,
             const plan::ModelInventory* inventory,
             std::optional<plan::OptimizerKind> optimizer)
      : step_(std::move(step)), inventory_(inventory), optimizer_(optimizer) {}
  // The tensor's roles that a job reads: frozen tensors have weights only.
  std::vector<plan::StateRole> RolesOf(const plan::TensorSpec& tensor) const;
  // The type of a role that training.optimizer.stateDtype: fp8 is of; nullopt of others.
  std::optional<DType> Fp8TypeOf(plan::StateRole role) const;
  // True if a role's values may be of that type.
  bool CanRead(plan::StateRole role, DType stored) const;
  absl::Status CompareOptimizer() const;
  absl::Status CompareInventory() const;
  std::string CompareTensor(const plan::TensorSpec& tensor, plan::StateRole role) const;
  absl::Status ReadPiece(size_t index,
                         const plan::OwnedPiece& piece,
                         std::span<std::byte> to,
                         DigestShare share);
  // From StoredPart to all of `out`, with the scales of the piece.
  absl::Status WidenFp8(plan::StateRole role,
                        const plan::OwnedPiece& piece,
                        std::span<std::byte> out,
                        DigestShare share);
  // Index into the manifest's tensors.
  size_t FindState(plan::StateRole role, const plan::TensorSpec& tensor) const;

  store::CommittedStep step_;
  const plan::ModelInventory* inventory_;
  std::optional<plan::OptimizerKind> optimizer_;
  std::vector<uint64_t> digest_sums_;
  std::set<std::string> scales_read_;
};

// The weights of a Hugging Face directory: model.safetensors, or model.safetensors.index.json and
// its files, or else what torch's distributed checkpoints write there: files whose
// DCP_SHARDING_INFO says which box of a tensor each holds, whatever mesh they were cut for. F32,
// BF16, F16 become fp32. Thread-compatible; the inventory outlives it.
class HuggingFaceLoader {
 public:
  // Reads the headers only. All missing, unknown and misshapen tensors are listed in one
  // FailedPrecondition. A tied model may or may not store lm_head.weight; rotary inv_freq buffers
  // are ignored.
  static absl::StatusOr<HuggingFaceLoader> Open(std::string_view directory,
                                                const plan::ModelInventory* inventory);

  // Piece p goes to elements [p.shard_offset, ...) of `shard`. Runs of a strided piece are read
  // together where the bytes between them are no more than theirs, or less than a page: at most
  // twice what is asked for, or a page a run, and a bounded number of bytes at a time.
  absl::Status ReadPieces(std::span<const plan::OwnedPiece> pieces, std::span<float> shard);
  int64_t bytes_read() const { return bytes_read_; }

 private:
  // A box of a tensor.
  struct Source {
    size_t file = 0;
    DType dtype = DType::kF32;
    int64_t offset = 0;  // in the file
    Box box;
  };
  struct File {
    std::string name;
    std::unique_ptr<store::FileReader> reader;
  };
  explicit HuggingFaceLoader(const plan::ModelInventory* inventory) : inventory_(inventory) {}
  // Consecutive runs that one call reads.
  struct Read {
    int64_t first = 0;  // elements [first, end) of the source
    int64_t end = 0;
    std::vector<plan::OwnedRun> runs;  // whose `first` counts in the source
  };
  absl::Status ReadSource(const Source& source,
                          const plan::OwnedPiece& piece,
                          std::span<float> shard);
  absl::Status Execute(const Source& source, const Read& read, std::span<float> shard);
  absl::Status OpenFiles();
  absl::StatusOr<std::set<std::string>> FindFiles(std::map<std::string, std::string>& weight_map);
  absl::Status MatchInventory(const std::vector<std::vector<ckpt::SafetensorsEntry>>& entries);
  // The first fault of a tensor's sources; empty: there is none.
  std::string CompareSources(plan::TensorId tensor) const;

  const plan::ModelInventory* inventory_;
  std::unique_ptr<store::ObjectStore> store_;
  std::vector<File> files_;
  bool boxes_ = false;  // files may hold parts of tensors
  plan::IdVector<plan::TensorId, std::vector<Source>> sources_;
  std::vector<std::byte> buffer_;
  int64_t bytes_read_ = 0;
};

}  // namespace ravel::checkpoint
