// Writes a committed step as a Hugging Face directory. The step must match the architecture that
// config.json describes; tensors are then cut into files of limited size and converted in pieces,
// so memory stays small for any model. Every block read is verified against the manifest's
// checksums, and the finished files are read back before OUTPUT.part is renamed: an export that
// exists is whole.

#include "coordinator/ctl/checkpoints_export.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <ostream>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/strip.h>

#include "common/check.h"
#include "common/ckpt/safetensors.h"
#include "common/crc32c.h"
#include "common/json.h"
#include "common/model/model_inventory.h"
#include "common/store/committed_step.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/saves/checkpoint_pins.h"

namespace ravel::ctl {
namespace {

using store::JoinPath;

constexpr int64_t kReadElements = 16 << 20;

// A file of the export: its tensors in order, and what was written.
struct WeightFile {
  std::string name;
  std::vector<const ckpt::TensorRecord*> tensors;
  std::string header;
  int64_t size = 0;
  uint32_t crc32c = 0;
};

std::vector<ckpt::SafetensorsEntry> Entries(const WeightFile& file, DType dtype) {
  std::vector<ckpt::SafetensorsEntry> entries;
  for (const ckpt::TensorRecord* tensor : file.tensors) {
    entries.push_back(
        {.key = tensor->name, .dtype = dtype, .shape = tensor->shape, .saved_offset = {}});
  }
  ckpt::PlaceSafetensorsEntries(entries);
  return entries;
}

// Parameters by name, cut into files of at most `max_file_bytes` of data (a larger tensor has a
// file of its own).
std::vector<WeightFile> PlanFiles(const ckpt::Manifest& manifest,
                                  const CheckpointExportOptions& options) {
  std::vector<WeightFile> files;
  int64_t bytes = 0;
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    if (tensor.role != ckpt::TensorRole::kParam && tensor.role != ckpt::TensorRole::kBuffer) {
      continue;
    }
    const int64_t tensor_bytes = ElementCount(tensor.shape) * DTypeBytes(options.dtype);
    if (files.empty() || bytes + tensor_bytes > options.max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().tensors.push_back(&tensor);
    bytes += tensor_bytes;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1
                        ? "model.safetensors"
                        : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, files.size());
    files[i].header = ckpt::SafetensorsExportHeader(Entries(files[i], options.dtype));
  }
  return files;
}

// The step's tensors must be those of the architecture that config.json describes.
absl::Status CheckArchitecture(const std::string& config_json,
                               const std::vector<WeightFile>& files) {
  ASSIGN_OR_RETURN(const plan::ModelConfig config, plan::ParseHuggingFaceConfig(config_json));
  const plan::ModelInventory inventory =
      plan::BuildInventory(config, {.sequences = 1, .sequence_tokens = 1});
  size_t found = 0;
  for (const WeightFile& file : files) {
    for (const ckpt::TensorRecord* tensor : file.tensors) {
      const plan::TensorId index = inventory.FindTensor(tensor->name);
      if (index < 0 || inventory.tensors[index].shape != tensor->shape) {
        return absl::FailedPreconditionError(absl::StrCat(
            "hf/config.json: describes no tensor ", tensor->name, " ", ShapeText(tensor->shape)));
      }
      ++found;
    }
  }
  return found == inventory.tensors.size()
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat("hf/config.json: describes ",
                                                          inventory.tensors.size(),
                                                          " tensors, the step has ",
                                                          found));
}

// config.json with the dtype that the weights now have; everything else as it was.
absl::StatusOr<std::string> ConfigWithDType(const std::string& text, DType dtype) {
  ASSIGN_OR_RETURN(json::Value config, json::Parse(text));
  const char* name = dtype == DType::kBF16 ? "bfloat16" : "float32";
  const bool newer = config.Find("dtype") != nullptr;
  if (newer) {
    config.Set("dtype", name);
  }
  if (!newer || config.Find("torch_dtype") != nullptr) {
    config.Set("torch_dtype", name);
  }
  return json::SerializePretty(config) + "\n";
}

class Exporter {
 public:
  Exporter(store::CommittedStep step,
           const CheckpointExportOptions& options,
           store::FileStore* store,
           std::string part)
      : step_(std::move(step)), options_(options), store_(store), part_(std::move(part)) {}

