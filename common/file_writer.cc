#include "common/file_writer.h"

#include <atomic>
#include <cerrno>
#include <cstdio>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fault_point.h"

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

absl::StatusOr<std::unique_ptr<FileWriter>> FileWriter::Create(const std::string& path) {
  static std::atomic<int> sequence = 0;
  std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", ++sequence);
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  return std::make_unique<PosixFileWriter>(path, std::move(temporary), fd);
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<FileWriter> writer, FileWriter::Create(path));
  RETURN_IF_ERROR(writer->Write(bytes));
  return writer->Publish();
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t max_bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "rbe");
  if (file == nullptr) {
    return ErrnoStatus(errno, path);
  }
  std::string text;
  char block[65536];
  std::size_t count = 0;
  errno = 0;
  while (static_cast<int64_t>(text.size()) <= max_bytes &&
         (count = std::fread(block, 1, sizeof block, file)) > 0) {
    text.append(block, count);
  }
  const bool failed = std::ferror(file) != 0;
  const int error = errno;
  std::fclose(file);
  if (failed) {
    return ErrnoStatus(error, path);
  }
  if (static_cast<int64_t>(text.size()) > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at most ", max_bytes, " bytes"));
  }
  return text;
}

}  // namespace ravel
