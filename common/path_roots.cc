#include "common/path_roots.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ravel {
namespace {

constexpr int kMaxLinks = 40;  // of one path, as the kernel's limit
constexpr int kMaxTries = 32;  // of one resolution that a rename beside it disturbs
constexpr int kMaxEntries = 65536;
constexpr char kReadVariable[] = "RAVEL_JOB_READ_ROOTS";
constexpr char kWriteVariable[] = "RAVEL_JOB_WRITE_ROOTS";

enum class LastLink { kFollow, kShow };

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The end of a path beneath a root, or errno: EXDEV if it leaves the root.
struct Found {
  int error = 0;
  Descriptor descriptor = Descriptor();  // O_PATH
};

Found FoundFd(int fd) {
  return fd < 0 ? Found{.error = errno} : Found{.descriptor = Descriptor(fd)};
}

// Pushes the components of `path` so that the first one is taken first.
void PushComponents(const std::string& path, std::vector<std::string>& todo) {
  const std::vector<std::string> parts = absl::StrSplit(path, '/', absl::SkipEmpty());
  todo.insert(todo.end(), parts.rbegin(), parts.rend());
}

// Does as openat2 with RESOLVE_BENEATH: absolute links leave the root by definition.
Found WalkBeneath(int root, const std::string& path, LastLink last) {
  std::vector<Descriptor> below;  // the folders between the root and here
  std::vector<std::string> todo;
  PushComponents(path, todo);
  int links = 0;
  while (!todo.empty()) {
    const std::string name = std::move(todo.back());
    todo.pop_back();
    if (name == ".") {
      continue;
    }
    if (name == "..") {
      if (below.empty()) {
        return {.error = EXDEV};
      }
      below.pop_back();
      continue;
    }
    const int here = below.empty() ? root : below.back().get();
    Found found = FoundFd(openat(here, name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    struct stat facts = {};
    if (found.error == 0 && fstat(found.descriptor.get(), &facts) != 0) {
      found.error = errno;
    }
    if (found.error != 0) {
      return found;
    }
    if (!S_ISLNK(facts.st_mode) || (todo.empty() && last == LastLink::kShow)) {
      below.push_back(std::move(found.descriptor));
      continue;
    }
    char target[PATH_MAX] = {};
    const ssize_t length = readlinkat(found.descriptor.get(), "", target, sizeof target - 1);
    if (length < 0 || ++links > kMaxLinks) {
      return {.error = length < 0 ? errno : ELOOP};
    }
    if (target[0] == '/') {
      return {.error = EXDEV};
    }
    PushComponents(target, todo);
  }
  return below.empty() ? FoundFd(openat(root, ".", O_PATH | O_CLOEXEC))
                       : Found{.descriptor = std::move(below.back())};
}

Found OpenBeneath(int root, const std::string& path, LastLink last, PathRoots::Method method) {
  open_how how = {};
  how.flags = O_PATH | O_CLOEXEC | (last == LastLink::kShow ? O_NOFOLLOW : 0U);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  for (int i = 0; method == PathRoots::Method::kBest && i < kMaxTries; ++i) {
    Found found =
        FoundFd(static_cast<int>(syscall(SYS_openat2, root, path.c_str(), &how, sizeof how)));
    if (found.error == ENOSYS || found.error == EPERM) {
      break;  // an old kernel, or a filter of system calls that knows no openat2
    }
    if (found.error != EAGAIN && found.error != EINTR) {
      return found;
    }
  }
  return WalkBeneath(root, path, last);
}

absl::Status Leaves(std::string_view path, const std::string& root) {
  return absl::PermissionDeniedError(absl::StrCat(
      std::string(path), ": a symbolic link in it leads out of ", root, ", or to nothing"));
}

// A path that is not there yet is judged by the nearest folder above it. A link that leads nowhere
// could be made to lead out by whoever opens it to write.
absl::Status Resolve(const std::string& root, const std::string& path, PathRoots::Method method) {
  const Descriptor folder(open(root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) {
    return ErrnoStatus(errno, root);
  }
  std::string rest = path == root ? "." : path.substr(root == "/" ? 1 : root.size() + 1);
  while (true) {
    const Found found = OpenBeneath(folder.get(), rest, LastLink::kFollow, method);
    if (found.error == 0) {
      return absl::OkStatus();
    }
    if (found.error == EXDEV) {
      return Leaves(path, root);
    }
    if (found.error != ENOENT || rest == ".") {
      return ErrnoStatus(found.error, path);
    }
    if (OpenBeneath(folder.get(), rest, LastLink::kShow, method).error == 0) {
      return Leaves(path, root);
    }
    const size_t slash = rest.rfind('/');
    rest = slash == std::string::npos ? "." : rest.substr(0, slash);
  }
}

absl::Status Outside(std::string_view path) {
  return absl::PermissionDeniedError(
      absl::StrCat(std::string(path),
                   ": outside of the folders that this node opens for jobs (--read-root, "
                   "--write-root)"));
}

}  // namespace

absl::StatusOr<std::string> PlainPath(std::string_view text) {
  const std::string given(text);
  const std::string path = absl::StartsWith(given, "file://") ? given.substr(7) : given;
  if (!absl::StartsWith(path, "/") || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("expected an absolute path, got '", given, "'"));
  }
  std::string plain;
  for (const std::string& part :
       std::vector<std::string>(absl::StrSplit(path, '/', absl::SkipEmpty()))) {
    if (part == "..") {
      return absl::InvalidArgumentError(absl::StrCat("expected a path without '..', got ", given));
    }
    if (part != ".") {
      absl::StrAppend(&plain, "/", part);
    }
  }
  return plain.empty() ? "/" : plain;
}

bool IsBeneath(std::string_view root, std::string_view path) {
  const bool begins = path.substr(0, root.size()) == root;
  return begins && (path.size() == root.size() || root.back() == '/' || path[root.size()] == '/');
}

bool IsServiceUrl(std::string_view text) {
  return text.substr(0, 8) == "ravel://" || text.substr(0, 5) == "s3://";
}

std::vector<std::string> RootVariables(const RootFolders& folders) {
  return {absl::StrCat(kReadVariable, "=", absl::StrJoin(folders.read, "\n")),
          absl::StrCat(kWriteVariable, "=", absl::StrJoin(folders.write, "\n"))};
}

RootFolders RootsOfEnvironment() {
  const auto folders = [](const char* variable) -> std::vector<std::string> {
    const char* const text = std::getenv(variable);
    return text == nullptr ? std::vector<std::string>()
                           : absl::StrSplit(text, '\n', absl::SkipEmpty());
  };
  return {.read = folders(kReadVariable), .write = folders(kWriteVariable)};
}

absl::StatusOr<PathRoots> PathRoots::Create(const RootFolders& folders, Method method) {
  PathRoots roots;
  roots.method_ = method;
  const auto add = [](const std::vector<std::string>& from,
                      std::vector<std::string>& to) -> absl::Status {
    for (const std::string& folder : from) {
      if (absl::StrContains(folder, "\n")) {  // they stand between folders in a variable
        return absl::InvalidArgumentError("expected no line break in a path");
      }
      ASSIGN_OR_RETURN(to.emplace_back(), PlainPath(folder));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(Annotate(add(folders.read, roots.folders_.read), "--read-root"));
  RETURN_IF_ERROR(Annotate(add(folders.write, roots.folders_.write), "--write-root"));
  return roots;
}

absl::Status PathRoots::Check(std::string_view path, PathUse use) const {
  if (!any()) {
    return absl::OkStatus();
  }
  const absl::StatusOr<std::string> plain = PlainPath(path);
  if (!plain.ok()) {
    return absl::PermissionDeniedError(plain.status().message());
  }
  absl::Status refused = Outside(path);
  const auto passes = [&](const std::vector<std::string>& roots) {
    for (const std::string& root : roots) {
      if (!IsBeneath(root, *plain)) {
        continue;
      }
      refused = Resolve(root, *plain, method_);
      if (refused.ok()) {
        return true;
      }
    }
    return false;
  };
  const bool good = passes(folders_.write) || (use == PathUse::kRead && passes(folders_.read));
  return good ? absl::OkStatus() : refused;
}

// Links among the entries: names in indexes choose which of them are opened.
absl::Status PathRoots::CheckEntries(const std::string& folder, PathUse use) const {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(opendir(folder.c_str()), &closedir);
  if (stream == nullptr) {
    return absl::OkStatus();  // no folder, or none that can be read: its opener says so
  }
  int count = 0;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): safe for distinct streams, POSIX.1-2024
  while (const dirent* entry = readdir(stream.get())) {
    if (++count > kMaxEntries) {
      return absl::InvalidArgumentError(
          absl::StrCat(folder, ": expected at most ", kMaxEntries, " entries"));
    }
    if (entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") {
        RETURN_IF_ERROR(Check(absl::StrCat(folder, "/", name), use));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PathRoots::CheckAll(std::span<const RootedPath> paths) const {
  if (!any()) {
    return absl::OkStatus();
  }
  for (const RootedPath& path : paths) {
    if (path.path.empty() || IsServiceUrl(path.path)) {
      continue;
    }
    absl::Status status = Check(path.path, path.use);
    if (path.shape == PathShape::kTokens) {
      for (const char* ending : {".bin", ".idx"}) {
        status = status.ok() ? Check(absl::StrCat(path.path, ending), path.use) : status;
      }
    }
    if (status.ok() && path.shape == PathShape::kFolderOfFiles) {
      status = CheckEntries(*PlainPath(path.path), path.use);
    }
    RETURN_IF_ERROR(path.field.empty() ? status : Annotate(status, path.field));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> OpenFileBeneath(const std::string& root,
                                    const std::string& path,
                                    PathRoots::Method method) {
  const Descriptor folder(open(root.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder.get() < 0) {
    return errno == ELOOP || errno == ENOTDIR ? Leaves(root, root) : ErrnoStatus(errno, root);
  }
  const Found found = OpenBeneath(folder.get(), path, LastLink::kFollow, method);
  if (found.error != 0) {
    return found.error == EXDEV ? Leaves(path, root) : ErrnoStatus(found.error, path);
  }
  struct stat facts = {};
  if (fstat(found.descriptor.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected a regular file"));
  }
  // The descriptor is of the file itself: what its name leads to by now does not matter.
  const std::string self = absl::StrCat("/proc/self/fd/", found.descriptor.get());
  const int fd = open(self.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  return fd < 0 ? absl::StatusOr<int>(ErrnoStatus(errno, path)) : fd;
}

}  // namespace ravel
