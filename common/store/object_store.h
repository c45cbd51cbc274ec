#pragma once

// The one interface to checkpoint storage. Everything that a commit depends on is an operation
// here, so that tests can fail or lose power at each. Paths are relative to the store's root:
// "step-0000000020/manifest.pb", no leading slash, no "..";
// "" is the root. Errors name the operation and the full path. Implementations are Thread-safe.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::store {

struct ListedEntry {
  std::string name;  // last part of the path
  bool is_directory = false;
  int64_t size = 0;  // of a file
  bool operator==(const ListedEntry&) const = default;
};

// A new file that is being written. Destroyed without Finish, it stays as it is: whoever reads it
// must not trust it. Used from one thread at a time.
class FileWriter {
 public:
  virtual ~FileWriter() = default;
  virtual absl::Status Append(std::span<const std::byte> bytes) = 0;
  // Makes the bytes durable and closes. A failed Finish is not repeated: its file is lost.
  virtual absl::Status Finish() = 0;
};

// An open file. Thread-safe.
class FileReader {
 public:
  virtual ~FileReader() = default;
  virtual int64_t size() const = 0;
  // Fills `out` from `offset`; a file that ends earlier is DataLoss "... truncated: ...".
  virtual absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const = 0;
};

class ObjectStore {
 public:
  virtual ~ObjectStore() = default;

  // Creates a file that must not exist yet (AlreadyExists); reserves `expected_bytes`, so that a
  // full disk shows early.
  virtual absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                             int64_t expected_bytes) = 0;
  // ResourceExhausted when fewer than `bytes` are free, as far as the store can tell.
  virtual absl::Status CheckSpace(int64_t /*bytes*/) const { return absl::OkStatus(); }
  virtual absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const = 0;
  // Entries by name; NotFound when the directory does not exist.
  virtual absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const = 0;
  // Creates one directory; one that exists is fine.
  virtual absl::Status MakeDirectory(std::string_view path) = 0;
  // Atomic, for files and directories; AlreadyExists when `to` exists, and nothing has changed
  // then.
  virtual absl::Status RenameNoReplace(std::string_view from, std::string_view to) = 0;
  // Atomic, for files; what `to` was is gone.
  virtual absl::Status Replace(std::string_view from, std::string_view to) = 0;
  // A file, or an empty directory; NotFound when there is none.
  virtual absl::Status Remove(std::string_view path) = 0;
  // Makes the entries of a directory (creations, renames, removals) durable.
  virtual absl::Status SyncDirectory(std::string_view path) = 0;
  // When a file or directory itself was last changed, moved or written to, Unix time. Unimplemented
  // where the store does not know.
  virtual absl::StatusOr<int64_t> ChangedMs(std::string_view path) const {
    return absl::UnimplementedError(Locate(path));
  }
  // For people: the absolute path or URL.
  virtual std::string Locate(std::string_view path) const = 0;
};

// Returns true if a file or directory exists; errors other than NotFound are errors.
absl::StatusOr<bool> Exists(const ObjectStore& store, std::string_view path);
// A whole file of at most `max_bytes`.
absl::StatusOr<std::string> ReadFile(const ObjectStore& store,
                                     std::string_view path,
                                     int64_t max_bytes);
// A small file, create-if-absent and whole or not at all: writes PATH.<unique>.part, syncs, renames
// without replacing, syncs the directory. AlreadyExists when the path exists; the part is removed
// then. `unique` tells concurrent writers apart.
absl::Status PutNew(ObjectStore& store,
                    std::string_view path,
                    std::string_view contents,
                    std::string_view unique);
// Removes a directory and all in it; one that does not exist is fine.
absl::Status RemoveTree(ObjectStore& store, std::string_view path);
// `directory` and every missing parent below the root, each made durable.
absl::Status MakeDirectories(ObjectStore& store, std::string_view directory);

// "a/b", or the other when one is empty.
std::string JoinPath(std::string_view a, std::string_view b);

}  // namespace ravel::store
