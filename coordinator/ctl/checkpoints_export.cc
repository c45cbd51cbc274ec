// Writes a committed step as a Hugging Face directory. The step must match the architecture that
// config.json describes; tensors are then cut into files of limited size and converted in pieces,
// so memory stays small for any model. Every block read is verified against the manifest's
// checksums, and the finished files are read back before OUTPUT.part is renamed: an export that
// exists is whole.

#include "coordinator/ctl/checkpoints_export.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/strip.h>

#include "common/check.h"
#include "common/ckpt/safetensors.h"
#include "common/crc32c.h"
#include "common/json.h"
#include "common/model/architecture/architecture.h"
#include "common/model/model_inventory.h"
#include "common/model/recipes.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/held_folder.h"
#include "coordinator/ctl/path_text.h"
#include "coordinator/ctl/quantized_weights.h"
#include "coordinator/saves/checkpoint_pins.h"

namespace ravel::ctl {
namespace {

using store::JoinPath;

constexpr int64_t kReadElements = 16 << 20;

// What a tensor of the export has of one of the step.
enum class Part { kValues, kCodes, kScales, kTensorScale };

struct ExportTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  Part part = Part::kValues;
  const ckpt::TensorRecord* source = nullptr;
};

// A file of the export: its tensors in order, and what was written.
struct WeightFile {
  std::string name;
  std::vector<ExportTensor> tensors;
  std::string header;
  int64_t size = 0;
  uint32_t crc32c = 0;
};

int64_t BytesOf(const ExportTensor& tensor) {
  return ElementCount(tensor.shape) * DTypeBytes(tensor.dtype);
}

std::vector<ckpt::SafetensorsEntry> Entries(const WeightFile& file) {
  std::vector<ckpt::SafetensorsEntry> entries;
  for (const ExportTensor& tensor : file.tensors) {
    entries.push_back(
        {.key = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .saved_offset = {}});
  }
  ckpt::PlaceSafetensorsEntries(entries);
  return entries;
}

// The tensors that stand for one of the step: itself, or codes and scales.
std::vector<ExportTensor> PartsOf(const ckpt::TensorRecord& source,
                                  const QuantizedWeights* quantized,
                                  const CheckpointExportOptions& options) {
  if (quantized == nullptr || quantized->Find(source.name) == nullptr) {
    return {
        {.name = source.name, .dtype = options.dtype, .shape = source.shape, .source = &source}};
  }
  const plan::Recipe recipe = quantized->recipe();
  ScaleTensor scales = ScaleInvOf(source.name, recipe, source.shape);
  if (options.for_vllm && plan::BlockEdge(recipe) == 0) {
    scales.name = source.name + "_scale";
  }
  std::vector<ExportTensor> parts = {
      {.name = source.name,
       .dtype = plan::CodeType(recipe),
       .shape = {source.shape[0], plan::CodeBytes(recipe, source.shape[1])},
       .part = Part::kCodes,
       .source = &source},
      {.name = scales.name,
       .dtype = scales.dtype,
       .shape = scales.shape,
       .part = Part::kScales,
       .source = &source}};
  if (recipe == plan::Recipe::kNvFp4) {
    parts.push_back({.name = source.name + "_global_scale",
                     .dtype = DType::kF32,
                     .shape = {},
                     .part = Part::kTensorScale,
                     .source = &source});
  }
  return parts;
}

// Parameters by name, cut into files of at most `max_file_bytes` of data (a larger tensor has a
// file of its own).
std::vector<WeightFile> PlanFiles(const ckpt::Manifest& manifest,
                                  const QuantizedWeights* quantized,
                                  const CheckpointExportOptions& options) {
  std::vector<WeightFile> files;
  int64_t bytes = 0;
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    if (tensor.role != ckpt::TensorRole::kParam && tensor.role != ckpt::TensorRole::kBuffer) {
      continue;
    }
    const std::vector<ExportTensor> parts = PartsOf(tensor, quantized, options);
    int64_t part_bytes = 0;
    for (const ExportTensor& part : parts) {
      part_bytes += BytesOf(part);
    }
    if (files.empty() || bytes + part_bytes > options.max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().tensors.insert(files.back().tensors.end(), parts.begin(), parts.end());
    bytes += part_bytes;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    // Larger elements first, so that every tensor is aligned.
    std::stable_sort(files[i].tensors.begin(),
                     files[i].tensors.end(),
                     [](const ExportTensor& a, const ExportTensor& b) {
                       return DTypeBytes(a.dtype) > DTypeBytes(b.dtype);
                     });
    files[i].name = files.size() == 1
                        ? "model.safetensors"
                        : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, files.size());
    files[i].header = ckpt::SafetensorsExportHeader(Entries(files[i]));
  }
  return files;
}

