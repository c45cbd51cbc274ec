// Verifies a step and reports all problems instead of the first. Chunks are visited in the order
// they have in their files, so each file is read once from begin to end and its own checksum falls
// out of the same pass. Digests of tensors are sums over their elements and are compared at the
// end, for tensors of which everything was read. Files that the manifest does not know are
// reported, too.

#include "common/store/step_verifier.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/ckpt/digest.h"
#include "common/ckpt/manifest.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/crc32c.h"
#include "common/signed_size.h"
#include "common/store/committed_step.h"

namespace ravel::store {
namespace {

struct ChunkRef {
  size_t tensor = 0;
  const ckpt::ChunkRecord* chunk = nullptr;
};

class Verifier {
 public:
  Verifier(const ObjectStore& store, std::string_view directory, VerifyDepth depth)
      : store_(store), directory_(directory), depth_(depth) {}

  VerifyReport Run() {
    absl::StatusOr<CommittedStep> step = CommittedStep::Open(&store_, directory_);
    if (!step.ok()) {
      Report({.what = std::string(step.status().message())});
      return std::move(report_);
    }
    manifest_ = &step->manifest();
    report_.step = manifest_->step;
    report_.files = static_cast<int64_t>(manifest_->files.size());
    report_.tensors = static_cast<int64_t>(manifest_->tensors.size());
    report_.bytes = manifest_->total_bytes();
    sums_.assign(manifest_->tensors.size(), 0);
    SortChunks();
    for (size_t file = 0; file < manifest_->files.size(); ++file) {
      CheckFile(manifest_->files[file], chunks_[file]);
    }
    if (depth_ == VerifyDepth::kDeep) {
      CheckDigests();
    }
    FindStrayFiles();
    return std::move(report_);
  }

 private:
  void Report(StepProblem problem) {
    if (report_.problems.size() < Size(kMaxProblems)) {
      report_.problems.push_back(std::move(problem));
    }
  }

  // Chunks of each file, in file order.
  void SortChunks() {
    chunks_.resize(manifest_->files.size());
    for (size_t tensor = 0; tensor < manifest_->tensors.size(); ++tensor) {
      for (const ckpt::ChunkRecord& chunk : manifest_->tensors[tensor].chunks) {
        At(chunks_, chunk.file).push_back({tensor, &chunk});
      }
    }
    for (std::vector<ChunkRef>& list : chunks_) {
      std::sort(list.begin(), list.end(), [](const ChunkRef& a, const ChunkRef& b) {
        return a.chunk->data_offset < b.chunk->data_offset;
      });
    }
  }

  void Skip(const std::vector<ChunkRef>& chunks) {
    for (const ChunkRef& ref : chunks) {
      unread_.insert(ref.tensor);
    }
  }

  void CheckFile(const ckpt::FileRecord& file, const std::vector<ChunkRef>& chunks) {
    const absl::StatusOr<std::unique_ptr<FileReader>> reader =
        store_.Open(JoinPath(directory_, file.path));
    if (!reader.ok() || (*reader)->size() != file.size) {
      Skip(chunks);
      Report(
          {.file = file.path,
           .what = absl::IsNotFound(reader.status()) ? "missing"
                   : !reader.ok()
                       ? std::string(reader.status().message())
                       : absl::StrCat((*reader)->size(), " bytes, the manifest says ", file.size),
           .unread = true});
      return;
    }
    const size_t problems = report_.problems.size();
    uint32_t crc = 0;
    if (file.header_bytes > 0) {
      CheckHeader(file, **reader, chunks, crc);
    } else if (!CrcOfRange(file, **reader, 0, file.size, crc)) {
      return;
    }
    if (depth_ == VerifyDepth::kQuick && file.header_bytes > 0) {
      return;
    }
    for (const ChunkRef& ref : chunks) {
      CheckChunk(file, **reader, ref, crc);
    }
    if (report_.problems.size() == problems && crc != file.crc32c) {
      Report({.file = file.path,
              .what = absl::StrFormat("crc32c %08x, the manifest says %08x", crc, file.crc32c)});
    }
  }

  // Continues `crc` over a range; false after reporting that it could not be read.
  bool CrcOfRange(const ckpt::FileRecord& file,
                  const FileReader& reader,
                  int64_t begin,
                  int64_t end,
                  uint32_t& crc) {
    for (int64_t at = begin; at < end; at += ckpt::kBlockBytes) {
      buffer_.resize(Size(std::min(ckpt::kBlockBytes, end - at)));
      const absl::Status status = reader.ReadAt(at, buffer_);
      if (!status.ok()) {
        Report({.file = file.path, .what = std::string(status.message()), .unread = true});
        return false;
      }
      crc = Crc32c(crc, buffer_.data(), buffer_.size());
    }
    return true;
  }

  void CheckHeader(const ckpt::FileRecord& file,
                   const FileReader& reader,
                   const std::vector<ChunkRef>& chunks,
                   uint32_t& crc) {
    std::string header(Size(file.header_bytes), '\0');
    absl::Status status =
        reader.ReadAt(0, std::as_writable_bytes(std::span(header.data(), header.size())));
    const bool unread = !status.ok();
    crc = Crc32c(0, header.data(), header.size());
    if (status.ok()) {
      const absl::StatusOr<ckpt::SafetensorsFile> parsed =
          ckpt::ParseSafetensorsHeader(header, file.size);
      status = parsed.ok() ? CompareHeader(*parsed, file, chunks) : parsed.status();
    }
    if (!status.ok()) {
      Report({.file = file.path, .what = std::string(status.message()), .unread = unread});
    }
  }