  absl::Status Run() {
    files_ = PlanFiles(step_.manifest(), options_);
    RETURN_IF_ERROR(ReadSmallFiles());
    RETURN_IF_ERROR(store_->MakeDirectory(part_));
    for (const auto& [name, content] : small_files_) {
      RETURN_IF_ERROR(WriteSmallFile(name, content));
    }
    for (WeightFile& file : files_) {
      RETURN_IF_ERROR(WriteWeights(file));
    }
    if (files_.size() > 1) {
      RETURN_IF_ERROR(WriteSmallFile("model.safetensors.index.json", IndexJson()));
    }
    for (const WeightFile& file : files_) {
      RETURN_IF_ERROR(Annotate(ReadBack(file), file.name));
    }
    return store_->SyncDirectory(part_);
  }

  std::string Summary() const {
    int64_t bytes = 0;
    size_t tensors = 0;
    for (const WeightFile& file : files_) {
      bytes += file.size;
      tensors += file.tensors.size();
    }
    return absl::StrCat("step ",
                        step_.manifest().step,
                        ": ",
                        tensors,
                        " tensors, ",
                        std::string(DTypeName(options_.dtype)),
                        ", ",
                        FormatBytes(bytes),
                        " in ",
                        files_.size(),
                        files_.size() == 1 ? " file" : " files");
  }

 private:
  // config.json and what else lies under hf/; checks that the export will be a whole model.
  absl::Status ReadSmallFiles() {
    std::string config;
    for (const ckpt::FileRecord& file : step_.manifest().files) {
      const std::string prefix = absl::StrCat(std::string(ckpt::kHuggingFaceFolder), "/");
      if (file.header_bytes != 0 || file.path.compare(0, prefix.size(), prefix) != 0) {
        continue;
      }
      ASSIGN_OR_RETURN(std::string content, step_.ReadSmallFile(file));
      const std::string name = file.path.substr(prefix.size());
      if (name == "config.json") {
        config = content;
        RETURN_IF_ERROR(CheckArchitecture(config, files_));
        ASSIGN_OR_RETURN(content, ConfigWithDType(config, options_.dtype));
      }
      small_files_.emplace_back(name, std::move(content));
    }
    return config.empty() ? absl::FailedPreconditionError(
                                "the step holds no hf/config.json; it cannot be exported")
                          : absl::OkStatus();
  }

  absl::Status WriteSmallFile(const std::string& name, const std::string& content) {
    return store::PutNew(*store_, JoinPath(part_, name), content, "new");
  }

  absl::Status WriteWeights(WeightFile& file) {
    const std::vector<ckpt::SafetensorsEntry> entries = Entries(file, options_.dtype);
    file.size =
        static_cast<int64_t>(file.header.size()) + (entries.empty() ? 0 : entries.back().end);
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileWriter> writer,
                     store_->Create(JoinPath(part_, file.name), file.size));
    const auto append = [&](std::span<const std::byte> bytes) {
      file.crc32c = Crc32c(file.crc32c, bytes.data(), bytes.size());
      return writer->Append(bytes);
    };
    RETURN_IF_ERROR(append(std::as_bytes(std::span(file.header.data(), file.header.size()))));
    std::vector<float> values;
    std::vector<uint16_t> narrow;
    for (const ckpt::TensorRecord* tensor : file.tensors) {
      if (tensor->stored_dtype != DType::kF32) {
        return absl::UnimplementedError(absl::StrCat(tensor->name,
                                                     ": stored as ",
                                                     std::string(DTypeName(tensor->stored_dtype)),
                                                     "; only F32 is exported"));
      }
      const int64_t elements = ElementCount(tensor->shape);
      for (int64_t begin = 0; begin < elements; begin += kReadElements) {
        const int64_t end = std::min(begin + kReadElements, elements);
        values.resize(static_cast<size_t>(end - begin));
        RETURN_IF_ERROR(
            step_.ReadElements(*tensor, begin, end, std::as_writable_bytes(std::span(values))));
        if (options_.dtype == DType::kF32) {
          RETURN_IF_ERROR(append(std::as_bytes(std::span(values))));
          continue;
        }
        narrow.resize(values.size());
        std::transform(values.begin(), values.end(), narrow.begin(), FloatToBf16);
        RETURN_IF_ERROR(append(std::as_bytes(std::span(narrow))));
      }
    }
    return writer->Finish();
  }

  std::string IndexJson() const {
    json::Value weight_map = json::Object();
    int64_t total = 0;
    for (const WeightFile& file : files_) {
      for (const ckpt::TensorRecord* tensor : file.tensors) {
        weight_map.Set(tensor->name, file.name);
        total += ElementCount(tensor->shape) * DTypeBytes(options_.dtype);
      }
    }
    json::Value metadata;
    metadata.Set("total_size", total);
    json::Value index;
    index.Set("metadata", std::move(metadata));
    index.Set("weight_map", std::move(weight_map));
    return json::SerializePretty(index) + "\n";
  }

  absl::Status ReadBack(const WeightFile& file) const {
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> reader,
                     store_->Open(JoinPath(part_, file.name)));
    if (reader->size() != file.size) {
      return absl::DataLossError(
          absl::StrCat("has ", reader->size(), " bytes, ", file.size, " were written"));
    }
    std::string header(file.header.size(), '\0');
    RETURN_IF_ERROR(
        reader->ReadAt(0, std::as_writable_bytes(std::span(header.data(), header.size()))));
    RETURN_IF_ERROR(ckpt::ParseSafetensorsHeader(header, file.size).status());
    uint32_t crc = 0;
    std::vector<std::byte> buffer;
    for (int64_t at = 0; at < file.size; at += ckpt::kBlockBytes) {
      buffer.resize(static_cast<size_t>(std::min(ckpt::kBlockBytes, file.size - at)));
      RETURN_IF_ERROR(reader->ReadAt(at, buffer));
      crc = Crc32c(crc, buffer.data(), buffer.size());
    }
    return crc == file.crc32c ? absl::OkStatus()
                              : absl::DataLossError("reads back with another checksum");
  }

  store::CommittedStep step_;
  const CheckpointExportOptions& options_;
  store::FileStore* store_;
  const std::string part_;
  std::vector<WeightFile> files_;
  std::vector<std::pair<std::string, std::string>> small_files_;
};

