#pragma once

// Data sets in a store: a folder of files that `ravelctl data push` has copied there, with a
// manifest that is written last. A job names such a folder's files by URL, and each node fetches
// the folder. Pure, but for ReadDataSet.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// On disk: do not rename. The manifest is JSON; see WriteDataManifest.
inline constexpr char kDataManifest[] = "ravel-data.json";
inline constexpr int64_t kMaxDataManifestBytes = int64_t{2} << 20;
inline constexpr size_t kMaxDataFiles = 4096;
inline constexpr int64_t kMaxDataFileBytes = int64_t{1} << 46;

enum class DataSetKind { kTokens, kModel };

struct DataFile {
  std::string name;  // a single part of a path: IsDataName
  int64_t bytes = 0;
  std::string sha256;  // 64 lower-case hex digits
  bool operator==(const DataFile&) const = default;
};

// A pair PREFIX.bin and PREFIX.idx, every id of which was read.
struct DataTokens {
  std::string prefix;
  int64_t tokens = 0;
  int64_t largest_id = 0;
  std::string sample_digest = {};  // TokenSampleDigest; empty in sets of older releases
  bool operator==(const DataTokens&) const = default;
};

struct DataManifest {
  DataSetKind kind = DataSetKind::kTokens;
  std::vector<DataFile> files = {};
  std::vector<DataTokens> tokens = {};

  int64_t total_bytes() const;
  const DataFile* FindFile(std::string_view name) const;      // nullptr: none
  const DataTokens* FindTokens(std::string_view name) const;  // nullptr: none
  bool operator==(const DataManifest&) const = default;
};

// {"schemaVersion": "ravel-data/v1", "kind": "tokens" | "model",
//  "files": [{"name", "bytes", "sha256"}],
//  "tokens": [{"prefix", "tokens", "largestId", "sampleDigest"}]}
std::string WriteDataManifest(const DataManifest& manifest);
// InvalidArgument names the member that is not as expected: it may come from anywhere.
absl::StatusOr<DataManifest> ParseDataManifest(std::string_view text);

// True for 1 to 200 letters, digits, '.', '_' and '-' that do not begin with '.' and are neither
// the manifest's name nor end in ".part".
bool IsDataName(std::string_view name);

// True for a path of a job that nodes fetch: ravel://... or s3://...
bool IsDataUrl(std::string_view path);
struct DataUrl {
  std::string folder;  // URL of the data set
  std::string member;  // file or prefix in it
};
// Splits "ravel://HOST:PORT/PATH/MEMBER". InvalidArgument says what was expected.
absl::StatusOr<DataUrl> SplitDataUrl(std::string_view url);
// A data set's own URL without slashes at its end. InvalidArgument unless OpenStore takes it.
absl::StatusOr<std::string> DataFolderUrl(std::string_view url);

struct DataSet {
  DataManifest manifest;
  std::string text;    // of the manifest
  std::string digest;  // SHA-256 of the text, in hex
};
// NotFound names the URL when there is no manifest; InvalidArgument when it is none.
absl::StatusOr<DataSet> ReadDataSet(const ObjectStore& store);

}  // namespace ravel::store
