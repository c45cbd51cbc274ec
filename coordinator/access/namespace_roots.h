#pragma once

// The paths and stores that jobs of each namespace may name, from a file of the operator:
//
//   namespaces:
//     team-a:
//       read: [/data/team-a, /models]
//       write: [/checkpoints/team-a, 'ravel://store.example:7080/team-a', 's3://bucket/team-a']
//     '*': {read: [/data/public]}    # namespaces that have no entry; without it they have no roots
//
// Comparison is by text: no path is opened here, nodes hold the same paths against roots of theirs.

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/path_roots.h"
#include "common/status.h"

namespace ravel::coordinator {

// Immutable.
class NamespaceRoots {
 public:
  // InvalidArgument with line and column.
  static absl::StatusOr<NamespaceRoots> Parse(std::string_view text);

  // Plain paths and URLs of stores; none for a namespace without an entry.
  RootFolders Of(const std::string& namespace_name) const;
  // The roots that are folders, for a look at what lies there.
  RootFolders FoldersOf(const std::string& namespace_name) const;
  // Empty if `path`, an absolute path or the URL of a store, lies beneath a root of the namespace,
  // by its text; else what was expected.
  std::string Expected(const std::string& namespace_name, std::string_view path, PathUse use) const;

 private:
  std::map<std::string, RootFolders> namespaces_;
};

// The file, read again when it changes: a file that cannot be read or parsed later on leaves what
// was known before in force. Thread-safe.
class NamespaceRootsFile {
 public:
  // The error of a file that cannot be read or parsed, by its name.
  static absl::StatusOr<std::unique_ptr<NamespaceRootsFile>> Open(const std::string& path);

  std::shared_ptr<const NamespaceRoots> Get() const;  // shared: a reload drops it while others ask
  // Reads the file if it is another one than before; to be called now and then.
  void Refresh();

 private:
  explicit NamespaceRootsFile(std::string path) : path_(std::move(path)) {}
  absl::Status Read();

  const std::string path_;
  mutable Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);  // that was read last, good or not
  std::shared_ptr<const NamespaceRoots> roots_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
