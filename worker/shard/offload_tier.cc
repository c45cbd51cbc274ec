// The file is mapped shared, so its pages are those of the kernel's cache: a released page costs
// the process nothing, and the kernel keeps it for as long as it has room. Pages are fetched by
// MADV_POPULATE, which answers with an error where a plain access would end the process (SIGBUS).
// The errors of write-back are those that the kernel has kept for this file, asked for when a page
// is released again.

#include "worker/shard/offload_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "common/time_text.h"

// Linux 5.14; older kernels refuse them, and headers may lack them.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ravel::shard {
namespace {

constexpr size_t kPageBytes = 4096;
// Linux maps cached pages of the whole block, by address, where one of them is read (fault-around).
constexpr size_t kMappedBytes = size_t{64} << 10;
// The kernel reads no more ahead than a device takes at once, whatever it is asked for.
constexpr size_t kReadAheadBytes = size_t{256} << 10;
// In memory at a time on the way to or from a checkpoint.
constexpr size_t kAccessBytes = size_t{4} << 20;

absl::Status FieldError(int error, const std::string& what) {
  return Annotate(ErrnoStatus(error, what), kOffloadField);
}

// A file system without nameless files has one that is unlinked at once.
absl::StatusOr<int> OpenNameless(const std::string& folder) {
  int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0) {
    return file;
  }
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) {
    return FieldError(errno, folder);
  }
  std::string name = folder + "/.ravel-offload-XXXXXX";
  file = ::mkostemp(name.data(), O_CLOEXEC);
  if (file < 0) {
    return FieldError(errno, folder);
  }
  ::unlink(name.c_str());
  return file;
}

// Asks before it takes: a file system may fill itself up before it says that it has too little.
absl::Status TakeRoom(int file, const std::string& folder, int64_t bytes) {
  const std::string what =
      absl::StrCat(kOffloadField, ": no room for ", FormatBytes(bytes), " in ", folder);
  struct statvfs room = {};
  if (::fstatvfs(file, &room) == 0 && room.f_frsize > 0 &&
      room.f_bavail < Size(bytes) / room.f_frsize) {
    return absl::ResourceExhaustedError(absl::StrCat(
        what, ", which has ", FormatBytes(static_cast<int64_t>(room.f_bavail * room.f_frsize))));
  }
  int error = EINTR;
  while (error == EINTR) {
    error = ::posix_fallocate(file, 0, bytes);
  }
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": ", std::strerror(error)));
  }
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, what);
}

