#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// A directory of a POSIX file system. Files are written with plain writes, fdatasync and a rename;
// Create reserves space with fallocate where the file system can.
class FileStore : public ObjectStore {
 public:
  // unlink(2) of a file, for whoever counts what goes: 0, or -1 with errno.
  using Unlink = std::function<int(const std::string& path)>;

  // `root` must be absolute; it is created by MakeRoot, not here.
  explicit FileStore(std::string root, Unlink unlink = nullptr);
  // From "file:///absolute/path" or "/absolute/path"; any other scheme is InvalidArgument.
  static absl::StatusOr<std::unique_ptr<FileStore>> FromUrl(std::string_view url);

  const std::string& root() const { return root_; }

  absl::Status MakeRoot() override;
  absl::Status ProbeWritable() const override;
  absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                     int64_t expected_bytes) override;
  absl::Status CheckSpace(int64_t bytes) const override;
  absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const override;
  absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const override;
  absl::Status MakeDirectory(std::string_view path) override;
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override;
  absl::Status Withdraw(std::string_view path) override;
  absl::StatusOr<int64_t> ChangedMs(std::string_view path) const override;
  std::string Locate(std::string_view path) const override;

 private:
  std::string root_;
  Unlink unlink_;  // removes files, and parts of what is published
};

}  // namespace ravel::store
