#include "coordinator/ctl/held_folder.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ravel::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kMark[] = ".ravel-unfinished";

absl::Status InUse(const std::string& path) {
  return absl::AlreadyExistsError(absl::StrCat(path, " exists: another process writes it"));
}

// The mark goes last: what is removed half is a leftover still.
absl::Status RemoveAll(const std::string& path) {
  std::error_code error;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    if (entries->path().filename() != kMark) {
      fs::remove_all(entries->path(), error);
      if (error) {
        break;
      }
    }
  }
  if (!error) {
    fs::remove_all(path, error);
  }
  return error ? absl::FailedPreconditionError(absl::StrCat(path, ": ", error.message()))
               : absl::OkStatus();
}

absl::Status RemoveLeftover(const std::string& path) {
  const std::string mark = absl::StrCat(path, "/", kMark);
  const int fd = open(mark.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " exists, and nothing says that a killed run left it; remove it"));
  }
  const absl::Status removed = flock(fd, LOCK_EX | LOCK_NB) == 0 ? RemoveAll(path) : InUse(path);
  close(fd);
  return removed;
}

}  // namespace

HeldFolder::HeldFolder(std::string mark, int fd) : mark_(std::move(mark)), fd_(fd) {}

HeldFolder::~HeldFolder() {
  close(fd_);
}

absl::StatusOr<std::unique_ptr<HeldFolder>> HeldFolder::Make(const std::string& path) {
  if (mkdir(path.c_str(), 0777) != 0) {
    if (errno != EEXIST) {
      return ErrnoStatus(errno, path);
    }
    RETURN_IF_ERROR(RemoveLeftover(path));
    if (mkdir(path.c_str(), 0777) != 0) {
      return errno == EEXIST ? InUse(path) : ErrnoStatus(errno, path);
    }
  }
  std::string mark = absl::StrCat(path, "/", kMark);
  const int fd = open(mark.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) {
    return ErrnoStatus(errno, mark);
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(fd);
    return InUse(path);  // which took the folder for a leftover in between
  }
  return std::unique_ptr<HeldFolder>(new HeldFolder(std::move(mark), fd));
}

absl::Status HeldFolder::TakeMarkOut() {
  return unlink(mark_.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, mark_);
}

}  // namespace ravel::ctl
