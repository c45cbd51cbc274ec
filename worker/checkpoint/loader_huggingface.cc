// Reads a Hugging Face directory into this rank's shards. Open reads all headers and compares every
// tensor (name, shape, dtype) with the inventory before any weight is read, and lists all
// differences at once: a wrong directory fails early and completely. ReadPieces joins runs of a
// piece that lie close together into one read of at most 4 MiB, since a gap of a page costs less
// than another call; values are converted to fp32 on the way, or read in place if they are fp32.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/ckpt/box_runs.h"
#include "common/ckpt/manifest.h"
#include "common/ckpt/safetensors.h"
#include "common/json.h"
#include "common/model/architecture/architecture.h"
#include "common/signed_size.h"
#include "common/store/file_store.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

constexpr int64_t kReadBytes = 4 << 20;  // of one call
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxListed = 8;
constexpr int64_t kMostFiles = 1 << 16;
constexpr std::string_view kShardingInfo = "DCP_SHARDING_INFO";
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// `boxes`: the file must say which boxes it holds.
absl::StatusOr<std::vector<ckpt::SafetensorsEntry>> ReadHeader(const store::FileReader& reader,
                                                               bool boxes) {
  std::string header(8, '\0');
  const auto bytes = [&header](size_t from) {
    return std::as_writable_bytes(std::span(header.data() + from, header.size() - from));
  };
  if (reader.size() >= 8) {
    RETURN_IF_ERROR(reader.ReadAt(0, bytes(0)));
  }
  ASSIGN_OR_RETURN(const int64_t json_bytes, ckpt::SafetensorsJsonBytes(header, reader.size()));
  header.resize(8 + Size(json_bytes));
  RETURN_IF_ERROR(reader.ReadAt(8, bytes(8)));
  ASSIGN_OR_RETURN(ckpt::SafetensorsFile file, ckpt::ParseSafetensorsHeader(header, reader.size()));
  const auto& metadata = file.metadata;
  if (boxes && std::none_of(metadata.begin(), metadata.end(), [](const auto& entry) {
        return entry.first == kShardingInfo;
      })) {
    return absl::InvalidArgumentError(
        "no DCP_SHARDING_INFO, and neither model.safetensors nor its index is there");
  }
  for (ckpt::SafetensorsEntry& entry : file.entries) {
    entry.begin += file.header_bytes;
    entry.end += file.header_bytes;
  }
  return std::move(file.entries);
}

// weight_map of the index: file by tensor.
absl::StatusOr<std::map<std::string, std::string>> ReadWeightMap(const store::ObjectStore& store) {
  ASSIGN_OR_RETURN(const std::string text, store::ReadFile(store, kIndexFile, kMaxIndexBytes));
  absl::StatusOr<json::Value> index = json::Parse(text);
  RETURN_IF_ERROR(Annotate(index.status(), kIndexFile));
  const json::Value* weight_map = index->Find("weight_map");
  if (weight_map == nullptr || !weight_map->is_object() || weight_map->AsObject().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        std::string(kIndexFile), ": weight_map: expected an object with an entry for each tensor"));
  }
  std::map<std::string, std::string> files;
  for (const json::Member& member : weight_map->AsObject()) {
    const bool plain = member.value.is_string() &&
                       absl::EndsWith(member.value.AsString(), ".safetensors") &&
                       member.value.AsString().find('/') == std::string::npos;
    if (!plain) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(kIndexFile),
                       ": weight_map: ",
                       member.name,
                       ": expected the name of a .safetensors file beside it"));
    }
    files[member.name] = member.value.AsString();
  }
  return files;
}

// Buffers that older files hold beside the weights (rotary frequencies; GPT-2's causal masks), and
// the second name of a tied head.
bool IsIgnored(const plan::ModelInventory& inventory, const std::string& name) {
  for (const char* buffer : {".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"}) {
    if (absl::EndsWith(name, buffer)) {
      return true;
    }
  }
  return name == "lm_head.weight" && inventory.config.tie_word_embeddings;
}

// By canonical name, or by that without the base model's prefix: files of a bare model have it.
plan::TensorId FindTensor(const plan::ModelInventory& inventory, const std::string& name) {
  const plan::TensorId found = inventory.FindTensor(name);
  if (found >= 0) {
    return found;
  }
  const plan::Architecture& architecture = plan::ArchitectureOf(inventory.config.architecture);
  return inventory.FindTensor(absl::StrCat(std::string(architecture.base_prefix), name));
}

void Convert(DType dtype, std::span<const std::byte> bytes, std::span<float> out) {
  if (dtype == DType::kF32) {
    std::memcpy(out.data(), bytes.data(), out.size_bytes());
    return;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
    out[i] = dtype == DType::kBF16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  }
}

