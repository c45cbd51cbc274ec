#pragma once

// Device and pinned memory of emulated devices: memory of the host that starts as NaN, begins at
// 256 bytes, ends at a page that faults, and is known, so that a stray pointer is found before it
// is used.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::kernels::cuda::emulated {

enum class MemoryKind { kDevice, kPinned };

// Bytes that a kernel, a copy or a gemm reads or writes: rows of the same length at a stride.
struct Access {
  // kAtomic: an exact addition, which others of the same memory do not disturb.
  enum class Kind { kRead, kWrite, kUpdate, kAtomic };
  const char* name = "";
  Kind kind = Kind::kRead;
  const void* data = nullptr;
  int64_t rows = 1;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;

  bool empty() const { return rows <= 0 || row_bytes <= 0; }
  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const {
    return begin() + static_cast<uintptr_t>((rows - 1) * stride_bytes + row_bytes);
  }
};

// Whether the two touch a byte in common that one of them changes. Rows of different strides count
// as whole ranges.
bool Conflict(const Access& a, const Access& b);

// Thread-safe.
class EmulatedMemory {
 public:
  // Null where more than `limit` bytes of a device would be in use, or the host has no more.
  void* Allocate(MemoryKind kind, int32_t device, uint64_t bytes, uint64_t limit);
  // False for what is not the beginning of a live allocation of that kind.
  bool Free(MemoryKind kind, void* memory);
  // Of the live allocation that begins here; -1 where none does.
  int32_t DeviceOf(void* memory) const;
  // Of a device's memory; pinned memory is not limited.
  uint64_t BytesInUse(int32_t device) const;

  // What is wrong with an access by `device` (any device's memory where negative); empty if it
  // lies in one live allocation.
  std::string Problem(const Access& access, int32_t device) const;

 private:
  struct Allocation {
    MemoryKind kind;
    int32_t device;
    uint64_t bytes;
    void* mapping;
    uint64_t mapping_bytes;
  };

  mutable Mutex mutex_;
  std::map<uintptr_t, Allocation> live_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::kernels::cuda::emulated
