// ObjectStore over a POSIX directory. A file is written as NAME.<random>.part, made durable, then
// renamed without replacing, and its folder is synced: a name is there with its bytes or not at
// all. Parts are shown to nobody. Publishing is renameat2, which decides races between writers
// atomically, with link and rename where a file system lacks the flag. Space is reserved with
// fallocate where possible, so a full disk shows before data is copied.

#include "common/store/file_store.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::store {
namespace {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  // The result of close(); 0 when it was closed before.
  int Close() { return fd_ < 0 ? 0 : ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

absl::Status IoError(std::string_view operation, const std::string& path) {
  return ErrnoStatus(errno, absl::StrCat(std::string(operation), " ", path));
}

absl::Status SyncPath(const std::string& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) {
    return IoError("open", path);
  }
  return ::fsync(directory.get()) == 0 ? absl::OkStatus() : IoError("fsync", path);
}

absl::Status SyncParent(const std::string& path) {
  const size_t slash = path.rfind('/');
  return SyncPath(slash == 0 ? "/" : path.substr(0, slash));
}

constexpr std::string_view kPart = ".part";

// Writers of one name, also on other hosts, do not meet in one part.
std::string PartOf(const std::string& path) {
  std::random_device random;
  return absl::StrFormat("%s.%08x%08x%s", path, random(), random(), kPart);
}

absl::Status RenameFile(const std::string& source, const std::string& target) {
  const std::string what = absl::StrCat("rename ", source, " to ", target);
  if (::renameat2(AT_FDCWD, source.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL && errno != ENOSYS) {
    return ErrnoStatus(errno, what);
  }
  // No such flag here. link() does not replace either; a directory cannot replace one that is not
  // empty.
  struct stat status = {};
  if (::stat(source.c_str(), &status) != 0) {
    return ErrnoStatus(errno, what);
  }
  if (S_ISDIR(status.st_mode)) {
    if (::rename(source.c_str(), target.c_str()) == 0) {
      return absl::OkStatus();
    }
    return ErrnoStatus(errno == ENOTEMPTY ? EEXIST : errno, what);
  }
  if (::link(source.c_str(), target.c_str()) != 0 || ::unlink(source.c_str()) != 0) {
    return ErrnoStatus(errno, what);
  }
  return absl::OkStatus();
}

class PosixWriter : public FileWriter {
 public:
  PosixWriter(int fd, std::string part, std::string path)
      : file_(fd), part_(std::move(part)), path_(std::move(path)) {}
  ~PosixWriter() override {
    if (!finished_) {
      ::unlink(part_.c_str());  // nobody sees it, if it stays
    }
  }

  absl::Status Append(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = ::write(file_.get(), bytes.data(), bytes.size());
      if (written < 0) {
        if (errno == EINTR) {
          continue;
        }
        return IoError("write", path_);
      }
      bytes = bytes.subspan(Size(written));
    }
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (::fdatasync(file_.get()) != 0) {
      return IoError("fdatasync", path_);
    }
    if (file_.Close() != 0) {
      return IoError("close", path_);
    }
    RETURN_IF_ERROR(RenameFile(part_, path_));
    finished_ = true;
    return SyncParent(path_);
  }

 private:
  Descriptor file_;
  std::string part_;
  std::string path_;
  bool finished_ = false;
};

class PosixReader : public FileReader {
 public:
  PosixReader(int fd, int64_t size, std::string path)
      : file_(fd), size_(size), path_(std::move(path)) {}

  int64_t size() const override { return size_; }

  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    while (!out.empty()) {
      const ssize_t got = ::pread(file_.get(), out.data(), out.size(), offset);
      if (got < 0) {
        if (errno == EINTR) {
          continue;
        }
        return IoError("read", path_);
      }
      if (got == 0) {
        return absl::DataLossError(absl::StrCat(
            path_, ": truncated: ends at byte ", offset, ", expected ", out.size(), " more"));
      }
      out = out.subspan(Size(got));
      offset += got;
    }
    return absl::OkStatus();
  }

 private:
  Descriptor file_;
  int64_t size_;
  std::string path_;
};

// A folder's names, parts too, in order.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), &::closedir);
  if (stream == nullptr) {
    return IoError("list", folder);
  }
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    // NOLINTNEXTLINE(concurrency-mt-unsafe): safe for distinct streams, POSIX.1-2024
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      break;
    }
    const std::string name = entry->d_name;
    if (name != "." && name != "..") {
      names.push_back(name);
    }
  }
  if (errno != 0) {
    return IoError("list", folder);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Removes the files of a folder, and of folders in it, that were never finished.
absl::Status RemoveParts(const std::string& folder, const FileStore::Unlink& unlink) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  for (const std::string& name : names) {
    const std::string path = JoinPath(folder, name);
    struct stat status = {};
    if (::lstat(path.c_str(), &status) != 0) {
      continue;  // its writer has just ended
    }
    if (S_ISDIR(status.st_mode)) {
      RETURN_IF_ERROR(RemoveParts(path, unlink));
    } else if (absl::EndsWith(name, std::string(kPart)) && unlink(path) != 0 && errno != ENOENT) {
      return IoError("remove", path);
    }
  }
  return absl::OkStatus();
}

