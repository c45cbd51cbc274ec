#pragma once

// Objects by key, without folders: what S3 and its like have. blob_tree.h makes an ObjectStore of
// it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

struct BlobFacts {
  std::string key;
  int64_t size = 0;
  std::string version = {};  // another one when the content is
  int64_t changed_ms = 0;    // 0: not known
};

struct BlobListing {
  std::vector<BlobFacts> blobs;       // by key
  std::vector<std::string> prefixes;  // "a/b/": what goes on beyond the next '/'
};

// Reads see every write that has returned. Thread-safe.
class BlobStore {
 public:
  virtual ~BlobStore() = default;

  enum class Depth { kOneLevel, kAll };
  // Whole, and only if there is none; AlreadyExists otherwise. Durable when it returns.
  virtual absl::Status PutIfAbsent(const std::string& key, std::string_view content) = 0;
  // The same for content of any length.
  virtual absl::StatusOr<std::unique_ptr<FileWriter>> Write(const std::string& key,
                                                            int64_t expected_bytes) = 0;
  // NotFound when there is none.
  virtual absl::StatusOr<BlobFacts> Head(const std::string& key) const = 0;
  // Fills `out`; DataLoss when the object ends earlier or is another version than `version`.
  virtual absl::Status ReadAt(const BlobFacts& blob,
                              int64_t offset,
                              std::span<std::byte> out) const = 0;
  virtual absl::StatusOr<BlobListing> List(const std::string& prefix, Depth depth) const = 0;
  // None is fine.
  virtual absl::Status Delete(const std::string& key) = 0;
  // Removes what writers that are gone have sent of contents that they never finished.
  virtual absl::Status DropUnfinished(const std::string& prefix) = 0;
  // For people and OpenStore.
  virtual std::string Locate(std::string_view key) const = 0;
};

}  // namespace ravel::store