// The step's tensors must be those of the architecture that config.json describes.
absl::Status CheckArchitecture(const plan::ModelConfig& config,
                               const std::vector<WeightFile>& files) {
  const plan::ModelInventory inventory =
      plan::BuildInventory(config, {.sequences = 1, .sequence_tokens = 1});
  size_t found = 0;
  for (const WeightFile& file : files) {
    for (const ExportTensor& tensor : file.tensors) {
      if (tensor.part == Part::kScales || tensor.part == Part::kTensorScale) {
        continue;
      }
      const ckpt::TensorRecord& source = *tensor.source;
      const plan::TensorId index = inventory.FindTensor(source.name);
      if (index < 0 || inventory.tensors[index].shape != source.shape) {
        return absl::FailedPreconditionError(absl::StrCat(
            "hf/config.json: describes no tensor ", source.name, " ", ShapeText(source.shape)));
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

// What readers of quantized weights ask for. Those that do not know mxfp8 or nvfp4 refuse it.
json::Value QuantizationConfig(const ckpt::Manifest& manifest,
                               const QuantizedWeights& quantized,
                               bool for_vllm) {
  json::Value value;
  json::Array kept = {json::Value("lm_head")};
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    const absl::string_view name(tensor.name);
    if (tensor.role == ckpt::TensorRole::kParam && tensor.shape.size() == 2 &&
        absl::StrContains(name, ".layers.") && quantized.Find(tensor.name) == nullptr) {
      kept.push_back(json::Value(std::string(absl::StripSuffix(name, ".weight"))));
    }
  }
  switch (quantized.recipe()) {
    case plan::Recipe::kMxFp8:
      value.Set("quant_method", "mxfp8");
      value.Set("scale_fmt", "ue8m0");
      value.Set("weight_block_size",
                json::Array{json::Value(int64_t{1}), json::Value(int64_t{32})});
      break;
    case plan::Recipe::kNvFp4:
      value.Set("quant_method", "nvfp4");
      value.Set("scale_fmt", "e4m3");
      value.Set("weight_block_size",
                json::Array{json::Value(int64_t{1}), json::Value(int64_t{16})});
      break;
    case plan::Recipe::kFloat8Block:
      value.Set("weight_block_size",
                json::Array{json::Value(int64_t{128}), json::Value(int64_t{128})});
      [[fallthrough]];
    default:
      value.Set("quant_method", "fp8");
  }
  value.Set("fmt", quantized.recipe() == plan::Recipe::kNvFp4 ? "e2m1" : "e4m3");
  value.Set("activation_scheme", "dynamic");
  if (for_vllm) {
    value.Set("ignored_layers", kept);
  }
  value.Set("modules_to_not_convert", std::move(kept));
  return value;
}

// config.json with the dtype that the weights now have; everything else as it was.
absl::StatusOr<json::Value> ConfigWithDType(const std::string& text, DType dtype) {
  ASSIGN_OR_RETURN(json::Value config, json::Parse(text));
  const char* name = dtype == DType::kBF16 ? "bfloat16" : "float32";
  const bool newer = config.Find("dtype") != nullptr;
  if (newer) {
    config.Set("dtype", name);
  }
  if (!newer || config.Find("torch_dtype") != nullptr) {
    config.Set("torch_dtype", name);
  }
  return config;
}

// vLLM takes codes of fp8 with one scale, or with one for 128 x 128 elements.
absl::Status CheckReader(const QuantizedWeights* quantized) {
  if (quantized == nullptr) {
    return absl::InvalidArgumentError("--reader vllm: expected --quantized beside it");
  }
  const plan::Recipe recipe = quantized->recipe();
  if (recipe == plan::Recipe::kMxFp8 || recipe == plan::Recipe::kNvFp4) {
    return absl::InvalidArgumentError(
        absl::StrCat("--reader vllm: expected codes of fp8_tensor or fp8_block, got ",
                     plan::RecipeName(recipe)));
  }
  return absl::OkStatus();
}

class Exporter {
 public:
  Exporter(store::CommittedStep step,
           const CheckpointExportOptions& options,
           store::FileStore* store,
           std::string part)
      : step_(std::move(step)), options_(options), store_(store), part_(std::move(part)) {}

  absl::Status Run() {
    if (options_.quantized) {
      ASSIGN_OR_RETURN(quantized_, QuantizedWeights::Of(&step_));
    }
    if (options_.for_vllm) {
      RETURN_IF_ERROR(CheckReader(quantized()));
    }
    files_ = PlanFiles(step_.manifest(), quantized(), options_);
    RETURN_IF_ERROR(ReadSmallFiles());
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
    return absl::OkStatus();
  }

  std::string Summary() const {
    int64_t bytes = 0;
    size_t tensors = 0;
    for (const WeightFile& file : files_) {
      bytes += file.size;
      tensors += file.tensors.size();
    }
    return absl::StrCat(
        "step ",
        step_.manifest().step,
        ": ",
        tensors,
        " tensors, ",
        std::string(DTypeName(options_.dtype)),
        options_.quantized ? absl::StrCat(" and codes of ", step_.manifest().quant.recipe) : "",
        ", ",
        FormatBytes(bytes),
        " in ",
        files_.size(),
        files_.size() == 1 ? " file" : " files");
  }

 private:
  QuantizedWeights* quantized() { return quantized_ ? &*quantized_ : nullptr; }

  // config.json as it was saved, and what is read of it.
  absl::StatusOr<std::string> ConfigText(const std::string& content) {
    ASSIGN_OR_RETURN(const plan::ModelConfig model, plan::ParseHuggingFaceConfig(content));
    RETURN_IF_ERROR(CheckArchitecture(model, files_));
    ASSIGN_OR_RETURN(json::Value config, ConfigWithDType(content, options_.dtype));
    if (options_.quantized) {
      if (plan::ArchitectureOf(model.architecture).layout != plan::MatrixLayout::kOutputInput) {
        return absl::UnimplementedError(
            "--quantized: expected matrices of [outputs, inputs]: no reader knows codes of others");
      }
      config.Set("quantization_config",
                 QuantizationConfig(step_.manifest(), *quantized_, options_.for_vllm));
    }
    return json::SerializePretty(config) + "\n";
  }

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
        ASSIGN_OR_RETURN(content, ConfigText(config));
      }
      small_files_.emplace_back(name, std::move(content));
    }
    return config.empty() ? absl::FailedPreconditionError(
                                "the step holds no hf/config.json; it cannot be exported")
                          : absl::OkStatus();
  }

  absl::Status WriteSmallFile(const std::string& name, const std::string& content) {
    return store_->Put(JoinPath(part_, name), content);
  }

  // Appends to a file that is being written, and to its checksum.
  using Append = std::function<absl::Status(std::span<const std::byte>)>;

  absl::Status WriteWeights(WeightFile& file) {
    const std::vector<ckpt::SafetensorsEntry> entries = Entries(file);
    file.size =
        static_cast<int64_t>(file.header.size()) + (entries.empty() ? 0 : entries.back().end);
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileWriter> writer,
                     store_->Create(JoinPath(part_, file.name), file.size));
    const auto append = [&](std::span<const std::byte> bytes) -> absl::Status {
      RETURN_IF_ERROR(CheckGoesOn());
      file.crc32c = Crc32c(file.crc32c, bytes.data(), bytes.size());
      return writer->Append(bytes);
    };
    RETURN_IF_ERROR(append(std::as_bytes(std::span(file.header.data(), file.header.size()))));
    for (const ExportTensor& tensor : file.tensors) {
      RETURN_IF_ERROR(tensor.part == Part::kValues ? WriteValues(*tensor.source, append)
                                                   : WriteQuantized(tensor, append));
    }
    return writer->Finish();
  }

  absl::Status WriteValues(const ckpt::TensorRecord& tensor, const Append& append) {
    if (tensor.stored_dtype != DType::kF32) {
      return absl::UnimplementedError(absl::StrCat(tensor.name,
                                                   ": stored as ",
                                                   std::string(DTypeName(tensor.stored_dtype)),
                                                   "; only F32 is exported"));
    }
    std::vector<float> values;
    std::vector<uint16_t> narrow;
    const int64_t elements = ElementCount(tensor.shape);
    for (int64_t begin = 0; begin < elements; begin += kReadElements) {
      const int64_t end = std::min(begin + kReadElements, elements);
      values.resize(static_cast<size_t>(end - begin));
      RETURN_IF_ERROR(
          step_.ReadElements(tensor, begin, end, std::as_writable_bytes(std::span(values))));
      if (options_.dtype == DType::kF32) {
        RETURN_IF_ERROR(append(std::as_bytes(std::span(values))));
        continue;
      }
      narrow.resize(values.size());
      std::transform(values.begin(), values.end(), narrow.begin(), FloatToBf16);
      RETURN_IF_ERROR(append(std::as_bytes(std::span(narrow))));
    }
    return absl::OkStatus();
  }

  // Scales stand before codes, in another place of the file: both follow from one pass over the
  // weight, which is made for each.
  absl::Status WriteQuantized(const ExportTensor& tensor, const Append& append) {
    const ckpt::QuantizedRecord& weight = *quantized_->Find(tensor.source->name);
    ASSIGN_OR_RETURN(const WeightAmaxes amaxes, quantized_->Amaxes(weight));
    if (tensor.part == Part::kCodes) {
      return quantized_->VisitCodes(weight, amaxes, [&](std::span<const uint8_t> codes) {
        return append(std::as_bytes(codes));
      });
    }
    if (tensor.part == Part::kTensorScale) {
      return append(std::as_bytes(std::span(&amaxes.tensor.decode, 1)));
    }
    const std::vector<uint8_t> bytes =
        ScaleInvBytes(quantized_->recipe(), tensor.source->shape, amaxes);
    return append(std::as_bytes(std::span(bytes)));
  }

  std::string IndexJson() const {
    json::Value weight_map = json::Object();
    int64_t total = 0;
    for (const WeightFile& file : files_) {
      for (const ExportTensor& tensor : file.tensors) {
        weight_map.Set(tensor.name, file.name);
        total += BytesOf(tensor);
      }
    }
    json::Value metadata;
    metadata.Set("total_size", total);
    json::Value index;
    index.Set("metadata", std::move(metadata));
    index.Set("weight_map", std::move(weight_map));
    return json::SerializePretty(index) + "\n";
  }

  absl::Status CheckGoesOn() const {
    return options_.cancelled && options_.cancelled()
               ? absl::CancelledError(
                     "interrupted; nothing was published, and the same command begins anew")
               : absl::OkStatus();
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
      RETURN_IF_ERROR(CheckGoesOn());
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
  std::optional<QuantizedWeights> quantized_;
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
  RETURN_IF_ERROR(CheckIsPath("--output", options.output));
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
  const absl::StatusOr<std::unique_ptr<HeldFolder>> held = HeldFolder::Make(files.Locate(part));
  RETURN_IF_ERROR(Annotate(held.status(), "--output"));
  Exporter exporter(std::move(step), options, &files, part);
  absl::Status status = exporter.Run();
  if (status.ok()) {
    status = (*held)->TakeMarkOut();
  }
  if (status.ok()) {
    status = files.PublishIfAbsent(part, name);
  }
  if (!status.ok()) {
    store::WithdrawIfThere(files, part).IgnoreError();
    return status;
  }
  if (options.print == Format::kTable || options.print == Format::kName) {
    out << exporter.Summary() << " -> " << output.string() << "\n";
    return absl::OkStatus();
  }
  json::Value document;
  document.Set("step", location.directory).Set("output", output.string());
  document.Set("summary", exporter.Summary());
  out << FormatDocument(WithSchemaVersion(document), options.print);
  return absl::OkStatus();
}

}  // namespace ravel::ctl
