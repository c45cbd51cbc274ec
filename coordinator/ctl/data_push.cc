// Two passes over the files: the first makes the manifest, so that what is wrong with the data is
// said before a byte is written; the second copies, and a file that has changed meanwhile never
// gets its name. Whoever finds the manifest finds all files, since it is written last.

#include "coordinator/ctl/data_push.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <system_error>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "common/crypto.h"
#include "common/store/file_store.h"
#include "common/store/open_store.h"
#include "common/token_check.h"
#include "coordinator/ctl/path_text.h"

namespace ravel::ctl {
namespace {

namespace fs = std::filesystem;
using store::ObjectStore;

constexpr int64_t kPieceBytes = 4 << 20;

// The bytes of one file, piece by piece.
using Sink = std::function<absl::Status(std::span<const std::byte>)>;

struct Source {
  std::string folder;
  std::vector<std::string> names = {};
  std::vector<std::string> prefixes = {};  // of token files
};

// State that all phases share.
struct Push {
  const ObjectStore& source;
  const DataPushProgress& progress;
  int64_t all_bytes = 0;
  int64_t done_bytes = 0;

  void Tell(const char* phase, int64_t bytes) {
    done_bytes += bytes;
    if (progress) {
      progress(phase, done_bytes, all_bytes);
    }
  }
};

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The SHA-256 of a file, whose bytes also go to `sink`.
absl::StatusOr<std::string> ReadThrough(const store::FileReader& reader, const Sink& sink) {
  Sha256Stream sum;
  std::vector<std::byte> buffer;
  for (int64_t at = 0; at < reader.size(); at += kPieceBytes) {
    buffer.resize(static_cast<size_t>(std::min(kPieceBytes, reader.size() - at)));
    RETURN_IF_ERROR(reader.ReadAt(at, buffer));
    sum.Update(TextOf(buffer));
    RETURN_IF_ERROR(sink(buffer));
  }
  return Hex(sum.Finish());
}

bool IsFile(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

absl::StatusOr<Source> TokenFilesOf(const std::string& prefix) {
  std::error_code error;
  const fs::path path = fs::absolute(prefix, error);
  const std::string name = path.filename().string();
  if (error || name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("PREFIX: \"", prefix, "\": expected the prefix of token files"));
  }
  Source source{.folder = path.parent_path().string()};
  for (const std::string& part : {name, name + ".validation"}) {
    if (part == name || IsFile(path.parent_path() / (part + ".idx"))) {
      source.prefixes.push_back(part);
      source.names.insert(source.names.end(), {part + ".bin", part + ".idx"});
    }
  }
  if (IsFile(path.string() + ".tokenizer.json")) {
    source.names.push_back(name + ".tokenizer.json");
  }
  return source;
}

absl::StatusOr<Source> ModelFilesOf(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::absolute(folder, error);
  Source source{.folder = path.string()};
  fs::directory_iterator files(path, error);
  for (; !error && files != fs::directory_iterator(); files.increment(error)) {
    const std::string name = files->path().filename().string();
    if (IsFile(files->path()) && !absl::StartsWith(name, ".") && name != store::kDataManifest &&
        (absl::EndsWith(name, ".json") || absl::EndsWith(name, ".safetensors"))) {
      source.names.push_back(name);
    }
  }
  if (error) {
    return absl::NotFoundError(absl::StrCat("--model ", folder, ": ", error.message()));
  }
  std::sort(source.names.begin(), source.names.end());
  const auto has = [&](const char* name) {
    return std::find(source.names.begin(), source.names.end(), name) != source.names.end();
  };
  if (!has("config.json") || (!has("model.safetensors") && !has("model.safetensors.index.json"))) {
    return absl::NotFoundError(absl::StrCat(
        "--model ", folder, ": expected config.json, and model.safetensors or its index"));
  }
  return source;
}

// Checks all, and reads every byte once.
absl::StatusOr<store::DataManifest> Describe(const Source& source,
                                             store::DataSetKind kind,
                                             Push& push) {
  store::DataManifest manifest{.kind = kind};
  for (const std::string& prefix : source.prefixes) {
    const std::string path = store::JoinPath(source.folder, prefix);
    ASSIGN_OR_RETURN(
        const TokenFileFacts facts,
        CheckTokenFile(path,
                       TokenFormat::kMegatron,
                       {.scanned_tokens = std::numeric_limits<int64_t>::max(), .sample = true}));
    manifest.tokens.push_back({prefix, facts.tokens, facts.largest_id, facts.sample_digest});
  }
  std::vector<std::unique_ptr<store::FileReader>> readers;
  for (const std::string& name : source.names) {
    if (!store::IsDataName(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(push.source.Locate(name),
                       ": expected a name of letters, digits, '.', '_' and '-', at most 200"));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<store::FileReader> reader, push.source.Open(name));
    push.all_bytes += reader->size();
    readers.push_back(std::move(reader));
  }
  if (readers.size() > store::kMaxDataFiles) {
    return absl::InvalidArgumentError(absl::StrCat(
        source.folder, ": ", readers.size(), " files, expected at most ", store::kMaxDataFiles));
  }
  for (size_t i = 0; i < readers.size(); ++i) {
    ASSIGN_OR_RETURN(std::string sum, ReadThrough(*readers[i], [&push](auto bytes) {
                       push.Tell("reading", std::ssize(bytes));
                       return absl::OkStatus();
                     }));
    manifest.files.push_back({source.names[i], readers[i]->size(), std::move(sum)});
  }
  return manifest;
}

// True when the store has the file; AlreadyExists when it has another one of that name.
absl::StatusOr<bool> IsThere(const ObjectStore& target, const store::DataFile& file) {
  const absl::StatusOr<std::unique_ptr<store::FileReader>> reader = target.Open(file.name);
  if (absl::IsNotFound(reader.status())) {
    return false;
  }
  RETURN_IF_ERROR(reader.status());
  bool same = (*reader)->size() == file.bytes;
  if (same) {
    ASSIGN_OR_RETURN(const std::string sum,
                     ReadThrough(**reader, [](auto /*bytes*/) { return absl::OkStatus(); }));
    same = sum == file.sha256;
  }
  return same ? absl::StatusOr<bool>(true)
              : absl::AlreadyExistsError(
                    absl::StrCat(target.Locate(file.name),
                                 ": is there, and has another content; push to another URL"));
}

// False: it was there.
absl::StatusOr<bool> CopyFile(const store::DataFile& file, Push& push, ObjectStore& target) {
  ASSIGN_OR_RETURN(const bool there, IsThere(target, file));
  if (there) {
    push.Tell("copying", file.bytes);
    return false;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> reader, push.source.Open(file.name));
  const auto changed = [&] {
    return absl::AbortedError(
        absl::StrCat(push.source.Locate(file.name), ": has changed while it was copied"));
  };
  if (reader->size() != file.bytes) {
    return changed();
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<store::FileWriter> writer,
                   target.Create(file.name, file.bytes));
  ASSIGN_OR_RETURN(const std::string sum, ReadThrough(*reader, [&](auto bytes) {
                     push.Tell("copying", std::ssize(bytes));
                     return writer->Append(bytes);
                   }));
  if (sum != file.sha256) {
    return changed();
  }
  const absl::Status finished = writer->Finish();
  if (!absl::IsAlreadyExists(finished)) {
    RETURN_IF_ERROR(finished);
    return true;
  }
  RETURN_IF_ERROR(IsThere(target, file).status());  // another push of it came first
  return false;
}

// The ids that were sampled are those whose bytes were summed afterwards.
absl::Status CheckUnchanged(const Source& source, const store::DataManifest& manifest) {
  for (const store::DataTokens& tokens : manifest.tokens) {
    const std::string path = store::JoinPath(source.folder, tokens.prefix);
    ASSIGN_OR_RETURN(const TokenFileFacts facts,
                     CheckTokenFile(path, TokenFormat::kMegatron, {.sample = true}));
    if (facts.tokens != tokens.tokens || facts.sample_digest != tokens.sample_digest) {
      return absl::AbortedError(absl::StrCat(path, ": changed while it was read"));
    }
  }
  return absl::OkStatus();
}

// True for a manifest of a release that did not sample ids, of the same files.
bool IsOlderForm(const std::string& found, const std::string& text) {
  const absl::StatusOr<store::DataManifest> older = store::ParseDataManifest(found);
  absl::StatusOr<store::DataManifest> newer = store::ParseDataManifest(text);
  if (!older.ok() || !newer.ok()) {
    return false;
  }
  for (store::DataTokens& tokens : newer->tokens) {
    const store::DataTokens* const known = older->FindTokens(tokens.prefix);
    if (known != nullptr && known->sample_digest.empty()) {
      tokens.sample_digest.clear();
    }
  }
  return *older == *newer;
}

// The store's manifest when it is this one, or says the same; empty without one; AlreadyExists when
// it has another one.
absl::StatusOr<std::string> ManifestThere(const ObjectStore& target, const std::string& text) {
  const absl::StatusOr<std::string> found =
      store::ReadFile(target, store::kDataManifest, store::kMaxDataManifestBytes);
  if (absl::IsNotFound(found.status())) {
    return "";
  }
  if (found.ok() && (*found == text || IsOlderForm(*found, text))) {
    return *found;
  }
  return found.ok() || absl::IsDataLoss(found.status())
             ? absl::AlreadyExistsError(absl::StrCat(target.Locate(store::kDataManifest),
                                                     ": is of another data set; push to another "
                                                     "URL"))
             : found.status();
}

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenTarget(const std::string& text) {
  std::string url = text;
  if (!store::IsRemoteStore(text)) {
    RETURN_IF_ERROR(CheckIsPath("URL", text));
    std::error_code error;
    const std::string path(absl::StripPrefix(text, "file://"));
    url = fs::absolute(path, error).lexically_normal().string();
    if (path.empty() || error) {
      return absl::InvalidArgumentError(
          absl::StrCat("URL: \"", text, "\": expected the URL or the path of a folder"));
    }
  } else {
    absl::StatusOr<std::string> folder = store::DataFolderUrl(text);
    RETURN_IF_ERROR(Annotate(folder.status(), "URL"));
    url = *std::move(folder);
  }
  absl::StatusOr<std::unique_ptr<ObjectStore>> target = store::OpenStore(url);
  RETURN_IF_ERROR(Annotate(target.status(), "URL"));
  return target;
}

}  // namespace

absl::StatusOr<DataPushResult> PushData(const DataPushRequest& request,
                                        const DataPushProgress& progress) {
  ASSIGN_OR_RETURN(const Source source,
                   request.kind == store::DataSetKind::kModel ? ModelFilesOf(request.source)
                                                              : TokenFilesOf(request.source));
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> target, OpenTarget(request.to));
  const store::FileStore files(source.folder);
  Push push{.source = files, .progress = progress};
  DataPushResult result;
  ASSIGN_OR_RETURN(result.manifest, Describe(source, request.kind, push));
  RETURN_IF_ERROR(CheckUnchanged(source, result.manifest));
  const std::string text = store::WriteDataManifest(result.manifest);
  RETURN_IF_ERROR(
      store::ParseDataManifest(text).status());  // what nobody could read is not written
  result.url = target->Locate("");
  result.digest = Hex(Sha256(text));
  RETURN_IF_ERROR(Annotate(target->MakeRoot(), "URL"));
  ASSIGN_OR_RETURN(const std::string there, ManifestThere(*target, text));
  if (!there.empty()) {
    result.was_there = true;
    result.digest = Hex(Sha256(there));
    return result;
  }
  push.done_bytes = 0;
  for (const store::DataFile& file : result.manifest.files) {
    ASSIGN_OR_RETURN(const bool copied, CopyFile(file, push, *target));
    result.copied_files += copied ? 1 : 0;
    result.copied_bytes += copied ? file.bytes : 0;
  }
  const absl::Status put = target->Put(store::kDataManifest, text);
  if (absl::IsAlreadyExists(put)) {
    RETURN_IF_ERROR(ManifestThere(*target, text).status());
  } else {
    RETURN_IF_ERROR(put);
  }
  return result;
}

}  // namespace ravel::ctl
