#pragma once

// ObjectStore over objects without folders or renames.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/store/blob_store.h"
#include "common/store/object_store.h"

namespace ravel::store {

// A folder is a marker, an empty object "FOLDER/". Publishing a folder makes a link, one small
// object that is created if absent: .links/NAME says which folder is NAME from now on. That folder
// keeps its objects and is seen under its new name alone. Publishing it again makes another link
// and removes the first. So a step's objects lie where its save has written them, and one
// conditional write decides between publishers of one name. Who gives one folder two names sees the
// other's link after making its own, takes its own back, and gets Unavailable. A file is published
// by a copy. Thread-safe.
class BlobTree : public ObjectStore {
 public:
  // `prefix`: of all keys, without slashes around it.
  BlobTree(std::unique_ptr<BlobStore> blobs, std::string prefix);

  // Also proves that the store creates if absent: FailedPrecondition when it replaces.
  absl::Status MakeRoot() override;
  absl::Status ProbeWritable() const override;
  absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                     int64_t expected_bytes) override;
  absl::Status Put(std::string_view path, std::string_view contents) override;
  absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const override;
  absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const override;
  absl::Status MakeDirectory(std::string_view path) override;
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override;
  bool RenamesWhole() const override { return false; }
  absl::Status Withdraw(std::string_view path) override;
  absl::StatusOr<int64_t> ChangedMs(std::string_view path) const override;
  std::string Locate(std::string_view path) const override;

 private:
  using Links = std::map<std::string, std::string>;  // name -> folder, both below the prefix
  std::string Key(std::string_view path) const { return JoinPath(prefix_, path); }
  std::string LinkKey(std::string_view name) const;
  absl::StatusOr<Links> LoadLinks() const;
  // The place of a path's objects; NotFound for a folder that has another name now.
  absl::StatusOr<std::string> Resolve(const Links& links, std::string_view path) const;
  absl::StatusOr<bool> IsFolder(const Links& links, std::string_view path) const;
  absl::Status CheckParent(const Links& links, std::string_view path) const;
  absl::Status PublishFolder(const Links& links, std::string_view from, std::string_view to);
  // Unavailable if a folder has a name beside these two.
  absl::Status CheckNoOtherName(const Links& links,
                                const std::string& place,
                                std::string_view from,
                                std::string_view to) const;
  absl::Status PublishFile(const BlobFacts& from, std::string_view to_path, const std::string& to);
  // Everything below a folder; `place` is where its objects lie.
  absl::Status DeleteAll(const std::string& place);

  const std::unique_ptr<BlobStore> blobs_;
  const std::string prefix_;
  mutable Mutex mutex_;
  // Contents of link objects, by key and version.
  mutable std::map<std::string, std::pair<std::string, std::string>> read_links_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::store