// A file, a link, or a folder and all in it; what another removes meanwhile is fine below `path`.
// A folder may get a file after it was listed, from a writer that began before: it is looked at
// again then.
absl::Status RemoveTree(const std::string& path, const FileStore::Unlink& unlink) {
  constexpr int kLooks = 16;
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0) {
    return IoError("remove", path);
  }
  if (!S_ISDIR(status.st_mode)) {
    return unlink(path) == 0 ? absl::OkStatus() : IoError("remove", path);
  }
  for (int look = 1;; ++look) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(path));
    for (const std::string& name : names) {
      const absl::Status removed = RemoveTree(JoinPath(path, name), unlink);
      RETURN_IF_ERROR(absl::IsNotFound(removed) ? absl::OkStatus() : removed);
    }
    if (::rmdir(path.c_str()) == 0) {
      return absl::OkStatus();
    }
    if ((errno != ENOTEMPTY && errno != EEXIST) || look == kLooks) {
      return IoError("remove", path);
    }
  }
}

}  // namespace

FileStore::FileStore(std::string root, Unlink unlink)
    : root_(std::move(root)), unlink_(unlink ? std::move(unlink) : [](const std::string& path) {
        return ::unlink(path.c_str());
      }) {
  CHECK(!root_.empty() && root_.front() == '/');
  while (root_.size() > 1 && root_.back() == '/') {
    root_.pop_back();
  }
}

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::FromUrl(std::string_view url) {
  constexpr std::string_view kScheme = "file://";
  std::string_view path = url;
  if (path.substr(0, kScheme.size()) == kScheme) {
    path.remove_prefix(kScheme.size());
  }
  if (path.empty() || path.front() != '/') {
    return absl::InvalidArgumentError(
        absl::StrCat("store \"", std::string(url), "\": expected file:///absolute/path"));
  }
  return std::make_unique<FileStore>(std::string(path));
}

std::string FileStore::Locate(std::string_view path) const {
  // Names come from plans, manifests and listings, all checked; a way out of the root would be our
  // bug.
  CHECK(path.empty() || path.front() != '/');
  CHECK(absl::StrCat("/", std::string(path), "/").find("/../") == std::string::npos);
  return JoinPath(root_, path);
}

absl::Status FileStore::MakeRoot() {
  for (size_t end = 1; end <= root_.size(); ++end) {
    end = std::min(root_.find('/', end), root_.size());
    const std::string path = root_.substr(0, end);
    if (::mkdir(path.c_str(), 0777) == 0) {
      const std::string parent = path.substr(0, path.rfind('/'));
      RETURN_IF_ERROR(SyncPath(parent.empty() ? "/" : parent));
    } else if (errno != EEXIST) {
      return IoError("mkdir", path);
    }
  }
  struct stat status = {};
  if (::stat(root_.c_str(), &status) != 0) {
    return IoError("stat", root_);
  }
  return S_ISDIR(status.st_mode)
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat(root_, ": not a directory"));
}

absl::Status FileStore::ProbeWritable() const {
  std::string folder = root_;
  struct stat status = {};
  while (::stat(folder.c_str(), &status) != 0) {
    if (errno != ENOENT || folder == "/") {
      return IoError("stat", folder);
    }
    folder = folder.substr(0, std::max<size_t>(folder.rfind('/'), 1));
  }
  if (!S_ISDIR(status.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(folder, ": not a directory"));
  }
  Descriptor nameless(::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
  if (nameless.get() >= 0) {
    return absl::OkStatus();
  }
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL) {
    return IoError("create a file in", folder);
  }
  // This file system knows no files without a name: one that nobody else can have.
  std::string name = folder + "/.ravel-probe-XXXXXX";
  const Descriptor named(::mkostemp(name.data(), O_CLOEXEC));
  if (named.get() < 0) {
    return IoError("create a file in", folder);
  }
  return ::unlink(name.c_str()) == 0 ? absl::OkStatus() : IoError("remove", name);
}

