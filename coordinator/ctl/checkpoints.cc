// Looks at checkpoint folders without a coordinator, with the same code that the coordinator uses
// (coordinator/saves, common/store), so both give the same verdict. A path may be a step or a
// folder of steps, which means its newest good one. Only MarkInFolder writes. Output is a table or
// a document with the same content.

#include "coordinator/ctl/checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <ostream>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "common/ckpt/step_layout.h"
#include "common/store/committed_step.h"
#include "common/store/open_store.h"
#include "common/time_text.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/checkpoint_owner.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/saves.h"

namespace ravel::ctl {
namespace {

// The URL of a store as it is; else an absolute, normal path without a trailing slash, from a path
// or a file:// URL. NotFound unless a path is a directory.
absl::StatusOr<std::string> FolderText(const std::string& text) {
  if (store::IsRemoteStore(text)) {
    RETURN_IF_ERROR(store::CheckStoreUrl(text));
    return std::string(absl::StripSuffix(text, "/"));
  }
  std::error_code error;
  const std::string stripped(absl::StripPrefix(text, "file://"));
  if (stripped.empty() || stripped.find("://") != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"",
        text,
        "\": expected a path, file:///absolute/path, ravel://HOST:PORT/PATH or s3://BUCKET/PATH"));
  }
  std::filesystem::path path = std::filesystem::absolute(stripped, error).lexically_normal();
  if (error) {
    return absl::InvalidArgumentError(absl::StrCat(text, ": ", error.message()));
  }
  if (path.filename().empty() && path.has_parent_path()) {
    path = path.parent_path();
  }
  if (!std::filesystem::is_directory(path, error)) {
    return absl::NotFoundError(absl::StrCat(path.string(), ": no such directory"));
  }
  return path.string();
}

