// Opens a committed step along a chain of trust: COMMIT holds the length, crc32c and SHA-256 of the
// manifest, the manifest holds checksums for blocks of every chunk. Reads fetch whole blocks,
// verify them, and copy out the part that was asked for; a bad block is read once more, since a
// transfer may have been at fault. No byte is returned unverified.

#include "common/store/committed_step.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/ckpt/box_runs.h"
#include "common/ckpt/manifest_proto.h"
#include "common/crc32c.h"
#include "common/signed_size.h"

namespace ravel::store {
namespace {

constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

std::string_view LastPart(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

absl::StatusOr<ckpt::CommitRecord> ReadCommit(const ObjectStore& store,
                                              std::string_view directory) {
  const std::string where = store.Locate(directory);
  const absl::StatusOr<std::string> text =
      ReadFile(store, JoinPath(directory, ckpt::kCommitFile), ckpt::kMaxCommitBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(where, ": not a committed step: COMMIT is missing"));
  }
  RETURN_IF_ERROR(text.status());
  ASSIGN_OR_RETURN(const bool withdrawn, Exists(store, JoinPath(directory, ckpt::kDeletedFile)));
  if (withdrawn) {
    return absl::NotFoundError(absl::StrCat(where, ": not a committed step: it is being deleted"));
  }
  absl::StatusOr<ckpt::CommitRecord> commit = ckpt::ParseCommit(*text);
  RETURN_IF_ERROR(Annotate(commit.status(), where));
  const std::optional<int64_t> step = ckpt::ParseStepName(LastPart(directory));
  if (step && *step != commit->step) {
    return absl::DataLossError(
        absl::StrCat(where, ": COMMIT: step: is ", commit->step, ", expected ", *step));
  }
  return commit;
}

absl::Status CheckManifestSums(const ckpt::CommitRecord& commit, const std::string& bytes) {
  if (static_cast<int64_t>(bytes.size()) != commit.manifest_bytes) {
    return absl::DataLossError(
        absl::StrCat("manifest.pb: ", bytes.size(), " bytes, COMMIT says ", commit.manifest_bytes));
  }
  if (Crc32c(0, bytes.data(), bytes.size()) != commit.manifest_crc32c ||
      Sha256(bytes) != commit.manifest_sha256) {
    return absl::DataLossError("manifest.pb: checksum is not COMMIT's");
  }
  return absl::OkStatus();
}

absl::StatusOr<ckpt::Manifest> ReadManifest(const ObjectStore& store,
                                            std::string_view directory,
                                            const ckpt::CommitRecord& commit) {
  const std::string path = JoinPath(directory, ckpt::kManifestFile);
  const absl::StatusOr<std::string> bytes = ReadFile(store, path, kMaxManifestBytes);
  if (absl::IsNotFound(bytes.status())) {
    return absl::DataLossError("manifest.pb: missing");
  }
  RETURN_IF_ERROR(bytes.status());
  RETURN_IF_ERROR(CheckManifestSums(commit, *bytes));
  ASSIGN_OR_RETURN(ckpt::Manifest manifest, ckpt::DecodeManifest(*bytes));
  if (ckpt::MakeCommitRecord(manifest, *bytes) != commit) {
    return absl::DataLossError("COMMIT: does not describe manifest.pb");
  }
  return manifest;
}

}  // namespace

absl::StatusOr<CommittedStep> CommittedStep::Open(const ObjectStore* store,
                                                  std::string_view directory) {
  if (ckpt::ParseAttemptName(LastPart(directory))) {
    return absl::FailedPreconditionError(
        absl::StrCat(store->Locate(directory), ": an unfinished save, not a committed step"));
  }
  return OpenAttempt(store, directory);
}

absl::StatusOr<CommittedStep> CommittedStep::OpenAttempt(const ObjectStore* store,
                                                         std::string_view directory) {
  CommittedStep step(store, std::string(directory));
  ASSIGN_OR_RETURN(step.commit_, ReadCommit(*store, directory));
  absl::StatusOr<ckpt::Manifest> manifest = ReadManifest(*store, directory, step.commit_);
  RETURN_IF_ERROR(Annotate(manifest.status(), store->Locate(directory)));
  step.manifest_ = *std::move(manifest);
  return step;
}

absl::StatusOr<const FileReader*> CommittedStep::OpenFile(int file) {
  const auto found = open_files_.find(file);
  if (found != open_files_.end()) {
    return found->second.get();
  }
  const ckpt::FileRecord& record = At(manifest_.files, file);
  absl::StatusOr<std::unique_ptr<FileReader>> reader =
      store_->Open(JoinPath(directory_, record.path));
  if (absl::IsNotFound(reader.status())) {
    return absl::DataLossError(
        absl::StrCat(store_->Locate(directory_), ": ", record.path, ": missing"));
  }
  RETURN_IF_ERROR(reader.status());
  if ((*reader)->size() != record.size) {
    return absl::DataLossError(absl::StrCat(store_->Locate(directory_),
                                            ": ",
                                            record.path,
                                            ": ",
                                            (*reader)->size(),
                                            " bytes, the manifest says ",
                                            record.size));
  }
  return (open_files_[file] = *std::move(reader)).get();
}

absl::Status CommittedStep::ReadBlock(const ckpt::TensorRecord& tensor,
                                      const ckpt::ChunkRecord& chunk,
                                      int64_t block,
                                      std::vector<std::byte>& buffer) {
  ASSIGN_OR_RETURN(const FileReader* reader, OpenFile(chunk.file));
  const int64_t offset = block * ckpt::kBlockBytes;
  buffer.resize(Size(std::min(ckpt::kBlockBytes, chunk.bytes - offset)));
  const uint32_t expected = At(chunk.block_crc32c, block);
  uint32_t found = 0;
  for (int reads = 0; reads < 2; ++reads) {
    RETURN_IF_ERROR(Annotate(reader->ReadAt(chunk.data_offset + offset, buffer),
                             absl::StrCat("tensor ", tensor.name, ", block ", block)));
    bytes_read_ += static_cast<int64_t>(buffer.size());
    found = Crc32c(0, buffer.data(), buffer.size());
    if (found == expected) {
      return absl::OkStatus();
    }
  }
  return absl::DataLossError(
      absl::StrFormat("%s: %s: tensor %s, block %d: crc32c %08x, the manifest says %08x",
                      store_->Locate(directory_),
                      At(manifest_.files, chunk.file).path,
                      tensor.name,
                      block,
                      found,
                      expected));
}

absl::Status CommittedStep::ReadBox(const ckpt::TensorRecord& tensor,
                                    const Box& box,
                                    int64_t begin,
                                    int64_t end,
                                    std::span<std::byte> out) {
  const int64_t element_bytes = DTypeBytes(tensor.stored_dtype);
  CHECK(0 <= begin && begin <= end && end <= ElementCount(box.length));
  CHECK_EQ(static_cast<int64_t>(out.size()), (end - begin) * element_bytes);
  const std::vector<Box> wanted = ckpt::BoxesOfRange(box, begin, end);
  std::vector<std::byte> buffer;
  int64_t copied = 0;
  for (const ckpt::ChunkRecord& chunk : tensor.chunks) {
    int64_t loaded = -1;  // the block in `buffer`
    absl::Status status;
    // Ascends in the chunk, so that a block is loaded once. A run of the common part is contiguous
    // in the tensor, so in the chunk and in `out`, too.
    const auto copy = [&](const ckpt::BoxRun& run) {
      int64_t at = ckpt::BoxIndex(tensor.shape, chunk.box, run.tensor_begin) * element_bytes;
      std::byte* to = out.data() +
                      (ckpt::BoxIndex(tensor.shape, box, run.tensor_begin) - begin) * element_bytes;
      const int64_t stop = at + run.elements * element_bytes;
      while (status.ok() && at < stop) {
        const int64_t block = at / ckpt::kBlockBytes;
        if (block != loaded) {
          status = ReadBlock(tensor, chunk, block, buffer);
          loaded = block;
          continue;
        }
        const int64_t in_block = at - block * ckpt::kBlockBytes;
        const int64_t bytes = std::min(static_cast<int64_t>(buffer.size()) - in_block, stop - at);
        std::memcpy(to, buffer.data() + in_block, Size(bytes));
        to += bytes;
        at += bytes;
        copied += bytes;
      }
    };
    for (const Box& part : wanted) {
      const Box common = Intersect(chunk.box, part);
      if (!IsEmpty(common)) {
        ckpt::VisitBoxRuns(tensor.shape, common, copy);
      }
    }
    RETURN_IF_ERROR(status);
  }
  CHECK_EQ(copied, static_cast<int64_t>(out.size()));  // the manifest's cover is proven
  return absl::OkStatus();
}

absl::Status CommittedStep::VisitChunk(const ckpt::TensorRecord& tensor,
                                       const ckpt::ChunkRecord& chunk,
                                       const BlockVisitor& visit) {
  std::vector<std::byte> buffer;
  for (int64_t block = 0; block * ckpt::kBlockBytes < chunk.bytes; ++block) {
    RETURN_IF_ERROR(ReadBlock(tensor, chunk, block, buffer));
    RETURN_IF_ERROR(visit(block * ckpt::kBlockBytes, buffer));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CommittedStep::ReadSmallFile(const ckpt::FileRecord& file) const {
  const absl::StatusOr<std::string> contents =
      ReadFile(*store_, JoinPath(directory_, file.path), file.size);
  if (absl::IsNotFound(contents.status())) {
    return absl::DataLossError(
        absl::StrCat(store_->Locate(directory_), ": ", file.path, ": missing"));
  }
  RETURN_IF_ERROR(contents.status());
  if (static_cast<int64_t>(contents->size()) != file.size ||
      Crc32c(0, contents->data(), contents->size()) != file.crc32c) {
    return absl::DataLossError(absl::StrCat(
        store_->Locate(directory_), ": ", file.path, ": size or checksum is not the manifest's"));
  }
  return contents;
}

}  // namespace ravel::store
