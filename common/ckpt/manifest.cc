// Checks what a manifest claims before any data file is opened: paths stay inside the step, sizes
// add up, chunks of a file do not overlap, boxes of a tensor cover it exactly once. The cover proof
// is simple because chunks are rectangles: each is in bounds, no two intersect, and their volumes
// add up to the tensor's, so nothing is missing. A manifest may come from a damaged disk or another
// program, so every number is bounded before it is multiplied.

#include "common/ckpt/manifest.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "common/check.h"
#include "common/ckpt/digest.h"
#include "common/plain_text.h"
#include "common/signed_size.h"

namespace ravel::ckpt {
namespace {

constexpr size_t kMaxDimensions = 8;

absl::Status FileError(const FileRecord& file, std::string_view what) {
  return absl::DataLossError(absl::StrCat("manifest: file ", file.path, ": ", std::string(what)));
}

absl::Status TensorError(const TensorRecord& tensor, std::string_view what) {
  return absl::DataLossError(
      absl::StrCat("manifest: tensor ", tensor.name, ": ", std::string(what)));
}

// A relative path that stays inside the step and cannot be taken for one of its own files.
bool SafePath(std::string_view path) {
  if (path.empty() || path.size() > 1024 || path.find('\0') != std::string_view::npos) {
    return false;
  }
  const std::vector<std::string> parts = absl::StrSplit(std::string(path), '/');
  for (const std::string& part : parts) {
    if (part.empty() || part == "." || part == "..") {
      return false;
    }
  }
  return parts.size() >= 2;
}

// How the step was computed: what people are shown and a resume compares.
absl::Status CheckOrigin(const Manifest& manifest) {
  if (manifest.numerics.size() > kMaxNumericsBytes || HasControlText(manifest.numerics)) {
    return absl::DataLossError(absl::StrCat(
        "manifest: numerics: expected plain text of at most ", kMaxNumericsBytes, " bytes"));
  }
  int64_t ranks = 1;
  std::set<std::string_view> names;
  for (const MeshAxisRecord& axis : manifest.mesh) {
    if (axis.name.empty() || HasControlText(axis.name) || !names.insert(axis.name).second) {
      return absl::DataLossError(absl::StrCat(
          "manifest: mesh: axis ", names.size(), ": expected a plain name of its own"));
    }
    if (axis.size < 1 || axis.size > kMaxMeshRanks / ranks) {
      return absl::DataLossError(
          absl::StrCat("manifest: mesh: axis ", axis.name, ": impossible size ", axis.size));
    }
    ranks *= axis.size;
  }
  return absl::OkStatus();
}

// Digests of weights that the step has.
absl::Status CheckQuant(const Manifest& manifest) {
  const QuantRecord& quant = manifest.quant;
  if (quant.recipe.empty() != quant.tensors.empty() || HasControlText(quant.recipe) ||
      HasControlText(quant.rounding) || !(quant.amax_epsilon >= 0 && quant.amax_epsilon <= 1)) {
    return absl::DataLossError("manifest: quant: expected a recipe, and the tensors that it has");
  }
  std::set<std::string_view> names;
  for (const QuantizedRecord& quantized : quant.tensors) {
    const TensorRecord* tensor = manifest.FindTensor(quantized.name);
    if (tensor == nullptr || tensor->role != TensorRole::kParam || tensor->shape.size() != 2 ||
        quantized.site < 0 || !names.insert(quantized.name).second) {
      return absl::DataLossError(absl::StrCat(
          "manifest: quant: ", quantized.name, ": expected a matrix of the step, named once"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFiles(const Manifest& manifest) {
  const FileRecord* previous = nullptr;
  int64_t total = 0;
  for (const FileRecord& file : manifest.files) {
    if (!SafePath(file.path)) {
      return FileError(file, "expected a relative path of a file in a folder");
    }
    if (previous != nullptr && !(previous->path < file.path)) {
      return FileError(file, "files are not in order, or a path is repeated");
    }
    if (file.size < 0 || file.header_bytes < 0 || file.header_bytes > file.size ||
        __builtin_add_overflow(total, file.size, &total)) {
      return FileError(file, "impossible size");
    }
    previous = &file;
  }
  return absl::OkStatus();
}

absl::Status CheckChunk(const Manifest& manifest,
                        const TensorRecord& tensor,
                        const ChunkRecord& chunk) {
  if (chunk.file < 0 || Size(chunk.file) >= manifest.files.size()) {
    return TensorError(tensor, absl::StrCat("file index ", chunk.file, " is out of range"));
  }
  const FileRecord& file = At(manifest.files, chunk.file);
  const int64_t expected = ElementCount(chunk.box.length) * DTypeBytes(tensor.stored_dtype);
  if (chunk.bytes != expected) {
    return TensorError(
        tensor,
        absl::StrCat(
            "a chunk in ", file.path, " has ", chunk.bytes, " bytes, expected ", expected));
  }
  if (file.header_bytes == 0 || chunk.data_offset < file.header_bytes ||
      chunk.data_offset > file.size || chunk.bytes > file.size - chunk.data_offset) {
    return TensorError(tensor, absl::StrCat("a chunk lies outside the data of ", file.path));
  }
  if (static_cast<int64_t>(chunk.block_crc32c.size()) != DivCeil(chunk.bytes, kBlockBytes)) {
    return TensorError(
        tensor,
        absl::StrCat(
            "a chunk in ", file.path, " has ", chunk.block_crc32c.size(), " block checksums"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const Manifest& manifest, const TensorRecord& tensor) {
  const auto role = static_cast<int>(tensor.role);
  if (tensor.name.empty() || role < 1 || role > kMaxTensorRole ||
      tensor.shape.size() > kMaxDimensions) {
    return TensorError(tensor, "expected a name, a known role and at most 8 dimensions");
  }
  int64_t bytes = DTypeBytes(tensor.stored_dtype);
  for (const int64_t size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      return TensorError(tensor, "impossible shape");
    }
  }
  std::vector<Box> boxes;
  const ChunkRecord* previous = nullptr;
  for (const ChunkRecord& chunk : tensor.chunks) {
    boxes.push_back(chunk.box);
    if (previous != nullptr && !(previous->box.offset < chunk.box.offset)) {
      return TensorError(tensor, "chunks are not in order of their offsets");
    }
    previous = &chunk;
  }
  RETURN_IF_ERROR(Annotate(ProveBoxCover(tensor.shape, std::move(boxes)),
                           absl::StrCat("manifest: tensor ", tensor.name)));
  for (const ChunkRecord& chunk : tensor.chunks) {
    RETURN_IF_ERROR(CheckChunk(manifest, tensor, chunk));
  }
  return absl::OkStatus();
}

// The chunks of each file, side by side from the header to the end.
absl::Status CheckFileCover(const Manifest& manifest) {
  struct Extent {
    int file;
    int64_t begin;
    int64_t end;
    bool operator<(const Extent& other) const {
      return std::pair(file, begin) < std::pair(other.file, other.begin);
    }
  };
  std::vector<Extent> extents;
  for (const TensorRecord& tensor : manifest.tensors) {
    for (const ChunkRecord& chunk : tensor.chunks) {
      extents.push_back({chunk.file, chunk.data_offset, chunk.data_offset + chunk.bytes});
    }
  }
  std::sort(extents.begin(), extents.end());
  size_t at = 0;
  for (size_t index = 0; index < manifest.files.size(); ++index) {
    const FileRecord& file = manifest.files[index];
    if (file.header_bytes == 0) {
      continue;
    }
    int64_t position = file.header_bytes;
    for (; at < extents.size() && Size(extents[at].file) == index; ++at) {
      if (extents[at].begin != position) {
        return FileError(file, absl::StrCat("chunks leave a hole or overlap at byte ", position));
      }
      position = extents[at].end;
    }
    if (position != file.size) {
      return FileError(file, absl::StrCat("chunks end at byte ", position, " of ", file.size));
    }
  }
  return absl::OkStatus();
}

}  // namespace

const TensorRecord* Manifest::FindTensor(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name, [](const TensorRecord& tensor, std::string_view key) {
        return tensor.name < key;
      });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

const Blob* Manifest::FindBlob(std::string_view name) const {
  for (const Blob& blob : blobs) {
    if (blob.name == name) {
      return &blob;
    }
  }
  return nullptr;
}

int64_t Manifest::total_bytes() const {
  int64_t bytes = 0;
  for (const FileRecord& file : files) {
    bytes += file.size;
  }
  return bytes;
}

int64_t Manifest::ranks() const {
  int64_t ranks = mesh.empty() ? 0 : 1;
  for (const MeshAxisRecord& axis : mesh) {
    ranks *= axis.size;
  }
  return ranks;
}

absl::Status ValidateManifest(const Manifest& manifest) {
  if (manifest.format_version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("manifest: format version ",
                                                      manifest.format_version,
                                                      "; this program reads version ",
                                                      kFormatVersion));
  }
  if (manifest.dual) {
    return absl::FailedPreconditionError(
        "manifest: written with dual=on; this program reads dual=off");
  }
  if (manifest.step < 0 || manifest.epoch < 0 || manifest.attempt < 0) {
    return absl::DataLossError("manifest: step, epoch and attempt must not be negative");
  }
  RETURN_IF_ERROR(CheckOrigin(manifest));
  RETURN_IF_ERROR(CheckFiles(manifest));
  std::vector<TensorDigest> digests;
  const TensorRecord* previous = nullptr;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (previous != nullptr && !(previous->name < tensor.name)) {
      return TensorError(tensor, "tensors are not in order, or a name is repeated");
    }
    RETURN_IF_ERROR(CheckTensor(manifest, tensor));
    digests.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.digest64});
    previous = &tensor;
  }
  for (const TensorRecord& tensor : manifest.tensors) {
    if (!tensor.tied_to.empty() && manifest.FindTensor(tensor.tied_to) == nullptr) {
      return TensorError(tensor,
                         absl::StrCat("tied to ", tensor.tied_to, ", which does not exist"));
    }
  }
  RETURN_IF_ERROR(CheckFileCover(manifest));
  RETURN_IF_ERROR(CheckQuant(manifest));
  std::set<std::string_view> names;
  for (const Blob& blob : manifest.blobs) {
    if (blob.name.empty() || !names.insert(blob.name).second ||
        static_cast<int64_t>(blob.content.size()) > kMaxBlobBytes) {
      return absl::DataLossError(
          absl::StrCat("manifest: blob \"", blob.name, "\": empty or repeated name, or too large"));
    }
  }
  if (StateDigest(std::move(digests)) != manifest.state_digest) {
    return absl::DataLossError("manifest: state_digest does not fit the tensors");
  }
  return absl::OkStatus();
}

}  // namespace ravel::ckpt