// Only where the kernel knows no better way.
void TouchPages(std::span<std::byte> pages) {
  for (size_t at = 0; at < pages.size(); at += kPageBytes) {
    static_cast<void>(*static_cast<volatile std::byte*>(pages.data() + at));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<OffloadTier>> OffloadTier::Create(const std::string& folder,
                                                                 int64_t bytes) {
  CHECK_GT(bytes, 0);
  ASSIGN_OR_RETURN(const int file, OpenNameless(folder));
  absl::Status made = TakeRoom(file, folder, bytes);
  void* at = MAP_FAILED;
  if (made.ok()) {
    at = ::mmap(nullptr, Size(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    made = at == MAP_FAILED ? FieldError(errno, absl::StrCat("mapping a file in ", folder))
                            : absl::OkStatus();
  }
  if (!made.ok()) {
    ::close(file);
    return made;
  }
  struct statfs system = {};
  const bool in_memory = ::fstatfs(file, &system) == 0 &&
                         (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
  const std::span<std::byte> all(static_cast<std::byte*>(at), Size(bytes));
  return std::unique_ptr<OffloadTier>(new OffloadTier(file, all, in_memory));
}

OffloadTier::~OffloadTier() {
  ::munmap(all_.data(), all_.size());
  ::close(file_);
}

bool OffloadTier::Holds(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  return at >= all_.data() && at < all_.data() + all_.size();
}

std::span<std::byte> OffloadTier::BlocksOf(std::span<const std::byte> range, size_t bytes) const {
  CHECK(range.data() >= all_.data() && range.data() + range.size() <= all_.data() + all_.size());
  const auto first = reinterpret_cast<uintptr_t>(all_.data());  // of a page
  const uintptr_t end = first + (all_.size() + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto at = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = std::max(at / bytes * bytes, first);
  const uintptr_t last = std::min((at + range.size() + bytes - 1) / bytes * bytes, end);
  return {all_.data() + (begin - first), last - begin};
}

absl::Status OffloadTier::Failed(const char* what, int error) {
  MutexLock lock(mutex_);
  failure_.Update(absl::DataLossError(
      absl::StrCat(kOffloadField, ": ", what, " offloaded state: ", std::strerror(error))));
  return failure_;
}

absl::Status OffloadTier::first_failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

absl::Status OffloadTier::Fetch(std::span<const std::byte> range, For use) {
  RETURN_IF_ERROR(first_failure());
  if (range.empty()) {
    return absl::OkStatus();
  }
  const std::span<std::byte> pages = BlocksOf(range, kPageBytes);
  for (size_t at = 0; at < pages.size(); at += kReadAheadBytes) {
    ::madvise(pages.data() + at, std::min(kReadAheadBytes, pages.size() - at), MADV_WILLNEED);
  }
  const int advice = use == For::kWriting ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  int result = -1;
  do {
    result = ::madvise(pages.data(), pages.size(), advice);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result != 0 && errno == EINVAL) {
    TouchPages(pages);
    result = 0;
  }
  return result == 0 ? absl::OkStatus() : Failed("reading", errno == EFAULT ? EIO : errno);
}

absl::Status OffloadTier::Release(std::span<const std::byte> range, For use) {
  RETURN_IF_ERROR(first_failure());
  if (range.empty()) {
    return absl::OkStatus();
  }
  const std::span<std::byte> pages = BlocksOf(range, kPageBytes);
  const std::span<std::byte> mapped = use == For::kReading ? BlocksOf(range, kMappedBytes) : pages;
  ::madvise(mapped.data(), mapped.size(), MADV_DONTNEED);
  const int result = ::sync_file_range(file_,
                                       pages.data() - all_.data(),
                                       static_cast<off64_t>(pages.size()),
                                       SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
  return result == 0 || errno == ENOSYS || errno == ESPIPE || errno == EINVAL
             ? absl::OkStatus()
             : Failed("writing", errno);
}

absl::Status TieredAccess::Read(const void* from, std::span<std::byte> to) {
  if (tier_ == nullptr || !tier_->Holds(from)) {
    std::memcpy(to.data(), from, to.size());
    return absl::OkStatus();
  }
  const std::span all(static_cast<const std::byte*>(from), to.size());
  for (size_t at = 0; at < to.size(); at += kAccessBytes) {
    const auto part = all.subspan(at, std::min(kAccessBytes, to.size() - at));
    RETURN_IF_ERROR(tier_->Fetch(part, OffloadTier::For::kReading));
    std::memcpy(to.data() + at, part.data(), part.size());
    RETURN_IF_ERROR(tier_->Release(part, OffloadTier::For::kReading));
  }
  return absl::OkStatus();
}

absl::Status TieredAccess::Write(std::span<const std::byte> from, void* to) {
  if (tier_ == nullptr || !tier_->Holds(to)) {
    std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  }
  for (size_t at = 0; at < from.size(); at += kAccessBytes) {
    const auto part = from.subspan(at, std::min(kAccessBytes, from.size() - at));
    std::byte* place = static_cast<std::byte*>(to) + at;
    const std::span<const std::byte> range(place, part.size());
    RETURN_IF_ERROR(tier_->Fetch(range, OffloadTier::For::kWriting));
    std::memcpy(place, part.data(), part.size());
    RETURN_IF_ERROR(tier_->Release(range));
  }
  return absl::OkStatus();
}

absl::Status TieredAccess::Settle(std::span<const std::byte> used) {
  return tier_ != nullptr && !used.empty() && tier_->Holds(used.data()) ? tier_->Release(used)
                                                                        : absl::OkStatus();
}

}  // namespace ravel::shard
