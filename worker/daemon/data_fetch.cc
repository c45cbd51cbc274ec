// Order matters for kill -9 and for power loss: bytes, fdatasync, rename, fsync of the folder. A
// part that lost bytes with the power has another digest, and is read anew.

#include "worker/daemon/data_fetch.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/crypto.h"
#include "common/fault_point.h"

namespace ravel::daemon {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

absl::Status DiskError(int error_number, const std::string& path) {
  const absl::Status status = ErrnoStatus(error_number, path);
  const bool full = error_number == ENOSPC || error_number == EDQUOT;
  return full ? absl::ResourceExhaustedError(status.message())
              : absl::FailedPreconditionError(status.message());
}

absl::Status Cancelled() {
  return absl::CancelledError("the data set is not wanted any more");
}

// A file that is written at its end and read from its beginning.
class Part {
 public:
  static absl::StatusOr<std::unique_ptr<Part>> Open(const std::string& path, int flags) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0640);
    if (fd < 0) {
      const bool absent = errno == ENOENT && (flags & O_CREAT) == 0;
      return absent ? ErrnoStatus(errno, path) : DiskError(errno, path);
    }
    std::unique_ptr<Part> part(new Part(path, fd));
    struct stat facts = {};
    if (fstat(fd, &facts) != 0) {
      return DiskError(errno, path);
    }
    if (!S_ISREG(facts.st_mode)) {
      return absl::FailedPreconditionError(absl::StrCat(path, ": not a regular file"));
    }
    part->size_ = facts.st_size;
    return part;
  }
  ~Part() { close(fd_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  int64_t size() const { return size_; }

  absl::Status Read(int64_t offset, std::span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t count = pread(fd_, out.data(), out.size(), offset);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return DiskError(count < 0 ? errno : EIO, path_);
      }
      out = out.subspan(static_cast<size_t>(count));
      offset += count;
    }
    return absl::OkStatus();
  }
  absl::Status Append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = pwrite(fd_, bytes.data(), bytes.size(), size_);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return DiskError(count < 0 ? errno : ENOSPC, path_);
      }
      bytes = bytes.subspan(static_cast<size_t>(count));
      size_ += count;
    }
    return absl::OkStatus();
  }
  absl::Status Empty() {
    size_ = 0;
    return ftruncate(fd_, 0) == 0 ? absl::OkStatus() : DiskError(errno, path_);
  }
  // A full disk shows before the bytes are fetched, where the file system can tell.
  absl::Status Reserve(int64_t bytes) const {
    const int failed = bytes > 0 && fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, bytes) != 0 ? errno : 0;
    return failed == ENOSPC || failed == EDQUOT ? DiskError(failed, path_) : absl::OkStatus();
  }
  absl::Status Sync() const {
    return fdatasync(fd_) == 0 ? absl::OkStatus() : DiskError(errno, path_);
  }

 private:
  Part(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  const std::string path_;
  const int fd_;
  int64_t size_ = 0;
};

