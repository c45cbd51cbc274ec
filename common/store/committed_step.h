#pragma once

// A committed step of a checkpoint folder, opened for reading: nothing is returned that its
// checksums do not vouch for.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/step_layout.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// Thread-compatible; the store must outlive it.
class CommittedStep {
 public:
  // Checks COMMIT (its step must be the directory's, when the directory has a step name), length,
  // crc32c and SHA-256 of the manifest, and the manifest itself. Reads no data file. `directory` is
  // relative to the store's root.
  static absl::StatusOr<CommittedStep> Open(const ObjectStore* store, std::string_view directory);

  // The same for an attempt's folder: COMMIT is written, but the step not published.
  static absl::StatusOr<CommittedStep> OpenAttempt(const ObjectStore* store,
                                                   std::string_view directory);

  const ckpt::CommitRecord& commit() const { return commit_; }
  const ckpt::Manifest& manifest() const { return manifest_; }
  const std::string& directory() const { return directory_; }

  // Elements [begin, end) of a box of a tensor of the manifest, in the box's row-major order, as
  // stored, into `out`. Of each chunk every block that is touched is read whole, once, and
  // verified; a bad block is read once more. Errors: DataLoss naming file, tensor, block.
  absl::Status ReadBox(const ckpt::TensorRecord& tensor,
                       const Box& box,
                       int64_t begin,
                       int64_t end,
                       std::span<std::byte> out);
  // The same of the whole tensor.
  absl::Status ReadElements(const ckpt::TensorRecord& tensor,
                            int64_t begin,
                            int64_t end,
                            std::span<std::byte> out) {
    return ReadBox(tensor, WholeBox(tensor.shape), begin, end, out);
  }
  // The blocks of one chunk in order, each verified: for scans. Stops at the first error.
  using BlockVisitor =
      std::function<absl::Status(int64_t offset_in_chunk, std::span<const std::byte>)>;
  absl::Status VisitChunk(const ckpt::TensorRecord& tensor,
                          const ckpt::ChunkRecord& chunk,
                          const BlockVisitor& visit);
  // A file under hf/, verified.
  absl::StatusOr<std::string> ReadSmallFile(const ckpt::FileRecord& file) const;

  int64_t bytes_read() const { return bytes_read_; }

 private:
  CommittedStep(const ObjectStore* store, std::string directory)
      : store_(store), directory_(std::move(directory)) {}
  absl::StatusOr<const FileReader*> OpenFile(int file);
  absl::Status ReadBlock(const ckpt::TensorRecord& tensor,
                         const ckpt::ChunkRecord& chunk,
                         int64_t block,
                         std::vector<std::byte>& buffer);

  const ObjectStore* store_;
  std::string directory_;
  ckpt::CommitRecord commit_;
  ckpt::Manifest manifest_;
  std::map<int, std::unique_ptr<FileReader>> open_files_;
  int64_t bytes_read_ = 0;
};

}  // namespace ravel::store