absl::StatusOr<int64_t> FileStore::ChangedMs(std::string_view path) const {
  const std::string full = Locate(path);
  struct stat status = {};
  if (::stat(full.c_str(), &status) != 0) {
    return IoError("stat", full);
  }
  const auto ms = [](const timespec& time) {
    return static_cast<int64_t>(time.tv_sec) * 1000 + time.tv_nsec / 1'000'000;
  };
  return std::max(ms(status.st_mtim), ms(status.st_ctim));  // a rename changes only the second
}

absl::StatusOr<std::unique_ptr<FileWriter>> FileStore::Create(std::string_view path,
                                                              int64_t expected_bytes) {
  const std::string full = Locate(path);
  struct stat status = {};
  if (::lstat(full.c_str(), &status) == 0) {
    return ErrnoStatus(EEXIST, absl::StrCat("create ", full));
  }
  const std::string part = PartOf(full);
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) {
    return IoError("create", full);
  }
  auto writer = std::make_unique<PosixWriter>(fd, part, full);
  // Not every file system can; then a full disk shows later. KEEP_SIZE: what is not written yet is
  // not there.
  if (expected_bytes > 0 && ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, expected_bytes) != 0 &&
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    return IoError("reserve space for", full);
  }
  return writer;
}

absl::Status FileStore::CheckSpace(int64_t bytes) const {
  struct statvfs status = {};
  if (::statvfs(root_.c_str(), &status) != 0 || status.f_blocks == 0) {
    return absl::OkStatus();  // not every file system knows
  }
  const uint64_t free = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  return free >= static_cast<uint64_t>(bytes)
             ? absl::OkStatus()
             : absl::ResourceExhaustedError(absl::StrCat(root_,
                                                         ": No space left on device: ",
                                                         bytes,
                                                         " bytes are needed, ",
                                                         free,
                                                         " are free"));
}

absl::StatusOr<std::unique_ptr<FileReader>> FileStore::Open(std::string_view path) const {
  const std::string full = Locate(path);
  const int fd =
      ::open(full.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO would hold the caller
  if (fd < 0) {
    return IoError("open", full);
  }
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    return absl::FailedPreconditionError(absl::StrCat(full, ": not a regular file"));
  }
  return std::make_unique<PosixReader>(fd, status.st_size, full);
}

absl::StatusOr<std::vector<ListedEntry>> FileStore::List(std::string_view directory) const {
  const std::string full = Locate(directory);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(full.c_str()), &::closedir);
  if (stream == nullptr) {
    return IoError("list", full);
  }
  std::vector<ListedEntry> entries;
  for (;;) {
    errno = 0;
    // NOLINTNEXTLINE(concurrency-mt-unsafe): safe for distinct streams, POSIX.1-2024
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      break;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == "..") {
      continue;
    }
    struct stat status = {};
    if (::fstatat(::dirfd(stream.get()), name.c_str(), &status, 0) != 0) {
      if (errno == ENOENT) {
        continue;  // removed meanwhile
      }
      return IoError("stat", JoinPath(full, name));
    }
    const bool is_directory = S_ISDIR(status.st_mode);
    if (!is_directory && absl::EndsWith(name, std::string(kPart))) {
      continue;
    }
    entries.push_back({name, is_directory, is_directory ? 0 : status.st_size});
  }
  if (errno != 0) {
    return IoError("list", full);
  }
  std::sort(entries.begin(), entries.end(), [](const ListedEntry& a, const ListedEntry& b) {
    return a.name < b.name;
  });
  return entries;
}

absl::Status FileStore::MakeDirectory(std::string_view path) {
  const std::string full = Locate(path);
  if (::mkdir(full.c_str(), 0777) != 0 && errno != EEXIST) {
    return IoError("mkdir", full);
  }
  return SyncParent(full);  // also when another has just made it
}

absl::Status FileStore::PublishIfAbsent(std::string_view from, std::string_view to) {
  const std::string source = Locate(from);
  const std::string target = Locate(to);
  struct stat status = {};
  if (::stat(source.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    RETURN_IF_ERROR(RemoveParts(source, unlink_));
    RETURN_IF_ERROR(SyncPath(source));
  }
  const absl::Status renamed = RenameFile(source, target);
  if (!renamed.ok() && !absl::IsAlreadyExists(renamed) && !absl::IsNotFound(renamed)) {
    return renamed;
  }
  const absl::Status synced = SyncParent(target);
  if (!synced.ok() && !absl::IsNotFound(synced)) {
    return synced;
  }
  RETURN_IF_ERROR(renamed);
  return SplitLast(from).first == SplitLast(to).first ? absl::OkStatus() : SyncParent(source);
}

absl::Status FileStore::Withdraw(std::string_view path) {
  const std::string full = Locate(path);
  RETURN_IF_ERROR(RemoveTree(full, unlink_));
  return path.empty() ? absl::OkStatus() : SyncParent(full);
}

}  // namespace ravel::store