// One file of the set.
class FileFetch {
 public:
  FileFetch(const store::ObjectStore& source,
            const store::DataFile& file,
            const std::string& folder,
            const FetchHooks& hooks)
      : source_(source), file_(file), path_(folder + "/" + file.name), hooks_(hooks) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(const bool there, IsThere());
    if (there) {
      return absl::OkStatus();
    }
    const std::string part_path = path_ + ".part";
    ASSIGN_OR_RETURN(const std::unique_ptr<Part> part, Part::Open(part_path, O_RDWR | O_CREAT));
    if (part->size() > file_.bytes) {
      RETURN_IF_ERROR(part->Empty());
    }
    RETURN_IF_ERROR(part->Reserve(file_.bytes));
    // Bytes that were here before may be the wrong ones: that is no read of the store.
    int tries = part->size() > 0 ? 3 : 2;
    bool right = false;
    for (; !right && tries > 0; --tries) {
      ASSIGN_OR_RETURN(right, Complete(*part));
      if (!right) {
        RETURN_IF_ERROR(part->Empty());
      }
    }
    if (!right) {
      unlink(part_path.c_str());
      return absl::DataLossError(
          absl::StrCat(source_.Locate(file_.name),
                       ": its bytes have not the SHA-256 of the manifest, read twice"));
    }
    RETURN_IF_ERROR(part->Sync());
    return rename(part_path.c_str(), path_.c_str()) == 0 ? absl::OkStatus()
                                                         : DiskError(errno, path_);
  }

 private:
  // True for a file that an earlier fetch has finished; a file that is not right goes.
  absl::StatusOr<bool> IsThere() {
    const absl::StatusOr<std::unique_ptr<Part>> part = Part::Open(path_, O_RDONLY);
    if (absl::IsNotFound(part.status())) {
      return false;
    }
    RETURN_IF_ERROR(part.status());
    if ((*part)->size() == file_.bytes) {
      Sha256Stream sum;
      RETURN_IF_ERROR(HashOld(**part, sum));
      if (Hex(sum.Finish()) == file_.sha256) {
        return true;
      }
    }
    if (unlink(path_.c_str()) != 0) {
      return DiskError(errno, path_);
    }
    return false;
  }

  absl::Status Hash(std::span<const std::byte> bytes, Sha256Stream& sum) const {
    sum.Update({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    if (hooks_.moved) {
      hooks_.moved(std::ssize(bytes));
    }
    return hooks_.abandoned && hooks_.abandoned() ? Cancelled() : absl::OkStatus();
  }

  absl::Status HashOld(const Part& part, Sha256Stream& sum) {
    for (int64_t at = 0; at < part.size(); at += kPieceBytes) {
      buffer_.resize(static_cast<size_t>(std::min(kPieceBytes, part.size() - at)));
      RETURN_IF_ERROR(part.Read(at, buffer_));
      RETURN_IF_ERROR(Hash(buffer_, sum));
    }
    return absl::OkStatus();
  }

  // Brings the part to its full length; true if its digest is right.
  absl::StatusOr<bool> Complete(Part& part) {
    Sha256Stream sum;
    RETURN_IF_ERROR(HashOld(part, sum));
    ASSIGN_OR_RETURN(const std::unique_ptr<store::FileReader> reader, source_.Open(file_.name));
    if (reader->size() != file_.bytes) {
      return absl::DataLossError(absl::StrCat(source_.Locate(file_.name),
                                              ": ",
                                              reader->size(),
                                              " bytes, the manifest says ",
                                              file_.bytes));
    }
    while (part.size() < file_.bytes) {
      buffer_.resize(static_cast<size_t>(std::min(kPieceBytes, file_.bytes - part.size())));
      RETURN_IF_ERROR(reader->ReadAt(part.size(), buffer_));
      RETURN_IF_ERROR(FaultPoint("data_fetch.piece"));
      RETURN_IF_ERROR(part.Append(buffer_));
      RETURN_IF_ERROR(Hash(buffer_, sum));
    }
    return Hex(sum.Finish()) == file_.sha256;
  }

  const store::ObjectStore& source_;
  const store::DataFile& file_;
  const std::string path_;
  const FetchHooks& hooks_;
  std::vector<std::byte> buffer_;
};

}  // namespace

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return DiskError(errno, folder);
  }
  const int failed = fsync(fd) != 0 ? errno : 0;
  close(fd);
  return failed == 0 ? absl::OkStatus() : DiskError(failed, folder);
}

absl::Status FetchDataSet(const store::ObjectStore& source,
                          const store::DataManifest& manifest,
                          const std::string& folder,
                          const FetchHooks& hooks) {
  for (const store::DataFile& file : manifest.files) {
    if (hooks.abandoned && hooks.abandoned()) {
      return Cancelled();
    }
    RETURN_IF_ERROR(FileFetch(source, file, folder, hooks).Run());
  }
  return SyncFolder(folder);
}

}  // namespace ravel::daemon