std::string SaveIdText(const ckpt::SaveId& id) {
  return Hex(std::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}

std::string MeshText(const ckpt::Manifest& manifest) {
  std::vector<std::string> axes;
  for (const ckpt::MeshAxisRecord& axis : manifest.mesh) {
    axes.push_back(absl::StrCat(axis.name, " ", axis.size));
  }
  return absl::StrJoin(axes, ", ");
}

const char* RoleName(ckpt::TensorRole role) {
  switch (role) {
    case ckpt::TensorRole::kParam:
      return "param";
    case ckpt::TensorRole::kBuffer:
      return "buffer";
    case ckpt::TensorRole::kMaster:
      return "master";
    case ckpt::TensorRole::kRemainder:
      return "remainder";
    case ckpt::TensorRole::kScale:
      return "scale";
    case ckpt::TensorRole::kAmax:
      return "amax";
    default:
      break;
  }
  const char* state = plan::StateName(static_cast<plan::StateRole>(role));
  return state != nullptr ? state : "unknown";
}

// One line of a listing.
struct ListedStep {
  coordinator::CommittedStepInfo info;
  int64_t created_ms = 0;
  std::string mesh;
  std::string problem;  // why the manifest does not open
};

absl::StatusOr<std::vector<ListedStep>> Describe(const store::ObjectStore& files,
                                                 const coordinator::StepListing& listing) {
  std::vector<ListedStep> steps;
  for (const coordinator::CommittedStepInfo& info : listing.steps) {
    ListedStep listed = {.info = info, .created_ms = 0, .mesh = {}, .problem = {}};
    const absl::StatusOr<store::CommittedStep> step =
        store::CommittedStep::Open(&files, info.directory);
    if (step.ok()) {
      listed.created_ms = step->manifest().created_ns / 1'000'000;
      listed.mesh = MeshText(step->manifest());
    } else {
      listed.problem = std::string(step.status().message());
    }
    steps.push_back(std::move(listed));
  }
  return steps;
}

std::string StateText(const ListedStep& step) {
  if (step.info.bad) {
    return "BAD";
  }
  if (!step.problem.empty()) {
    return "DAMAGED";
  }
  return step.info.pinned ? "pinned" : "ok";
}

json::Value StepJson(const store::ObjectStore& files, const ListedStep& step) {
  const ckpt::CommitRecord& commit = step.info.commit;
  json::Value value;
  value.Set("step", step.info.step);
  value.Set("path", files.Locate(step.info.directory));
  value.Set("job", commit.job);
  value.Set("epoch", commit.epoch);
  value.Set("saveAttempt", commit.attempt);
  value.Set("saveId", SaveIdText(commit.save_id));
  value.Set("bytes", commit.bytes);
  value.Set("files", commit.files);
  value.Set("createdMs", step.created_ms);
  value.Set("mesh", step.mesh);
  value.Set("pinned", step.info.pinned);
  value.Set("bad", step.info.bad);
  value.Set("reason", step.info.bad ? step.info.bad_reason : step.problem);
  return value;
}

json::Value LeftoverJson(const store::ObjectStore& files, const coordinator::Leftover& leftover) {
  json::Value value;
  value.Set("path", files.Locate(leftover.path));
  value.Set("kind", coordinator::LeftoverKindName(leftover.kind));
  value.Set("reason", leftover.reason);
  value.Set("changedMs", leftover.changed_ms);
  return value;
}

void PrintStepTable(const CheckpointListOptions& options,
                    const store::ObjectStore& files,
                    const std::vector<ListedStep>& steps,
                    std::ostream& out) {
  std::vector<std::string> titles = {"STEP", "AGE", "SIZE", "FILES", "EPOCH", "MESH", "STATE"};
  if (options.wide) {
    titles.insert(titles.end(), {"JOB", "SAVE", "PATH"});
  }
  Table table(std::move(titles));
  for (const ListedStep& step : steps) {
    const ckpt::CommitRecord& commit = step.info.commit;
    const bool dated = step.created_ms > 0 && options.now_ms >= step.created_ms;
    std::vector<std::string> cells = {
        absl::StrCat(step.info.step),
        dated ? FormatDuration(options.now_ms - step.created_ms) : "-",
        FormatBytes(commit.bytes),
        absl::StrCat(commit.files),
        absl::StrCat(commit.epoch),
        step.mesh,
        StateText(step)};
    if (options.wide) {
      cells.insert(cells.end(),
                   {commit.job, SaveIdText(commit.save_id), files.Locate(step.info.directory)});
    }
    table.AddRow(std::move(cells));
  }
  out << table.Text(!options.no_headers);
  for (const ListedStep& step : steps) {
    if (step.info.bad || !step.problem.empty()) {
      out << step.info.directory << ": " << (step.info.bad ? step.info.bad_reason : step.problem)
          << "\n";
    }
  }
}

json::Value ChunkJson(const ckpt::Manifest& manifest, const ckpt::ChunkRecord& chunk) {
  json::Value value;
  value.Set("file", manifest.files[static_cast<size_t>(chunk.file)].path);
  value.Set("dataOffset", chunk.data_offset);
  value.Set("bytes", chunk.bytes);
  value.Set("offset", json::Array(chunk.box.offset.begin(), chunk.box.offset.end()));
  value.Set("length", json::Array(chunk.box.length.begin(), chunk.box.length.end()));
  value.Set("crc32c", absl::StrFormat("%08x", chunk.crc32c));
  return value;
}

json::Value TensorJson(const ckpt::Manifest& manifest, const ckpt::TensorRecord& tensor) {
  json::Value value;
  value.Set("name", tensor.name);
  value.Set("role", RoleName(tensor.role));
  value.Set("dtype", DTypeName(tensor.dtype));
  value.Set("shape", json::Array(tensor.shape.begin(), tensor.shape.end()));
  value.Set("digest64", absl::StrFormat("%016x", tensor.digest64));
  json::Array chunks;
  for (const ckpt::ChunkRecord& chunk : tensor.chunks) {
    chunks.push_back(ChunkJson(manifest, chunk));
  }
  value.Set("chunks", std::move(chunks));
  return value;
}

json::Value QuantJson(const ckpt::QuantRecord& quant) {
  json::Value value;
  value.Set("recipe", quant.recipe);
  value.Set("rounding", quant.rounding);
  json::Array tensors;
  for (const ckpt::QuantizedRecord& tensor : quant.tensors) {
    json::Value entry;
    entry.Set("name", tensor.name);
    entry.Set("domain", tensor.domain);
    entry.Set("site", tensor.site);
    entry.Set("digest64", absl::StrFormat("%016x", tensor.digest64));
    tensors.push_back(std::move(entry));
  }
  value.Set("tensors", std::move(tensors));
  return value;
}

json::Value ManifestJson(const ckpt::Manifest& manifest,
                         const std::string& path,
                         const std::string& glob) {
  json::Value value;
  value.Set("path", path);
  value.Set("step", manifest.step);
  value.Set("job", manifest.job);
  value.Set("epoch", manifest.epoch);
  value.Set("saveAttempt", manifest.attempt);
  value.Set("saveId", SaveIdText(manifest.save_id));
  value.Set("createdMs", manifest.created_ns / 1'000'000);
  value.Set("formatVersion", static_cast<int64_t>(manifest.format_version));
  value.Set("build", manifest.build);
  value.Set("numerics", manifest.numerics);
  value.Set("virtualRanks", manifest.virtual_ranks);
  value.Set("mesh", MeshText(manifest));
  value.Set("dual", manifest.dual);
  value.Set("stateDigest", Hex(manifest.state_digest));
  value.Set("bytes", manifest.total_bytes());
  value.Set("quant", QuantJson(manifest.quant));
  json::Array files;
  for (const ckpt::FileRecord& file : manifest.files) {
    json::Value entry;
    entry.Set("path", file.path);
    entry.Set("bytes", file.size);
    entry.Set("crc32c", absl::StrFormat("%08x", file.crc32c));
    entry.Set("writer", file.writer);
    files.push_back(std::move(entry));
  }
  value.Set("files", std::move(files));
  json::Array tensors;
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    if (!glob.empty() && MatchesGlob(glob, tensor.name)) {
      tensors.push_back(TensorJson(manifest, tensor));
    }
  }
  value.Set("tensorCount", static_cast<int64_t>(manifest.tensors.size()));
  value.Set("tensors", std::move(tensors));
  json::Array blobs;
  for (const ckpt::Blob& blob : manifest.blobs) {
    json::Value entry;
    entry.Set("name", blob.name);
    entry.Set("bytes", static_cast<int64_t>(blob.content.size()));
    blobs.push_back(std::move(entry));
  }
  value.Set("blobs", std::move(blobs));
  return value;
}

