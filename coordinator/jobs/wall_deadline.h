#pragma once

// A wall time of the record, followed on the monotonic clock from when it was first seen: a clock
// that is set back meanwhile holds nothing up, and no record asks for more than `most_ms` of
// waiting.

#include <algorithm>
#include <cstdint>

namespace ravel::coordinator {

class WallDeadline {
 public:
  void Follow(int64_t at_wall_ms, int64_t wall_ms, int64_t monotonic_ms, int64_t most_ms) {
    if (at_wall_ms == at_wall_ms_) {
      return;
    }
    at_wall_ms_ = at_wall_ms;
    due_ms_ = monotonic_ms + std::clamp<int64_t>(at_wall_ms - wall_ms, 0, most_ms);
  }
  int64_t due_ms() const { return due_ms_; }  // monotonic; 0 while there was none

 private:
  int64_t at_wall_ms_ = 0;
  int64_t due_ms_ = 0;
};

}  // namespace ravel::coordinator
