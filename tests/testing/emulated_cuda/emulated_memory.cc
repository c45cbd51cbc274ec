#include "tests/testing/emulated_cuda/emulated_memory.h"

#include <algorithm>
#include <iterator>

#include <sys/mman.h>
#include <unistd.h>

#include "common/check.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kAlignment = 256;
constexpr uint64_t kPoisonBytes = uint64_t{4} << 20;

uint64_t RoundedUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// A file of bytes 0xFF, which are NaN in fp32 and in bf16. Its private mappings share these pages
// until they are written, so large arenas cost what is used of them.
int PoisonFile() {
  static const int file = [] {
    const int made = memfd_create("emulated device memory", MFD_CLOEXEC);
    CHECK_MSG(made >= 0, "no file in memory");
    const std::vector<char> poison(kPoisonBytes, '\xFF');
    CHECK_MSG(write(made, poison.data(), poison.size()) == static_cast<ssize_t>(poison.size()),
              "no file in memory");
    return made;
  }();
  return file;
}

// Null where the host refuses. The last page faults.
char* MapPoisoned(uint64_t bytes) {
  void* begin = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    return nullptr;
  }
  char* data = static_cast<char*>(begin);
  const uint64_t usable = bytes - kPageBytes;
  for (uint64_t at = 0; at < usable; at += kPoisonBytes) {
    void* part = mmap(data + at,
                      std::min(kPoisonBytes, usable - at),
                      PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                      PoisonFile(),
                      0);
    if (part == MAP_FAILED) {
      munmap(data, bytes);
      return nullptr;
    }
  }
  return data;
}

bool Changes(const Access& access) {
  return access.kind != Access::Kind::kRead;
}

}  // namespace

bool Conflict(const Access& a, const Access& b) {
  if (a.empty() || b.empty() || (!Changes(a) && !Changes(b)) ||
      (a.kind == Access::Kind::kAtomic && b.kind == Access::Kind::kAtomic)) {
    return false;
  }
  if (a.end() <= b.begin() || b.end() <= a.begin()) {
    return false;
  }
  const int64_t width = a.rows > 1 ? a.stride_bytes : b.stride_bytes;
  const bool one_matrix = b.rows == 1 || b.stride_bytes == width;
  if ((a.rows == 1 && b.rows == 1) || !one_matrix || a.row_bytes > width || b.row_bytes > width) {
    return true;
  }
  // Columns of one matrix: where b's row begins within a's stride.
  const int64_t difference = static_cast<int64_t>(b.begin()) - static_cast<int64_t>(a.begin());
  const int64_t offset = (difference % width + width) % width;
  return offset < a.row_bytes || offset + b.row_bytes > width;
}

void* EmulatedMemory::Allocate(MemoryKind kind, int32_t device, uint64_t bytes, uint64_t limit) {
  if (bytes > limit || (kind == MemoryKind::kDevice && BytesInUse(device) + bytes > limit)) {
    return nullptr;
  }
  const uint64_t taken = RoundedUp(bytes, kAlignment);
  const uint64_t usable = RoundedUp(taken, kPageBytes);
  char* mapping = MapPoisoned(usable + kPageBytes);
  if (mapping == nullptr) {
    return nullptr;
  }
  char* data = mapping + (usable - taken);
  const MutexLock lock(mutex_);
  live_[reinterpret_cast<uintptr_t>(data)] = {.kind = kind,
                                              .device = device,
                                              .bytes = bytes,
                                              .mapping = mapping,
                                              .mapping_bytes = usable + kPageBytes};
  return data;
}

bool EmulatedMemory::Free(MemoryKind kind, void* memory) {
  const MutexLock lock(mutex_);
  const auto found = live_.find(reinterpret_cast<uintptr_t>(memory));
  if (found == live_.end() || found->second.kind != kind) {
    return false;
  }
  munmap(found->second.mapping, found->second.mapping_bytes);
  live_.erase(found);
  return true;
}

int32_t EmulatedMemory::DeviceOf(void* memory) const {
  const MutexLock lock(mutex_);
  const auto found = live_.find(reinterpret_cast<uintptr_t>(memory));
  return found == live_.end() ? -1 : found->second.device;
}

uint64_t EmulatedMemory::BytesInUse(int32_t device) const {
  const MutexLock lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [begin, allocation] : live_) {
    if (allocation.kind == MemoryKind::kDevice && allocation.device == device) {
      bytes += RoundedUp(allocation.bytes, kAlignment);
    }
  }
  return bytes;
}

std::string EmulatedMemory::Problem(const Access& access, int32_t device) const {
  if (access.empty()) {
    return "";
  }
  if (access.rows > 1 && access.stride_bytes < access.row_bytes) {
    return std::string(access.name) + ": rows overlap";
  }
  const std::string what = std::string(access.name) + " (" + std::to_string(access.rows) +
                           " rows of " + std::to_string(access.row_bytes) + " bytes) ";
  const MutexLock lock(mutex_);
  auto after = live_.upper_bound(access.begin());
  if (after == live_.begin()) {
    return what + "lies in no live allocation";
  }
  const auto& [begin, allocation] = *std::prev(after);
  if (access.begin() >= begin + std::max(allocation.bytes, uint64_t{1})) {
    return what + "lies in no live allocation";
  }
  if (access.end() > begin + allocation.bytes) {
    return what + "ends " + std::to_string(access.end() - begin - allocation.bytes) +
           " bytes after its allocation of " + std::to_string(allocation.bytes);
  }
  if (device >= 0 && allocation.kind == MemoryKind::kDevice && allocation.device != device) {
    return what + "is memory of device " + std::to_string(allocation.device);
  }
  return "";
}

}  // namespace ravel::kernels::cuda::emulated
