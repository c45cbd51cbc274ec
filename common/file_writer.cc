// Files that appear whole or not at all: write a temporary beside the target, fsync it, rename,
// fsync the folder. The temporary's name holds pid and a counter, so writers of one target do not
// disturb each other; the last rename wins. An object dropped before Publish removes its temporary.
// A writer holds the lock of its temporary until it ends, so one whose lock is free is a leftover.

#include "common/file_writer.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fault_point.h"
#include "common/signed_size.h"
#include "common/time_text.h"

namespace ravel {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr int kMaxNames = 100;
constexpr std::string_view kTemporary = ".tmp-";

std::string FolderOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Locks a file that was just made. False: RemoveUnfinished came between, and removes it or has.
// Where there are no locks nobody can have.
bool LockNew(int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return errno != EWOULDBLOCK;
  }
  struct stat facts = {};
  return fstat(fd, &facts) != 0 || facts.st_nlink > 0;
}

// "12-3": process and number.
bool IsWriterId(std::string_view text) {
  const auto digits = [](std::string_view part) {
    return !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) {
      return std::isdigit(c) != 0;
    });
  };
  const std::size_t dash = text.find('-');
  return dash != std::string_view::npos && digits(text.substr(0, dash)) &&
         digits(text.substr(dash + 1));
}

bool RemoveIfUnheld(const std::string& path) {
  // For writing: NFS gives no lock otherwise.
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    return false;
  }
  struct stat facts = {};
  const bool removed = fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) &&
                       flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(path.c_str()) == 0;
  close(fd);
  return removed;
}

class PosixFileWriter : public FileWriter {
 public:
  PosixFileWriter(std::string path, std::string temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  ~PosixFileWriter() override {
    close(fd_);
    if (!published_) {
      unlink(temporary_.c_str());
    }
  }

  absl::Status Write(std::string_view bytes) override {
    if (buffer_.size() + bytes.size() > kBufferBytes) {
      RETURN_IF_ERROR(Flush());
    }
    if (bytes.size() >= kBufferBytes) {
      return WriteAll(bytes);
    }
    buffer_.append(bytes);
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    RETURN_IF_ERROR(Flush());
    return fsync(fd_) == 0 ? absl::OkStatus() : ErrnoStatus(errno, absl::StrCat(path_, ": fsync"));
  }

  absl::Status Publish() override {
    RETURN_IF_ERROR(Sync());
    RETURN_IF_ERROR(Annotate(FaultPoint("file_writer.publish"), path_));
    if (rename(temporary_.c_str(), path_.c_str()) != 0) {
      return ErrnoStatus(errno, absl::StrCat(path_, ": rename"));
    }
    published_ = true;
    const int folder = open(FolderOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) {
      return ErrnoStatus(errno, FolderOf(path_));
    }
    const int result = fsync(folder);
    const int error = errno;
    close(folder);
    return result == 0 ? absl::OkStatus() : ErrnoStatus(error, FolderOf(path_));
  }

 private:
  absl::Status Flush() {
    RETURN_IF_ERROR(WriteAll(buffer_));
    buffer_.clear();
    return absl::OkStatus();
  }

  absl::Status WriteAll(std::string_view bytes) {
    RETURN_IF_ERROR(Annotate(FaultPoint("file_writer.write"), path_));
    while (!bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written < 0) {
        return ErrnoStatus(errno, path_);
      }
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const std::string temporary_;
  const int fd_;
  std::string buffer_;
  bool published_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FileWriter>> FileWriter::Create(const std::string& path,
                                                               FileAccess access) {
  static std::atomic<int> sequence = 0;
  for (int i = 0; i < kMaxNames; ++i) {
    std::string temporary = absl::StrCat(path, std::string(kTemporary), getpid(), "-", ++sequence);
    const int fd = open(temporary.c_str(),
                        O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                        access == FileAccess::kOwner ? 0600 : 0644);
    if (fd < 0 && errno == EEXIST) {
      continue;  // left by a process of the same number
    }
    if (fd < 0) {
      return ErrnoStatus(errno, path);
    }
    if (LockNew(fd)) {
      return std::make_unique<PosixFileWriter>(path, std::move(temporary), fd);
    }
    close(fd);
  }
  return ErrnoStatus(EEXIST, path);
}

int64_t RemoveUnfinished(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string start =
      path.substr(slash == std::string::npos ? 0 : slash + 1) + std::string(kTemporary);
  std::vector<std::string> found;
  std::error_code error;
  std::filesystem::directory_iterator entries(FolderOf(path), error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (name.starts_with(start) && IsWriterId(std::string_view(name).substr(start.size()))) {
      found.push_back(entries->path().string());
    }
  }
  return std::count_if(found.begin(), found.end(), RemoveIfUnheld);
}

absl::Status WriteFileAtomically(const std::string& path,
                                 std::string_view bytes,
                                 FileAccess access) {
  ASSIGN_OR_RETURN(const std::unique_ptr<FileWriter> writer, FileWriter::Create(path, access));
  RETURN_IF_ERROR(writer->Write(bytes));
  return writer->Publish();
}

namespace {

absl::StatusOr<std::string> ReadDescriptor(int fd, const std::string& path, int64_t max_bytes) {
  std::string text;
  char block[65536];
  while (static_cast<int64_t>(text.size()) <= max_bytes) {
    const ssize_t count = read(fd, block, sizeof block);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return ErrnoStatus(errno, path);
    }
    if (count == 0) {
      return text;
    }
    text.append(block, Size(count));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": expected at most ", FormatBytes(max_bytes)));
}

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t max_bytes) {
  // Without O_NONBLOCK a FIFO would hold the caller until somebody writes.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  struct stat facts = {};
  absl::StatusOr<std::string> text =
      absl::InvalidArgumentError(absl::StrCat(path, ": expected a regular file"));
  if (fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode)) {
    text = ReadDescriptor(fd, path, max_bytes);
  } else if (S_ISDIR(facts.st_mode)) {
    text = ErrnoStatus(EISDIR, path);
  }
  close(fd);
  return text;
}

absl::StatusOr<std::string> ReadStream(const std::string& path, int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  absl::StatusOr<std::string> text = ReadDescriptor(fd, path, max_bytes);
  close(fd);
  return text;
}

}  // namespace ravel