void PrintManifest(const ckpt::Manifest& manifest,
                   const std::string& path,
                   const std::string& glob,
                   std::ostream& out) {
  std::map<std::string, std::pair<int64_t, int64_t>> roles;  // tensors, bytes
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    auto& [count, bytes] = roles[RoleName(tensor.role)];
    ++count;
    bytes += ElementCount(tensor.shape) * DTypeBytes(tensor.stored_dtype);
  }
  std::vector<std::string> parts;
  for (const auto& [role, sums] : roles) {
    parts.push_back(absl::StrCat(sums.first, " ", role, " (", FormatBytes(sums.second), ")"));
  }
  std::vector<std::string> blobs;
  for (const ckpt::Blob& blob : manifest.blobs) {
    blobs.push_back(absl::StrCat(blob.name, " (", blob.content.size(), " B)"));
  }
  out << "step          " << manifest.step << "\n"
      << "path          " << path << "\n"
      << "job           " << manifest.job << "\n"
      << "saved         " << FormatTime(manifest.created_ns / 1'000'000) << ", epoch "
      << manifest.epoch << ", save attempt " << manifest.attempt << ", save id "
      << SaveIdText(manifest.save_id) << "\n"
      << "mesh          " << MeshText(manifest) << "; " << manifest.virtual_ranks
      << " virtual ranks\n"
      << "numerics      " << manifest.numerics << "\n"
      << "files         " << manifest.files.size() << ", " << FormatBytes(manifest.total_bytes())
      << "\n"
      << "tensors       " << absl::StrJoin(parts, ", ") << "\n"
      << "blobs         " << absl::StrJoin(blobs, ", ") << "\n"
      << "quantized     "
      << (manifest.quant.tensors.empty() ? "none"
                                         : absl::StrCat(manifest.quant.tensors.size(),
                                                        " of ",
                                                        manifest.quant.recipe,
                                                        ", codes cast from ",
                                                        manifest.quant.rounding))
      << "\n"
      << "state digest  " << Hex(manifest.state_digest) << "\n"
      << "for torch     ";
  if (store::IsRemoteStore(path)) {
    out << "ravelctl checkpoints copy " << path << " DIR first: torch reads no "
        << path.substr(0, path.find(':')) << " store\n";
  } else {
    out << "HuggingFaceStorageReader(\"" << path << "/model\"), (\"" << path << "/optim\")\n";
  }
  if (glob.empty()) {
    return;
  }
  Table table({"TENSOR", "DTYPE", "SHAPE", "DIGEST64", "CHUNKS"});
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    if (MatchesGlob(glob, tensor.name)) {
      table.AddRow({tensor.name,
                    std::string(DTypeName(tensor.dtype)),
                    ShapeText(tensor.shape),
                    absl::StrFormat("%016x", tensor.digest64),
                    absl::StrCat(tensor.chunks.size())});
    }
  }
  if (table.empty()) {
    out << "no tensor matches " << glob << "\n";
  } else {
    out << table.Text(true);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<store::ObjectStore>> OpenCheckpointFolder(const std::string& text) {
  ASSIGN_OR_RETURN(const std::string folder, FolderText(text));
  return store::OpenStore(folder);
}

bool MatchesGlob(const std::string& pattern, const std::string& text) {
  size_t p = 0;
  size_t t = 0;
  size_t star = std::string::npos;  // the last "*", and where its match began
  size_t star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string::npos;
}

absl::StatusOr<StepLocation> LocateStep(const std::string& step) {
  ASSIGN_OR_RETURN(const std::string folder, FolderText(step));
  StepLocation location;
  ASSIGN_OR_RETURN(location.store, store::OpenStore(folder));
  ASSIGN_OR_RETURN(const bool is_step, store::Exists(*location.store, ckpt::kCommitFile));
  absl::StatusOr<store::StorePlace> place = store::OpenParent(folder);
  const bool named =
      place.ok() && (ckpt::ParseStepName(place->name) || ckpt::ParseAttemptName(place->name));
  if (place.ok() && (named || is_step)) {
    location.store = std::move(place->parent);
    location.directory = place->name;
    return location;
  }
  ASSIGN_OR_RETURN(const coordinator::StepListing listing, coordinator::ListSteps(*location.store));
  const auto good = std::find_if(
      listing.steps.begin(), listing.steps.end(), [](const auto& info) { return !info.bad; });
  if (good == listing.steps.end()) {
    return absl::NotFoundError(absl::StrCat(
        folder,
        ": neither a step's directory (step-0000000020) nor a folder with committed steps"));
  }
  location.directory = good->directory;
  return location;
}

absl::Status ListCheckpoints(const CheckpointListOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<store::ObjectStore> opened,
                   OpenCheckpointFolder(options.folder));
  const store::ObjectStore& files = *opened;
  ASSIGN_OR_RETURN(const coordinator::StepListing listing, coordinator::ListSteps(files));
  ASSIGN_OR_RETURN(const std::optional<coordinator::OwnerRecord> owner,
                   coordinator::ReadOwner(files));
  ASSIGN_OR_RETURN(const std::vector<coordinator::Leftover> leftovers,
                   coordinator::ListLeftovers(files, owner ? owner->job_uid : ""));
  ASSIGN_OR_RETURN(const std::vector<ListedStep> steps, Describe(files, listing));
  if (options.format == Format::kTable) {
    PrintStepTable(options, files, steps, out);
    for (const coordinator::Leftover& leftover : leftovers) {
      out << leftover.path << ": " << coordinator::LeftoverKindName(leftover.kind)
          << (leftover.reason.empty() ? "" : ": ") << leftover.reason << "\n";
    }
    return absl::OkStatus();
  }
  if (options.format == Format::kName) {
    for (const ListedStep& step : steps) {
      out << files.Locate(step.info.directory) << "\n";
    }
    return absl::OkStatus();
  }
  json::Array items;
  for (const ListedStep& step : steps) {
    items.push_back(StepJson(files, step));
  }
  if (options.format == Format::kJsonl) {
    out << FormatDocument(json::Value(std::move(items)), options.format);
    return absl::OkStatus();
  }
  json::Value document = ListDocument(std::move(items));
  json::Array damaged;
  for (const coordinator::StepListing::Damaged& entry : listing.damaged) {
    json::Value value;
    value.Set("path", files.Locate(entry.directory));
    value.Set("reason", entry.reason);
    damaged.push_back(std::move(value));
  }
  document.Set("damaged", std::move(damaged));
  json::Array open;
  json::Array others;
  for (const coordinator::Leftover& leftover : leftovers) {
    if (leftover.kind == coordinator::LeftoverKind::kUnfinishedSave ||
        leftover.kind == coordinator::LeftoverKind::kUnfinishedCopy) {
      open.push_back(json::Value(files.Locate(leftover.path)));
    }
    others.push_back(LeftoverJson(files, leftover));
  }
  document.Set("unfinished", std::move(open));
  document.Set("leftovers", std::move(others));
  document.Set("owner", owner ? owner->job_uid : "");
  out << FormatDocument(document, options.format);
  return absl::OkStatus();
}

