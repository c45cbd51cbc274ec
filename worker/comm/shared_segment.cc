// Allocates the memory of shared-memory groups. Pages are reserved and touched before training, so
// that a shortage is an error with numbers and not a SIGBUS or an OOM kill in step 1000. Mappings
// are aligned for huge pages where the kernel allows them, because arenas are scanned every step
// and misses of the address cache are expensive. The memfd has no name; peers open it through /proc
// with a nonce, and nothing is left behind after any kind of death.

#include "worker/comm/shared_segment.h"

#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "worker/comm/group_block.h"

namespace ravel::comm {
namespace {

// The errno of an mmap: memory and addresses are resources that may be exhausted.
absl::Status MapFailure(int error, const std::string& what) {
  return error == ENOMEM ? absl::ResourceExhaustedError(what + ": out of memory")
                         : ErrnoStatus(error, what);
}

absl::StatusOr<std::byte*> Map(int64_t bytes, int flags, int fd, int64_t offset) {
  void* data =
      mmap(nullptr, Size(bytes), PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    return MapFailure(errno, absl::StrCat("mapping ", bytes, " bytes"));
  }
  return static_cast<std::byte*>(data);
}

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, newer than Debian's C library

// Shared at an address that huge pages may map, which needs address and offset to be multiples.
absl::StatusOr<std::byte*> MapForHugePages(int64_t bytes, int fd, int64_t offset) {
  const size_t room = Size(bytes + kHugePageBytes);
  void* const reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) {
    return MapFailure(errno, absl::StrCat("reserving addresses for ", bytes, " bytes"));
  }
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(reserved);
  std::byte* const at = begin + (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  if (mmap(at,
           Size(bytes),
           PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED,
           fd,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, room);
    return MapFailure(error, absl::StrCat("mapping ", bytes, " bytes of shared memory"));
  }
  if (at > begin) {
    munmap(begin, Size(at - begin));
  }
  std::byte* const end = at + RoundUp(bytes, int64_t{kPageBytes});
  if (end < begin + room) {
    munmap(end, Size(begin + room - end));
  }
  return at;
}

// Puts huge pages in the place of the small ones that lie in whole huge pages: a wish, which older
// kernels refuse. Far fewer misses of the address cache, which virtual machines pay twice.
void UseHugePages(std::byte* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto skipped =
      static_cast<int64_t>((kHugePageBytes - address % kHugePageBytes) % kHugePageBytes);
  const int64_t whole = (bytes - skipped) / kHugePageBytes * kHugePageBytes;
  if (whole > 0) {
    (void)madvise(data + skipped, Size(whole), kCollapse);
  }
}

// An error here, where touching the pages would only bring the kernel to kill some process.
absl::Status CheckAvailable(int64_t bytes) {
  std::ifstream table("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  while (table >> name >> kib) {
    if (name == "MemAvailable:" && bytes / 1024 > kib) {
      return absl::ResourceExhaustedError(
          absl::StrCat(bytes, " bytes wanted, ", kib * 1024, " bytes of memory are available"));
    }
    table.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return absl::OkStatus();
}

void Touch(std::byte* data, int64_t bytes) {
  volatile std::byte* pages = data;
  for (int64_t offset = 0; offset < bytes; offset += kPageBytes) {
    pages[offset] = std::byte{0};
  }
}

}  // namespace

absl::StatusOr<PrivateMapping> PrivateMapping::Create(int64_t bytes) {
  RETURN_IF_ERROR(CheckAvailable(bytes));
  ASSIGN_OR_RETURN(PrivateMapping mapping, CreateUntouched(bytes));
  if (bytes > 0) {
    madvise(mapping.data_, Size(bytes), MADV_HUGEPAGE);  // a wish: some hosts refuse
    Touch(mapping.data_, bytes);
  }
  return mapping;
}

absl::StatusOr<PrivateMapping> PrivateMapping::CreateUntouched(int64_t bytes) {
  PrivateMapping mapping;
  if (bytes > 0) {
    ASSIGN_OR_RETURN(mapping.data_, Map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mapping.bytes_ = bytes;
  }
  return mapping;
}

PrivateMapping::PrivateMapping(PrivateMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PrivateMapping& PrivateMapping::operator=(PrivateMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PrivateMapping::~PrivateMapping() {
  if (data_ != nullptr) {
    munmap(data_, Size(bytes_));
  }
}

absl::StatusOr<std::unique_ptr<LocalSegment>> LocalSegment::Create(int size) {
  auto segment = std::make_unique<LocalSegment>();
  ASSIGN_OR_RETURN(segment->block_, PrivateMapping::CreateUntouched(GroupBlockBytes(size)));
  return segment;
}

absl::StatusOr<SharedSegment::Child> LocalSegment::CreateChild(int64_t block_bytes) {
  auto child = std::make_shared<LocalSegment>();
  ASSIGN_OR_RETURN(child->block_, PrivateMapping::CreateUntouched(block_bytes));
  MutexLock lock(mutex_);
  children_.push_back(child);
  return Child{.segment = child, .record = absl::StrCat(children_.size() - 1)};
}

absl::StatusOr<std::shared_ptr<SharedSegment>> LocalSegment::OpenChild(const std::string& record,
                                                                       int64_t) {
  size_t index = 0;
  CHECK(absl::SimpleAtoi(record, &index));
  MutexLock lock(mutex_);
  CHECK_LT(index, children_.size());
  return children_[index];
}

absl::Status LocalSegment::CreateArena(int64_t bytes) {
  ASSIGN_OR_RETURN(arena_, PrivateMapping::Create(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> LocalSegment::MapArena(int64_t) {
  return arena_.data();
}

absl::Status LocalSegment::ReserveArena(int64_t, int64_t) {
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<MemfdSegment>> MemfdSegment::Create(int size) {
  return Make(GroupBlockBytes(size));
}

absl::StatusOr<std::unique_ptr<MemfdSegment>> MemfdSegment::Open(const std::string& record,
                                                                 int size) {
  return OpenBlock(record, GroupBlockBytes(size));
}

absl::StatusOr<std::unique_ptr<MemfdSegment>> MemfdSegment::Make(int64_t block_bytes) {
  const int fd = memfd_create("ravel-group", MFD_CLOEXEC);
  if (fd < 0) {
    return ErrnoStatus(errno, "memfd_create");
  }
  std::unique_ptr<MemfdSegment> segment(new MemfdSegment(fd, block_bytes));
  if (ftruncate(fd, block_bytes) != 0) {
    return ErrnoStatus(errno, "sizing shared memory");
  }
  RETURN_IF_ERROR(segment->MapBlock());
  auto* header = reinterpret_cast<GroupHeader*>(segment->block_);
  uint64_t nonce[2];
  if (getrandom(nonce, sizeof(nonce), 0) != sizeof(nonce)) {
    return ErrnoStatus(errno, "getrandom");
  }
  header->nonce_low = nonce[0];
  header->nonce_high = nonce[1];
  return segment;
}

std::string MemfdSegment::record() const {
  const auto* header = reinterpret_cast<const GroupHeader*>(block_);
  return absl::StrFormat("shm1:%d:%d:%016x:%016x:%d",
                         getpid(),
                         fd_,
                         header->nonce_low,
                         header->nonce_high,
                         block_bytes_);
}

absl::StatusOr<SharedSegment::Child> MemfdSegment::CreateChild(int64_t block_bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<MemfdSegment> child, Make(block_bytes));
  std::string record = child->record();
  return Child{.segment = std::move(child), .record = std::move(record)};
}

absl::StatusOr<std::shared_ptr<SharedSegment>> MemfdSegment::OpenChild(const std::string& record,
                                                                       int64_t block_bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<SharedSegment> child, OpenBlock(record, block_bytes));
  return child;
}

absl::StatusOr<std::unique_ptr<MemfdSegment>> MemfdSegment::OpenBlock(const std::string& record,
                                                                      int64_t block_bytes) {
  // The text itself stays out of messages: it is a secret.
  const std::vector<std::string> fields = absl::StrSplit(record, ':');
  int pid = 0;
  int remote_fd = 0;
  int64_t record_bytes = 0;
  if (fields.size() != 6 || fields[0] != "shm1" || !absl::SimpleAtoi(fields[1], &pid) ||
      !absl::SimpleAtoi(fields[2], &remote_fd) || !absl::SimpleAtoi(fields[5], &record_bytes)) {
    return absl::InvalidArgumentError(
        "shared memory record of rank 0: expected shm1:PID:FD:NONCE:NONCE:BYTES");
  }
  if (record_bytes != block_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared memory record of rank 0: its control block has ",
                     record_bytes,
                     " bytes, that of this group ",
                     block_bytes));
  }
  const std::string path = absl::StrCat("/proc/", pid, "/fd/", remote_fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return Annotate(ErrnoStatus(errno, path), "opening the shared memory of rank 0");
  }
  std::unique_ptr<MemfdSegment> segment(new MemfdSegment(fd, block_bytes));
  RETURN_IF_ERROR(segment->MapBlock());
  const auto* header = reinterpret_cast<const GroupHeader*>(segment->block_);
  if (absl::StrFormat("%016x", header->nonce_low) != fields[3] ||
      absl::StrFormat("%016x", header->nonce_high) != fields[4]) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not the shared memory that rank 0 announced (nonce differs)"));
  }
  return segment;
}

absl::Status MemfdSegment::MapBlock() {
  struct stat info = {};
  if (fstat(fd_, &info) != 0) {
    return ErrnoStatus(errno, "shared memory of rank 0");
  }
  if (info.st_size < block_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "shared memory of rank 0 has ", info.st_size, " bytes, expected at least ", block_bytes_));
  }
  ASSIGN_OR_RETURN(block_, Map(block_bytes_, MAP_SHARED, fd_, 0));
  return absl::OkStatus();
}

MemfdSegment::~MemfdSegment() {
  if (arena_ != nullptr) {
    munmap(arena_, Size(arena_bytes_));
  }
  if (block_ != nullptr) {
    munmap(block_, Size(block_bytes_));
  }
  if (fd_ >= 0) {
    close(fd_);
  }
}

int64_t MemfdSegment::arena_offset() const {
  return RoundUp(block_bytes_, kHugePageBytes);
}

absl::Status MemfdSegment::CreateArena(int64_t bytes) {
  if (ftruncate(fd_, arena_offset() + bytes) != 0) {
    return ErrnoStatus(errno, absl::StrCat("sizing shared memory to ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> MemfdSegment::MapArena(int64_t bytes) {
  ASSIGN_OR_RETURN(arena_, MapForHugePages(bytes, fd_, arena_offset()));
  arena_bytes_ = bytes;
  return arena_;
}

absl::Status MemfdSegment::ReserveArena(int64_t offset, int64_t bytes) {
  if (bytes == 0) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckAvailable(bytes));
  int result = 0;
  do {
    result = fallocate(fd_, 0, arena_offset() + offset, bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    if (errno == ENOMEM || errno == ENOSPC) {
      return absl::ResourceExhaustedError(
          absl::StrCat("shared memory of ", bytes, " bytes: out of memory"));
    }
    return ErrnoStatus(errno, absl::StrCat("reserving ", bytes, " bytes of shared memory"));
  }
  Touch(arena_ + offset, bytes);
  UseHugePages(arena_ + offset, bytes);
  return absl::OkStatus();
}

}  // namespace ravel::comm
