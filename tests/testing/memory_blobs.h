#pragma once

// A BlobStore in memory, for tests of what is made of one.

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>

#include "common/mutex.h"
#include "common/store/blob_store.h"

namespace ravel::testing {

class MemoryBlobs : public store::BlobStore {
 public:
  // A store that ignores If-None-Match replaces.
  explicit MemoryBlobs(bool conditional = true) : conditional_(conditional) {}

  absl::Status PutIfAbsent(const std::string& key, std::string_view content) override {
    const MutexLock lock(mutex_);
    if (conditional_ && blobs_.contains(key)) {
      return absl::AlreadyExistsError(absl::StrCat("create ", key, ": File exists"));
    }
    blobs_[key] = {std::string(content), ++versions_};
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<store::FileWriter>> Write(const std::string& key,
                                                           int64_t /*expected_bytes*/) override {
    return std::make_unique<Writer>(this, key);
  }
  absl::StatusOr<store::BlobFacts> Head(const std::string& key) const override {
    const MutexLock lock(mutex_);
    const auto found = blobs_.find(key);
    if (found == blobs_.end()) {
      return absl::NotFoundError(key);
    }
    return FactsOf(*found);
  }
  absl::Status ReadAt(const store::BlobFacts& blob,
                      int64_t offset,
                      std::span<std::byte> out) const override {
    const MutexLock lock(mutex_);
    const auto found = blobs_.find(blob.key);
    if (found == blobs_.end()) {
      return absl::NotFoundError(blob.key);
    }
    std::memcpy(out.data(), found->second.first.data() + offset, out.size());
    return absl::OkStatus();
  }
  absl::StatusOr<store::BlobListing> List(const std::string& prefix, Depth depth) const override {
    const MutexLock lock(mutex_);
    store::BlobListing listing;
    for (const auto& blob : blobs_) {
      if (!blob.first.starts_with(prefix)) {
        continue;
      }
      const size_t slash = blob.first.find('/', prefix.size());
      if (depth == Depth::kAll || slash == std::string::npos) {
        listing.blobs.push_back(FactsOf(blob));
        continue;
      }
      const std::string common = blob.first.substr(0, slash + 1);
      if (listing.prefixes.empty() || listing.prefixes.back() != common) {
        listing.prefixes.push_back(common);
      }
    }
    return listing;
  }
  absl::Status Delete(const std::string& key) override {
    const MutexLock lock(mutex_);
    blobs_.erase(key);
    return absl::OkStatus();
  }
  absl::Status DropUnfinished(const std::string& /*prefix*/) override { return absl::OkStatus(); }
  std::string Locate(std::string_view key) const override {
    return absl::StrCat("blobs://", std::string(key));
  }

 private:
  using Blob = std::pair<std::string, int64_t>;  // content, version
  class Writer : public store::FileWriter {
   public:
    Writer(MemoryBlobs* blobs, std::string key) : blobs_(blobs), key_(std::move(key)) {}
    absl::Status Append(std::span<const std::byte> bytes) override {
      content_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return absl::OkStatus();
    }
    absl::Status Finish() override { return blobs_->PutIfAbsent(key_, content_); }

   private:
    MemoryBlobs* blobs_;
    const std::string key_;
    std::string content_;
  };
  static store::BlobFacts FactsOf(const std::pair<const std::string, Blob>& blob) {
    return {.key = blob.first,
            .size = static_cast<int64_t>(blob.second.first.size()),
            .version = absl::StrCat(blob.second.second)};
  }

  const bool conditional_;
  mutable Mutex mutex_;
  std::map<std::string, Blob> blobs_ ABSL_GUARDED_BY(mutex_);
  int64_t versions_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Fails from one change on, as when a coordinator dies there. Used from one thread at a time.
class CutOffBlobs : public MemoryBlobs {
 public:
  absl::Status PutIfAbsent(const std::string& key, std::string_view content) override {
    return left-- > 0 ? MemoryBlobs::PutIfAbsent(key, content) : Stopped();
  }
  absl::Status Delete(const std::string& key) override {
    return left-- > 0 ? MemoryBlobs::Delete(key) : Stopped();
  }

  int64_t left = kAll;  // changes that succeed
  static constexpr int64_t kAll = int64_t{1} << 40;

 private:
  static absl::Status Stopped() { return absl::UnavailableError("stopped here"); }
};

}  // namespace ravel::testing