absl::StatusOr<std::filesystem::path> Destination(const CheckpointExportOptions& options) {
  if (options.format != "huggingface") {
    return absl::InvalidArgumentError(
        absl::StrCat("--format: \"", options.format, "\"; expected huggingface"));
  }
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16) {
    return absl::InvalidArgumentError("--dtype: expected f32 or bf16");
  }
  std::error_code error;
  const std::string text(absl::StripPrefix(options.output, "file://"));
  std::filesystem::path output = std::filesystem::absolute(text, error).lexically_normal();
  if (output.filename().empty()) {
    output = output.parent_path();
  }
  if (text.empty() || error || output.filename().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--output: \"", options.output, "\": expected the name of a new directory"));
  }
  if (std::filesystem::exists(std::filesystem::symlink_status(output, error))) {
    return absl::AlreadyExistsError(
        absl::StrCat("--output: ", output.string(), " exists; an export never overwrites"));
  }
  if (!std::filesystem::is_directory(output.parent_path(), error)) {
    return absl::NotFoundError(
        absl::StrCat("--output: ", output.parent_path().string(), ": no such directory"));
  }
  return output;
}

}  // namespace

absl::Status ExportCheckpoint(const CheckpointExportOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::filesystem::path output, Destination(options));
  ASSIGN_OR_RETURN(const StepLocation location, LocateStep(options.step));
  const coordinator::ReaderPin pin(location.store.get(), location.directory);
  ASSIGN_OR_RETURN(store::CommittedStep step,
                   store::CommittedStep::Open(location.store.get(), location.directory));
  store::FileStore files(output.parent_path().string());
  const std::string name = output.filename().string();
  const std::string part = name + ".part";
  ASSIGN_OR_RETURN(const bool left_over, store::Exists(files, part));
  if (left_over) {
    return absl::AlreadyExistsError(
        absl::StrCat("--output: ",
                     files.Locate(part),
                     " exists: another export runs, or one was interrupted; remove it"));
  }
  Exporter exporter(std::move(step), options, &files, part);
  absl::Status status = exporter.Run();
  if (status.ok()) {
    status = files.RenameNoReplace(part, name);
  }
  if (!status.ok()) {
    store::RemoveTree(files, part).IgnoreError();
    return status;
  }
  RETURN_IF_ERROR(files.SyncDirectory(""));
  out << exporter.Summary() << " -> " << output.string() << "\n";
  return absl::OkStatus();
}

}  // namespace ravel::ctl
