#include "common/store/data_set.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/json.h"
#include "common/store/open_store.h"

namespace ravel::store {
namespace {

constexpr char kSchema[] = "ravel-data/v1";
constexpr size_t kMaxNameBytes = 200;
constexpr size_t kMaxUrlBytes = 4096;

absl::Status Expected(const std::string& member, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(kDataManifest, ": ", member, ": expected ", what));
}

// The member of that name; an error names it by `at`.
absl::StatusOr<std::string> TextOf(const json::Value& value, const char* name) {
  const json::Value* const member = value.Find(name);
  return member != nullptr && member->is_string() ? absl::StatusOr<std::string>(member->AsString())
                                                  : Expected(name, "a string");
}

absl::StatusOr<int64_t> CountOf(const json::Value& value, const char* name, int64_t most) {
  const json::Value* const member = value.Find(name);
  if (member == nullptr || !member->is_int() || member->AsInt() < 0 || member->AsInt() > most) {
    return Expected(name, absl::StrCat("a whole number from 0 to ", most));
  }
  return member->AsInt();
}

absl::StatusOr<const json::Array*> RowsOf(const json::Value& value, const char* name) {
  const json::Value* const member = value.Find(name);
  if (member == nullptr || !member->is_array() || member->AsArray().size() > kMaxDataFiles) {
    return Expected(name, absl::StrCat("an array of at most ", kMaxDataFiles));
  }
  return &member->AsArray();
}

absl::StatusOr<std::vector<DataFile>> ReadFiles(const json::Value& document) {
  ASSIGN_OR_RETURN(const json::Array* const rows, RowsOf(document, "files"));
  std::vector<DataFile> files;
  std::set<std::string> names;
  for (const json::Value& row : *rows) {
    DataFile& file = files.emplace_back();
    ASSIGN_OR_RETURN(file.name, TextOf(row, "name"));
    ASSIGN_OR_RETURN(file.bytes, CountOf(row, "bytes", kMaxDataFileBytes));
    ASSIGN_OR_RETURN(file.sha256, TextOf(row, "sha256"));
    if (!IsDataName(file.name)) {
      return Expected("name", "letters, digits, '.', '_' and '-', at most 200");
    }
    if (!names.insert(file.name).second) {
      return Expected("name", absl::StrCat(file.name, " once"));
    }
    if (!IsSha256Text(file.sha256)) {
      return Expected("sha256", "64 lower-case hexadecimal digits");
    }
  }
  if (files.empty()) {
    return Expected("files", "at least one");
  }
  return files;
}

absl::StatusOr<std::vector<DataTokens>> ReadTokens(const json::Value& document,
                                                   const DataManifest& manifest) {
  ASSIGN_OR_RETURN(const json::Array* const rows, RowsOf(document, "tokens"));
  std::vector<DataTokens> tokens;
  for (const json::Value& row : *rows) {
    DataTokens& pair = tokens.emplace_back();
    ASSIGN_OR_RETURN(pair.prefix, TextOf(row, "prefix"));
    ASSIGN_OR_RETURN(pair.tokens, CountOf(row, "tokens", kMaxDataFileBytes));
    ASSIGN_OR_RETURN(pair.largest_id, CountOf(row, "largestId", kMaxDataFileBytes));
    if (row.Find("sampleDigest") != nullptr) {
      ASSIGN_OR_RETURN(pair.sample_digest, TextOf(row, "sampleDigest"));
      if (!IsSha256Text(pair.sample_digest)) {
        return Expected("sampleDigest", "64 lower-case hexadecimal digits");
      }
    }
    if (manifest.FindFile(pair.prefix + ".bin") == nullptr ||
        manifest.FindFile(pair.prefix + ".idx") == nullptr) {
      return Expected("prefix", "one whose .bin and .idx are among files");
    }
  }
  return tokens;
}

}  // namespace

int64_t DataManifest::total_bytes() const {
  int64_t sum = 0;
  for (const DataFile& file : files) {
    sum += file.bytes;
  }
  return sum;
}

