#pragma once

#include <cstdint>

#include <malloc.h>

namespace ravel::testing {

// What the program asked of the allocator and has not returned; 0 under a sanitizer, which brings
// its own. Resident pages would also count what the kernel makes huge in the meantime.
inline int64_t HeapBytes() {
  const auto info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

}  // namespace ravel::testing