// The runs of a piece that lie in a box, by their place in the box: ascending. Of the whole tensor
// they are the piece's runs; else each is part of a row of the innermost dimension, joined with the
// one before where both are neighbours.
void VisitCommonRuns(const Shape& shape,
                     const Box& box,
                     const plan::OwnedPiece& piece,
                     const std::function<void(plan::OwnedRun)>& visit) {
  if (box == WholeBox(shape)) {
    piece.VisitRuns(shape, visit);
    return;
  }
  plan::OwnedRun open;
  piece.VisitRuns(shape, [&](const plan::OwnedRun& run) {
    for (const Box& part : RangeToBoxes(shape, run.first, run.first + run.elements)) {
      const Box common = Intersect(part, box);
      if (IsEmpty(common)) {
        continue;
      }
      ckpt::VisitBoxRuns(shape, common, [&](const ckpt::BoxRun& in_tensor) {
        // Rows of the box may be shorter than the tensor's.
        const int64_t row = shape.empty() ? 1 : common.length.back();
        for (int64_t at = 0; at < in_tensor.elements; at += row) {
          const int64_t index = in_tensor.tensor_begin + at;
          const plan::OwnedRun next = {.first = ckpt::BoxIndex(shape, box, index),
                                       .offset = run.offset + index - run.first,
                                       .elements = std::min(row, in_tensor.elements - at)};
          if (open.elements > 0 && open.first + open.elements == next.first &&
              open.offset + open.elements == next.offset) {
            open.elements += next.elements;
            continue;
          }
          if (open.elements > 0) {
            visit(open);
          }
          open = next;
        }
      });
    }
  });
  if (open.elements > 0) {
    visit(open);
  }
}

}  // namespace

absl::StatusOr<HuggingFaceLoader> HuggingFaceLoader::Open(std::string_view directory,
                                                          const plan::ModelInventory* inventory) {
  std::error_code error;
  const std::filesystem::path root = std::filesystem::absolute(std::string(directory), error);
  if (error || directory.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.from: \"", std::string(directory), "\": expected a directory"));
  }
  HuggingFaceLoader loader(inventory);
  loader.store_ = std::make_unique<store::FileStore>(root.string());
  RETURN_IF_ERROR(Annotate(loader.OpenFiles(), root.string()));
  return loader;
}

absl::StatusOr<std::set<std::string>> HuggingFaceLoader::FindFiles(
    std::map<std::string, std::string>& weight_map) {
  std::set<std::string> names;
  ASSIGN_OR_RETURN(const bool sharded, store::Exists(*store_, kIndexFile));
  if (sharded) {
    ASSIGN_OR_RETURN(weight_map, ReadWeightMap(*store_));
    for (const auto& [tensor, file] : weight_map) {
      names.insert(file);
    }
    return names;
  }
  ASSIGN_OR_RETURN(const bool single, store::Exists(*store_, kSingleFile));
  if (single) {
    names.insert(std::string(kSingleFile));
    return names;
  }
  boxes_ = true;
  ASSIGN_OR_RETURN(const std::vector<store::ListedEntry> listed, store_->List(""));
  for (const store::ListedEntry& entry : listed) {
    if (!entry.is_directory && absl::EndsWith(entry.name, ".safetensors")) {
      names.insert(entry.name);
    }
  }
  if (names.empty() || std::ssize(names) > kMostFiles) {
    return absl::NotFoundError(absl::StrCat(
        "neither model.safetensors nor model.safetensors.index.json is there, nor 1 to ",
        kMostFiles,
        " other .safetensors files (other weight formats are not read)"));
  }
  return names;
}

absl::Status HuggingFaceLoader::OpenFiles() {
  std::map<std::string, std::string> weight_map;
  ASSIGN_OR_RETURN(const std::set<std::string> names, FindFiles(weight_map));
  std::vector<std::vector<ckpt::SafetensorsEntry>> entries;
  std::map<std::string, std::string> found;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(std::unique_ptr<store::FileReader> reader, store_->Open(name));
    absl::StatusOr<std::vector<ckpt::SafetensorsEntry>> header = ReadHeader(*reader, boxes_);
    RETURN_IF_ERROR(Annotate(header.status(), name));
    for (const ckpt::SafetensorsEntry& entry : *header) {
      if (!found.emplace(entry.key, name).second && !boxes_) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", entry.key, " is in ", found[entry.key], " and in ", name));
      }
    }
    entries.push_back(*std::move(header));
    files_.push_back({name, std::move(reader)});
  }
  for (const auto& [tensor, file] : weight_map) {
    const auto at = found.find(tensor);
    if (at == found.end() || at->second != file) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(kIndexFile), ": weight_map: ", tensor, " is not in ", file));
    }
  }
  return MatchInventory(entries);
}

std::string HuggingFaceLoader::CompareSources(plan::TensorId tensor) const {
  const plan::TensorSpec& expected = inventory_->tensors[tensor];
  const std::vector<Source>& sources = sources_[tensor];
  if (sources.empty()) {
    return absl::StrCat(expected.name, ": missing");
  }
  std::vector<Box> boxes;
  for (const Source& source : sources) {
    if (source.dtype != DType::kF32 && source.dtype != DType::kBF16 &&
        source.dtype != DType::kF16) {
      return absl::StrCat(expected.name,
                          ": dtype ",
                          std::string(DTypeName(source.dtype)),
                          ", expected F32, BF16 or F16");
    }
    boxes.push_back(source.box);
  }
  if (!boxes_) {
    return boxes.front() == WholeBox(expected.shape) ? ""
                                                     : absl::StrCat(expected.name,
                                                                    ": shape ",
                                                                    ShapeText(boxes.front().length),
                                                                    ", expected ",
                                                                    ShapeText(expected.shape));
  }
  const absl::Status cover = ckpt::ProveBoxCover(expected.shape, std::move(boxes));
  return cover.ok() ? "" : absl::StrCat(expected.name, ": ", std::string(cover.message()));
}