const DataFile* DataManifest::FindFile(std::string_view name) const {
  const auto found = std::find_if(
      files.begin(), files.end(), [name](const DataFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

const DataTokens* DataManifest::FindTokens(std::string_view name) const {
  const auto found = std::find_if(
      tokens.begin(), tokens.end(), [name](const DataTokens& pair) { return pair.prefix == name; });
  return found == tokens.end() ? nullptr : &*found;
}

std::string WriteDataManifest(const DataManifest& manifest) {
  json::Value document;
  document.Set("schemaVersion", kSchema);
  document.Set("kind", manifest.kind == DataSetKind::kModel ? "model" : "tokens");
  json::Array files;
  for (const DataFile& file : manifest.files) {
    json::Value& row = files.emplace_back();
    row.Set("name", file.name).Set("bytes", file.bytes).Set("sha256", file.sha256);
  }
  document.Set("files", json::Value(std::move(files)));
  json::Array tokens;
  for (const DataTokens& pair : manifest.tokens) {
    json::Value& row = tokens.emplace_back();
    row.Set("prefix", pair.prefix).Set("tokens", pair.tokens).Set("largestId", pair.largest_id);
    if (!pair.sample_digest.empty()) {
      row.Set("sampleDigest", pair.sample_digest);
    }
  }
  document.Set("tokens", json::Value(std::move(tokens)));
  return json::SerializePretty(document) + "\n";
}

absl::StatusOr<DataManifest> ParseDataManifest(std::string_view text) {
  if (std::ssize(text) > kMaxDataManifestBytes) {
    return Expected("size", absl::StrCat("at most ", kMaxDataManifestBytes, " bytes"));
  }
  const absl::StatusOr<json::Value> document = json::Parse(text);
  RETURN_IF_ERROR(Annotate(document.status(), kDataManifest));
  ASSIGN_OR_RETURN(const std::string schema, TextOf(*document, "schemaVersion"));
  if (schema != kSchema) {
    return Expected("schemaVersion", kSchema);
  }
  ASSIGN_OR_RETURN(const std::string kind, TextOf(*document, "kind"));
  if (kind != "tokens" && kind != "model") {
    return Expected("kind", "tokens or model");
  }
  DataManifest manifest;
  manifest.kind = kind == "model" ? DataSetKind::kModel : DataSetKind::kTokens;
  ASSIGN_OR_RETURN(manifest.files, ReadFiles(*document));
  ASSIGN_OR_RETURN(manifest.tokens, ReadTokens(*document, manifest));
  return manifest;
}

bool IsDataName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes && name[0] != '.' && name != kDataManifest &&
         !name.ends_with(".part") && std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
                  c == '-';
         });
}

bool IsDataUrl(std::string_view path) {
  return IsRemoteStore(path);
}

absl::StatusOr<std::string> DataFolderUrl(std::string_view url) {
  while (url.ends_with('/')) {
    url.remove_suffix(1);
  }
  if (url.size() > kMaxUrlBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a URL of at most ", kMaxUrlBytes, " bytes"));
  }
  absl::Status known = CheckStoreUrl(url);
  if (absl::IsInvalidArgument(known)) {
    return known;
  }
  return std::string(url);  // what else this process lacks is not wrong with the URL
}

absl::StatusOr<DataUrl> SplitDataUrl(std::string_view url) {
  const size_t scheme = url.find("://");
  const size_t slash = url.rfind('/');
  if (scheme == std::string_view::npos || slash < scheme + 3) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", std::string(url), "\": expected the URL of a data set, '/' and a name in it"));
  }
  DataUrl split;
  split.member = std::string(url.substr(slash + 1));
  if (!IsDataName(split.member)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"",
                     std::string(url),
                     "\": expected as its last part a name of letters, digits, '.', '_' and '-'"));
  }
  ASSIGN_OR_RETURN(split.folder, DataFolderUrl(url.substr(0, slash)));
  return split;
}

absl::StatusOr<DataSet> ReadDataSet(const ObjectStore& store) {
  absl::StatusOr<std::string> text = ReadFile(store, kDataManifest, kMaxDataManifestBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(store.Locate(""),
                                            ": no data set is there: expected ",
                                            kDataManifest,
                                            ", which `ravelctl data push` writes last"));
  }
  RETURN_IF_ERROR(text.status());
  absl::StatusOr<DataManifest> manifest = ParseDataManifest(*text);
  RETURN_IF_ERROR(Annotate(manifest.status(), store.Locate("")));
  DataSet set{.manifest = *std::move(manifest), .text = *std::move(text), .digest = {}};
  set.digest = Hex(Sha256(set.text));
  return set;
}

}  // namespace ravel::store
