#pragma once

// Whole small files, and files that appear under their name only when they are complete.

#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel {

// The readers of a file: those whom the umask leaves, or its owner alone (mode 0600), for keys.
enum class FileAccess { kUmask, kOwner };

// Writes NAME.tmp-PID-N beside NAME, then gives it the name in one rename. Dropped without Publish,
// it leaves nothing; killed, it leaves a file whose lock (flock) is free. Errors name the file.
// Thread-compatible.
class FileWriter {
 public:
  static absl::StatusOr<std::unique_ptr<FileWriter>> Create(const std::string& path,
                                                            FileAccess access = FileAccess::kUmask);
  virtual ~FileWriter() = default;
  // Buffered (1 MiB).
  virtual absl::Status Write(std::string_view bytes) = 0;
  // Everything written so far is on disk.
  virtual absl::Status Sync() = 0;
  // Sync, rename (over an older file, if any), sync the folder.
  virtual absl::Status Publish() = 0;
};

// Removes the temporary files of `path` whose writers were killed, and returns how many. Those that
// a writer still holds stay, and so do all on a file system without locks.
int64_t RemoveUnfinished(const std::string& path);

// FileWriter in one call.
absl::Status WriteFileAtomically(const std::string& path,
                                 std::string_view bytes,
                                 FileAccess access = FileAccess::kUmask);

// The whole file; InvalidArgument if it is longer than max_bytes, or no regular file: opening or
// reading a FIFO could take for ever.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t max_bytes);
// The same from anything that can be read to its end, such as /dev/stdin.
absl::StatusOr<std::string> ReadStream(const std::string& path, int64_t max_bytes);

}  // namespace ravel