absl::Status HuggingFaceLoader::MatchInventory(
    const std::vector<std::vector<ckpt::SafetensorsEntry>>& entries) {
  std::vector<std::string> differences;
  plan::IdVector<plan::TensorId, std::string> key_of(inventory_->tensors.size());
  sources_.resize(inventory_->tensors.size());
  for (size_t file = 0; file < entries.size(); ++file) {
    for (const ckpt::SafetensorsEntry& entry : entries[file]) {
      const plan::TensorId tensor = FindTensor(*inventory_, entry.key);
      if (tensor < 0) {
        if (!IsIgnored(*inventory_, entry.key)) {
          differences.push_back(absl::StrCat(entry.key, ": not a tensor of the model"));
        }
        continue;
      }
      if (!key_of[tensor].empty() && key_of[tensor] != entry.key) {
        differences.push_back(
            absl::StrCat(entry.key, ": there with and without the base model's prefix"));
        continue;
      }
      key_of[tensor] = entry.key;
      if (ElementCount(entry.shape) > 0 || !boxes_) {  // ranks may have an empty part
        sources_[tensor].push_back(
            {file, entry.dtype, entry.begin, {entry.saved_offset, entry.shape}});
      }
    }
  }
  for (const plan::TensorId tensor : sources_.ids()) {
    if (std::string difference = CompareSources(tensor); !difference.empty()) {
      differences.push_back(std::move(difference));
    }
  }
  if (differences.empty()) {
    return absl::OkStatus();
  }
  const size_t count = differences.size();
  if (count > kMaxListed) {
    differences.resize(kMaxListed);
    differences.push_back(absl::StrCat("and ", count - kMaxListed, " more"));
  }
  return absl::FailedPreconditionError(absl::StrCat("the weights do not fit config.json, ",
                                                    count,
                                                    " difference(s): ",
                                                    absl::StrJoin(differences, "; ")));
}

absl::Status HuggingFaceLoader::ReadPieces(std::span<const plan::OwnedPiece> pieces,
                                           std::span<float> shard) {
  for (const plan::OwnedPiece& piece : pieces) {
    for (const Source& source : sources_[piece.tensor]) {
      RETURN_IF_ERROR(
          Annotate(ReadSource(source, piece, shard), inventory_->tensors[piece.tensor].name));
    }
  }
  return absl::OkStatus();
}

absl::Status HuggingFaceLoader::ReadSource(const Source& source,
                                           const plan::OwnedPiece& piece,
                                           std::span<float> shard) {
  const int64_t element_bytes = DTypeBytes(source.dtype);
  const int64_t most = kReadBytes / element_bytes;
  const int64_t page = kPageBytes / element_bytes;
  Read read;
  absl::Status status;
  const auto flush = [&] {
    if (status.ok() && !read.runs.empty()) {
      status = Execute(source, read, shard);
    }
    read.runs.clear();
  };
  VisitCommonRuns(
      inventory_->tensors[piece.tensor].shape, source.box, piece, [&](plan::OwnedRun run) {
        const int64_t gap = run.first - read.end;
        if (gap > std::max(page, run.elements) || run.first + run.elements - read.first > most) {
          flush();
        }
        while (run.elements > 0) {
          const int64_t elements = std::min(run.elements, most);
          if (read.runs.empty()) {
            read.first = run.first;
          }
          read.end = run.first + elements;
          read.runs.push_back({.first = run.first, .offset = run.offset, .elements = elements});
          run = {run.first + elements, run.offset + elements, run.elements - elements};
          if (run.elements > 0) {
            flush();
          }
        }
      });
  flush();
  return status;
}

absl::Status HuggingFaceLoader::Execute(const Source& source,
                                        const Read& read,
                                        std::span<float> shard) {
  const File& file = files_[source.file];
  const int64_t element_bytes = DTypeBytes(source.dtype);
  const int64_t bytes = (read.end - read.first) * element_bytes;
  const auto target = [&](const plan::OwnedRun& run) {
    return Part(shard, run.offset, run.elements);
  };
  const bool direct = source.dtype == DType::kF32 && read.runs.size() == 1;
  buffer_.resize(direct ? 0 : Size(bytes));
  RETURN_IF_ERROR(file.reader->ReadAt(
      source.offset + read.first * element_bytes,
      direct ? std::as_writable_bytes(target(read.runs.front())) : std::span(buffer_)));
  bytes_read_ += bytes;
  if (!direct) {
    for (const plan::OwnedRun& run : read.runs) {
      Convert(source.dtype,
              std::span(buffer_).subspan(Size((run.first - read.first) * element_bytes)),
              target(run));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::checkpoint