absl::Status MarkInFolder(const std::string& folder,
                          int64_t step,
                          CheckpointMark mark,
                          const std::string& reason) {
  ASSIGN_OR_RETURN(const std::unique_ptr<store::ObjectStore> opened, OpenCheckpointFolder(folder));
  store::ObjectStore& files = *opened;
  switch (mark) {
    case CheckpointMark::kPin:
      return coordinator::PinStep(files, {.step = step}, reason);
    case CheckpointMark::kUnpin:
      return coordinator::UnpinStep(files, step, "");
    case CheckpointMark::kUnmarkBad:
      return coordinator::UnmarkBad(files, step);
  }
  return absl::InvalidArgumentError("unknown mark");
}

absl::Status ShowCheckpoint(const CheckpointShowOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const StepLocation location, LocateStep(options.step));
  ASSIGN_OR_RETURN(const store::CommittedStep step,
                   store::CommittedStep::Open(location.store.get(), location.directory));
  const std::string path = location.store->Locate(location.directory);
  if (options.format == Format::kTable) {
    PrintManifest(step.manifest(), path, options.tensors, out);
  } else if (options.format == Format::kName) {
    out << path << "\n";
  } else {
    out << FormatDocument(WithSchemaVersion(ManifestJson(step.manifest(), path, options.tensors)),
                          options.format);
  }
  return absl::OkStatus();
}

}  // namespace ravel::ctl
