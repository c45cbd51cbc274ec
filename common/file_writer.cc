// Files that appear whole or not at all: write a temporary beside the target, fsync it, rename,
// fsync the folder. The temporary's name holds pid and a counter, so writers of one target do not
// disturb each other; the last rename wins. An object dropped before Publish removes its temporary.

#include "common/file_writer.h"

#include <atomic>
#include <cerrno>
#include <cstdio>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fault_point.h"
#include "common/signed_size.h"
#include "common/time_text.h"

namespace ravel {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

std::string FolderOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
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
  std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", ++sequence);
  const int fd = open(temporary.c_str(),
                      O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                      access == FileAccess::kOwner ? 0600 : 0644);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  return std::make_unique<PosixFileWriter>(path, std::move(temporary), fd);
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
