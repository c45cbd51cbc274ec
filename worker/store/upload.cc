// A part is NAME.<upload>.part. Its blocks are written in order and past the page cache (O_DIRECT),
// up to four together: filling fresh pages of the cache costs more CPU than all the rest, and each
// wait for the disk costs a turn of the scheduler on a busy host. Two buffers take turns, so that
// neither the disk nor who fills them waits for the other. What is not aligned, such as the end of
// a file, and all of a file on a file system without O_DIRECT, takes plain writes whose way to the
// disk is begun every 8 MiB, so that the fdatasync at the end finds little to do. The size of the
// part is what counts as written, since space is reserved without changing it. A killed server
// loses nothing that it has acknowledged; a host that loses power may lose blocks of parts, which
// the checksum of the whole file finds before it gets its name.

#include "worker/store/upload.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/fault_point.h"
#include "common/signed_size.h"

namespace ravel::store_server {
namespace {

using store::FileStore;
using store::SplitLast;

constexpr int64_t kFlushBytes = 8 << 20;
constexpr int64_t kReadBytes = 1 << 20;
constexpr int64_t kBufferBytes = 8 << 20;  // of one write
constexpr int64_t kAlignment = 4096;       // of offset, size and memory past the page cache

absl::Status Error(std::string_view what, const std::string& path) {
  return ErrnoStatus(errno, absl::StrCat(std::string(what), " ", path));
}

absl::Status WriteAll(int fd, std::string_view data, int64_t offset, const std::string& path) {
  while (!data.empty()) {
    const ssize_t written = ::pwrite(fd, data.data(), data.size(), offset);
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      return Error("write", path);
    }
    data.remove_prefix(Size(written));
    offset += written;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<uint32_t> ChecksumOfFile(const store::FileReader& reader, int64_t end) {
  std::vector<std::byte> buffer;
  uint32_t crc = 0;
  for (int64_t at = 0; at < end; at += kReadBytes) {
    buffer.resize(Size(std::min(kReadBytes, end - at)));
    RETURN_IF_ERROR(reader.ReadAt(at, buffer));
    crc = Crc32c(crc, buffer.data(), buffer.size());
  }
  return crc;
}

absl::StatusOr<std::unique_ptr<Upload>> Upload::Open(
    UploadBook* book, std::string part, std::string path, int64_t offset, int64_t expected_bytes) {
  std::unique_ptr<Upload> made(new Upload(book, std::move(part), std::move(path)));
  RETURN_IF_ERROR(made->OpenPart(offset, expected_bytes));
  return made;
}

Upload::~Upload() {
  if (!spent_) {
    (void)Settle();
  }
  if (thread_.joinable()) {
    {
      const MutexLock lock(mutex_);
      over_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  if (fd_ >= 0) {
    if (written_ > 0 && pending_ == 0 && !spent_) {
      book_->Remember(part_, written_, crc_);
    }
    if (counted_) {
      book_->EndWriting(fd_);
    }
    ::close(fd_);
  }
  if (direct_fd_ >= 0) {
    ::close(direct_fd_);
  }
  book_->Add(0, -reserved_);
}

absl::Status Upload::OpenFile() {
  constexpr int kTries = 3;
  for (int i = 0; i < kTries && !counted_; ++i) {
    if (fd_ >= 0) {
      ::close(fd_);  // the part was removed after it was opened
    }
    fd_ = ::open(part_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (fd_ < 0) {
      return Error("create", part_);
    }
    counted_ = book_->BeginWriting(fd_);
  }
  return counted_ ? absl::OkStatus()
                  : absl::UnavailableError(absl::StrCat(part_, ": is removed again and again"));
}

absl::Status Upload::OpenPart(int64_t offset, int64_t expected_bytes) {
  RETURN_IF_ERROR(OpenFile());
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) {
    return Error("create", part_);
  }
  if (offset > status.st_size) {
    return absl::OutOfRangeError(absl::StrCat(
        path_, ": ", status.st_size, " bytes of this upload are written, not ", offset));
  }
  if (status.st_size > offset) {
    if (::ftruncate(fd_, offset) != 0) {
      return Error("truncate", part_);
    }
    book_->Add(offset - status.st_size, 0);
  }
  direct_fd_ = ::open(part_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
  written_ = offset;
  started_ = offset;
  const int64_t more = std::max<int64_t>(expected_bytes - offset, 0);
  RETURN_IF_ERROR(book_->Reserve(more));
  reserved_ = more;
  if (more > 0 && ::fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, expected_bytes) != 0 &&
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    return Error("reserve space for", path_);
  }
  return ReadChecksum(offset);
}

absl::Status Upload::ReadChecksum(int64_t offset) {
  const std::optional<uint32_t> known = book_->Recall(part_, offset);
  if (known) {
    crc_ = *known;
  } else if (offset > 0) {
    const auto [folder, name] = SplitLast(part_);
    const FileStore store{std::string(folder)};
    ASSIGN_OR_RETURN(const auto reader, store.Open(name));
    ASSIGN_OR_RETURN(crc_, ChecksumOfFile(*reader, offset));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Upload::PutDirect(std::string_view data, int64_t offset) {
  int64_t done = 0;
  while (direct_fd_ >= 0 && (offset + done) % kAlignment == 0 &&
         std::ssize(data) - done >= kAlignment) {
    const int64_t bytes = (std::ssize(data) - done) / kAlignment * kAlignment;
    const ssize_t written = ::pwrite(direct_fd_, data.data() + done, Size(bytes), offset + done);
    if (written > 0) {
      done += written;
    } else if (written == 0 || errno == EINVAL) {
      ::close(direct_fd_);  // it is stricter than it said: the cache takes the rest
      direct_fd_ = -1;
    } else if (errno != EINTR) {
      return Error("write", path_);
    }
  }
  return done;
}

absl::StatusOr<int64_t> Upload::Put(std::string_view data, int64_t offset) {
  ASSIGN_OR_RETURN(const int64_t direct, PutDirect(data, offset));
  RETURN_IF_ERROR(WriteAll(fd_, data.substr(Size(direct)), offset + direct, path_));
  return direct;
}

void Upload::WriteInTurn() {
  for (;;) {
    std::string_view data;
    int64_t offset = 0;
    {
      const MutexLock lock(mutex_);
      while (job_.empty() && !over_) {
        changed_.Wait(mutex_);
      }
      if (job_.empty()) {
        return;
      }
      data = job_;
      offset = job_offset_;
    }
    absl::StatusOr<int64_t> result = Put(data, offset);
    const MutexLock lock(mutex_);
    result_ = std::move(result);
    job_ = {};
    changed_.NotifyAll();
  }
}

absl::Status Upload::Start() {
  RETURN_IF_ERROR(Settle());
  if (pending_ == 0) {
    return absl::OkStatus();
  }
  {
    const MutexLock lock(mutex_);
    job_ = {buffers_[filling_].get(), Size(pending_)};
    job_offset_ = written_;
    changed_.NotifyAll();
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { WriteInTurn(); });
  }
  in_flight_ = pending_;
  pending_ = 0;
  filling_ = 1 - filling_;
  return absl::OkStatus();
}

absl::Status Upload::Settle() {
  if (in_flight_ == 0) {
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> direct = 0;
  {
    const MutexLock lock(mutex_);
    while (!job_.empty()) {
      changed_.Wait(mutex_);
    }
    direct = result_;
  }
  const int64_t bytes = in_flight_;
  in_flight_ = 0;
  if (!direct.ok()) {
    spent_ = true;
    return ::ftruncate(fd_, written_) != 0 ? Error("truncate", part_) : direct.status();
  }
  if (*direct > 0) {  // on the disk already
    started_ = written_ + *direct;
  }
  written_ += bytes;
  reserved_ -= bytes;
  book_->Add(bytes, -bytes);
  if (written_ - started_ >= kFlushBytes) {
    // A hint: an error shows at the end, in fdatasync.
    (void)::sync_file_range(fd_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
    started_ = written_;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<char>> Upload::Room(int64_t bytes) {
  CHECK(bytes > 0 && bytes <= kBufferBytes);
  RETURN_IF_ERROR(FaultPoint("store.append"));
  const int64_t needed = in_flight_ + pending_ + bytes;
  if (needed > reserved_) {
    RETURN_IF_ERROR(book_->Reserve(needed - reserved_));
    reserved_ = needed;
  }
  if (pending_ + bytes > kBufferBytes) {
    RETURN_IF_ERROR(Start());
  }
  Buffer& buffer = buffers_[filling_];
  if (buffer == nullptr) {
    buffer.reset(static_cast<char*>(std::aligned_alloc(Size(kAlignment), Size(kBufferBytes))));
    CHECK(buffer != nullptr);
  }
  return std::span<char>(buffer.get() + pending_, Size(bytes));
}

void Upload::Take(int64_t bytes, uint32_t crc32c) {
  crc_ = Crc32cCombine(crc_, crc32c, Size(bytes));
  pending_ += bytes;
}

absl::Status Upload::Append(std::string_view data, uint32_t crc32c) {
  ASSIGN_OR_RETURN(const std::span<char> room, Room(std::ssize(data)));
  std::memcpy(room.data(), data.data(), data.size());
  Take(std::ssize(data), crc32c);
  return absl::OkStatus();
}

bool Upload::MayTakeMore() const {
  return pending_ > 0 && pending_ + kUploadBlockBytes <= kBufferBytes;
}

absl::Status Upload::Flush() {
  RETURN_IF_ERROR(Start());
  return Settle();
}

absl::Status Upload::Finish(int64_t size, uint32_t crc32c) {
  RETURN_IF_ERROR(Flush());
  spent_ = true;
  if (size != written_ || crc32c != crc_) {
    book_->Unlink(part_);
    return absl::DataLossError(absl::StrCat(
        path_, ": ", written_, " bytes arrived, ", size, " were sent, or their checksum differs"));
  }
  if (::fdatasync(fd_) != 0) {
    return Error("fdatasync", path_);
  }
  RETURN_IF_ERROR(FaultPoint("store.finish"));
  const auto [folder, name] = SplitLast(path_);
  FileStore store{std::string(folder)};
  const absl::Status named = store.PublishIfAbsent(SplitLast(part_).second, name);
  if (absl::IsAlreadyExists(named)) {
    book_->Unlink(part_);
  }
  return named;
}

}  // namespace ravel::store_server