  absl::Status CompareHeader(const ckpt::SafetensorsFile& header,
                             const ckpt::FileRecord& file,
                             const std::vector<ChunkRef>& chunks) const {
    if (header.header_bytes != file.header_bytes || header.entries.size() != chunks.size()) {
      return absl::DataLossError(absl::StrCat("header of ",
                                              header.header_bytes,
                                              " bytes with ",
                                              header.entries.size(),
                                              " tensors, the manifest says ",
                                              file.header_bytes,
                                              " and ",
                                              chunks.size()));
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      const ckpt::SafetensorsEntry& entry = header.entries[i];
      const ckpt::TensorRecord& tensor = manifest_->tensors[chunks[i].tensor];
      const ckpt::ChunkRecord& chunk = *chunks[i].chunk;
      const bool same = entry.key == tensor.name && entry.dtype == tensor.stored_dtype &&
                        entry.shape == chunk.box.length && entry.saved_offset == chunk.box.offset &&
                        header.header_bytes + entry.begin == chunk.data_offset;
      if (!same) {
        return absl::DataLossError(absl::StrCat(
            "header: key ", entry.key, " is not what the manifest says of tensor ", tensor.name));
      }
    }
    return absl::OkStatus();
  }

  void CheckChunk(const ckpt::FileRecord& file,
                  const FileReader& reader,
                  const ChunkRef& ref,
                  uint32_t& file_crc) {
    const ckpt::TensorRecord& tensor = manifest_->tensors[ref.tensor];
    const ckpt::ChunkRecord& chunk = *ref.chunk;
    uint32_t chunk_crc = 0;
    bool good = true;
    for (int64_t offset = 0, block = 0; offset < chunk.bytes;
         offset += ckpt::kBlockBytes, ++block) {
      const int64_t end = std::min(offset + ckpt::kBlockBytes, chunk.bytes);
      uint32_t crc = 0;
      if (!CrcOfRange(file, reader, chunk.data_offset + offset, chunk.data_offset + end, crc)) {
        unread_.insert(ref.tensor);
        return;
      }
      const uint32_t expected = At(chunk.block_crc32c, block);
      if (crc != expected) {
        good = false;
        Report({.file = file.path,
                .tensor = tensor.name,
                .block = block,
                .what = absl::StrFormat("crc32c %08x, the manifest says %08x", crc, expected)});
      }
      chunk_crc = Crc32cCombine(chunk_crc, crc, static_cast<uint64_t>(end - offset));
      sums_[ref.tensor] += ckpt::DigestBoxPart(tensor.stored_dtype,
                                               tensor.shape,
                                               chunk.box,
                                               offset / DTypeBytes(tensor.stored_dtype),
                                               buffer_);
    }
    file_crc = Crc32cCombine(file_crc, chunk_crc, static_cast<uint64_t>(chunk.bytes));
    if (!good) {
      unread_.insert(ref.tensor);
    } else if (chunk_crc != chunk.crc32c) {
      Report({.file = file.path,
              .tensor = tensor.name,
              .what = "crc32c of the chunk is not the manifest's"});
    }
  }

  void CheckDigests() {
    for (size_t i = 0; i < manifest_->tensors.size(); ++i) {
      const ckpt::TensorRecord& tensor = manifest_->tensors[i];
      if (!unread_.contains(i) && sums_[i] != tensor.digest64) {
        Report({.tensor = tensor.name,
                .what = absl::StrFormat(
                    "digest64 %016x, the manifest says %016x", sums_[i], tensor.digest64)});
      }
    }
  }

  void FindStrayFiles() {
    std::set<std::string> known;
    for (const ckpt::FileRecord& file : manifest_->files) {
      known.insert(file.path);
    }
    for (const std::string_view folder : {ckpt::kModelFolder, ckpt::kOptimizerFolder}) {
      const absl::StatusOr<std::vector<ListedEntry>> entries =
          store_.List(JoinPath(directory_, folder));
      for (const ListedEntry& entry : entries.ok() ? *entries : std::vector<ListedEntry>{}) {
        const std::string path = JoinPath(folder, entry.name);
        if (absl::EndsWith(entry.name, ".safetensors") && !known.contains(path)) {
          report_.stray.push_back(path);
        }
      }
    }
  }

  const ObjectStore& store_;
  const std::string directory_;
  const VerifyDepth depth_;
  const ckpt::Manifest* manifest_ = nullptr;
  std::vector<std::vector<ChunkRef>> chunks_;  // by file
  std::vector<uint64_t> sums_;                 // digest64 by tensor
  std::set<size_t> unread_;                    // tensors whose digest would only repeat a problem
  std::vector<std::byte> buffer_;
  VerifyReport report_;
};

}  // namespace

std::string StepProblem::Text() const {
  std::string text = file;
  if (!tensor.empty()) {
    absl::StrAppend(&text, text.empty() ? "" : ": ", "tensor ", tensor);
  }
  if (block >= 0) {
    absl::StrAppend(&text, ", block ", block);
  }
  return absl::StrCat(text, text.empty() ? "" : ": ", what);
}

VerifyReport VerifyStep(const ObjectStore& store, std::string_view directory, VerifyDepth depth) {
  return Verifier(store, directory, depth).Run();
}

}  // namespace ravel::store
