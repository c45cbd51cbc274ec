#pragma once

// The one interface to checkpoint storage. Checkpoints know five acts: create a whole file, publish
// a folder or file under another name, withdraw, list, read. How a store makes them atomic and
// durable (rename and fsync, a conditional request, a server) is its own matter. Every act that a
// commit depends on is an operation here, so that tests can fail or lose power at each. Paths are
// relative to the store's root: "step-0000000020/manifest.pb", no leading slash, no ".."; "" is the
// root. Errors name the operation and the full path. Implementations are Thread-safe.

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

// A new file that is being written. Nobody sees it before Finish; destroyed without Finish, it
// leaves nothing that anybody sees. Used from one thread at a time.
class FileWriter {
 public:
  virtual ~FileWriter() = default;
  virtual absl::Status Append(std::span<const std::byte> bytes) = 0;
  // The file appears under its name, whole and durable with it; AlreadyExists when another has
  // taken the name meanwhile. A failed Finish is not repeated: its file is lost.
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

  // Makes the root and its parents, durably.
  virtual absl::Status MakeRoot() = 0;
  // OK when the root, or else its nearest parent that exists, takes new files. Leaves nothing
  // behind and makes no folder.
  virtual absl::Status ProbeWritable() const = 0;

  // Creates a file that must not exist yet (AlreadyExists) in a folder that does; reserves
  // `expected_bytes`, so that a full store shows early.
  virtual absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                             int64_t expected_bytes) = 0;
  // A small file, create-if-absent, whole and durable or not at all. AlreadyExists when the path
  // exists.
  virtual absl::Status Put(std::string_view path, std::string_view contents);
  // ResourceExhausted when fewer than `bytes` are free, as far as the store can tell.
  virtual absl::Status CheckSpace(int64_t /*bytes*/) const { return absl::OkStatus(); }
  virtual absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const = 0;
  // Whole files and folders by name; NotFound when the folder does not exist.
  virtual absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const = 0;
  // Creates one folder, durably; one that exists is fine. A store without folders does nothing.
  virtual absl::Status MakeDirectory(std::string_view path) = 0;
  // Renames `from`, a file or a folder with all in it, to `to`: atomic, and durable when it
  // returns. AlreadyExists when `to` exists, NotFound without `from`; nothing has changed then, and
  // an existing `to` is durable.
  virtual absl::Status PublishIfAbsent(std::string_view from, std::string_view to) = 0;
  // False where a folder is not renamed as a whole: a removal under its old name that began before
  // may take files out of it, and a late write may add one. Who publishes looks at it afterwards.
  virtual bool RenamesWhole() const { return true; }
  // Removes a file, or a folder with all in it, durably; NotFound when there is none. A folder goes
  // in the order of names; cut off in the middle, the rest stays.
  virtual absl::Status Withdraw(std::string_view path) = 0;
  // Nodes may no longer write saves of the job with that tag (ckpt::JobTag) and of epochs below
  // `min_epoch` in `directory`, where the store can tell them apart. Elsewhere the epoch in the
  // name of a save keeps it away from later ones, and this does nothing.
  virtual absl::Status Fence(std::string_view /*directory*/,
                             uint32_t /*job_tag*/,
                             int64_t /*min_epoch*/) {
    return absl::OkStatus();
  }
  // When a file or directory itself was last changed, moved or written to, Unix time. Unimplemented
  // where the store does not know.
  virtual absl::StatusOr<int64_t> ChangedMs(std::string_view path) const {
    return absl::UnimplementedError(Locate(path));
  }
  // For people, and for OpenStore: the absolute path or URL.
  virtual std::string Locate(std::string_view path) const = 0;
};

// Returns true if a file or directory exists; errors other than NotFound are errors.
absl::StatusOr<bool> Exists(const ObjectStore& store, std::string_view path);
// A whole file of at most `max_bytes`.
absl::StatusOr<std::string> ReadFile(const ObjectStore& store,
                                     std::string_view path,
                                     int64_t max_bytes);
// Withdraw, and fine when there is nothing.
absl::Status WithdrawIfThere(ObjectStore& store, std::string_view path);
// `directory` and every missing parent below the root, each made durable.
absl::Status MakeDirectories(ObjectStore& store, std::string_view directory);

// "a/b", or the other when one is empty.
std::string JoinPath(std::string_view a, std::string_view b);
// "a/b" and "c" of "a/b/c"; "" and "c" of "c".
std::pair<std::string_view, std::string_view> SplitLast(std::string_view path);

}  // namespace ravel::store
