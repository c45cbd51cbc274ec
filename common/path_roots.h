#pragma once

// The folders beneath which paths of jobs may lie. A path is compared by its text first, so that
// nothing outside is touched, and then resolved by the kernel beneath its root: neither `..` nor a
// symbolic link leaves it. The verdict is about the moment of the call: an opener that follows it
// sees what is there then.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel {

enum class PathUse { kRead, kWrite };

// The shape of what a field names, which says which files are opened for it.
enum class PathShape {
  kOne,           // a file or a folder
  kTokens,        // a flat file, or the prefix of PREFIX.bin and PREFIX.idx
  kFolderOfFiles  // a folder whose files are opened by names that stand elsewhere
};

// A path that a job names, or a URL: those of services are nobody's files, and pass.
struct RootedPath {
  std::string field = {};  // of the job file; empty: errors name the path alone
  std::string path;        // empty: none
  PathUse use = PathUse::kRead;
  PathShape shape = PathShape::kOne;
};

struct RootFolders {
  std::vector<std::string> read = {};
  std::vector<std::string> write = {};  // may be read, too

  bool any() const { return !read.empty() || !write.empty(); }
};

// The text of an absolute path or a file:// URL without repeated and trailing slashes and `.`.
// InvalidArgument for another text, and for one with a component `..` or a zero byte.
absl::StatusOr<std::string> PlainPath(std::string_view text);
// True if `path` is `root` or lies beneath it, by their text alone; both are plain, or URLs.
bool IsBeneath(std::string_view root, std::string_view path);
// How a daemon tells its trainers of them: variables of their environment, and what these say here.
std::vector<std::string> RootVariables(const RootFolders& folders);
RootFolders RootsOfEnvironment();
// True for URLs of stores that are services: ravel://..., s3://...
bool IsServiceUrl(std::string_view text);

// Thread-compatible; holds nothing open, so that a root may be mounted later.
class PathRoots {
 public:
  // Resolves with openat2 where the kernel has it, else component by component; tests ask for the
  // latter.
  enum class Method { kBest, kWalk };

  // Without folders everything passes.
  PathRoots() = default;
  // InvalidArgument names the folder that is no plain absolute path.
  static absl::StatusOr<PathRoots> Create(const RootFolders& folders,
                                          Method method = Method::kBest);

  const RootFolders& folders() const { return folders_; }
  bool any() const { return folders_.any(); }

  // PermissionDenied for a path that lies beneath no root of this use, or leaves it; it says
  // nothing of what is there. OK for one that is not there yet and would be made beneath a root.
  absl::Status Check(std::string_view path, PathUse use) const;
  // The first refusal among all that would be opened, by its field.
  absl::Status CheckAll(std::span<const RootedPath> paths) const;

 private:
  absl::Status CheckEntries(const std::string& folder, PathUse use) const;

  RootFolders folders_;
  Method method_ = Method::kBest;
};

// Opens the regular file `path`, relative to the folder `root`, to read. The file lies beneath it:
// PermissionDenied if `..` or a symbolic link leads out, or if the root itself is a link; NotFound
// if nothing is there. The caller closes the descriptor.
absl::StatusOr<int> OpenFileBeneath(const std::string& root,
                                    const std::string& path,
                                    PathRoots::Method method = PathRoots::Method::kBest);

}  // namespace ravel
