#pragma once

#include <cstdint>

namespace ravel {

// The release of all binaries; client and server may differ by one minor version.
inline constexpr char kVersion[] = "0.1.0";

// Between daemons and coordinator. A release speaks all from the oldest to the newest, so that they
// can be upgraded one after another.
struct ProtocolRange {
  int64_t oldest = 0;  // 0: only the newest
  int64_t newest = 0;
};
inline constexpr ProtocolRange kFleetProtocols{1, 3};
// The first in which a node looks at paths for the coordinator (Look).
inline constexpr int64_t kLookProtocol = 2;
// The first in which it also says whether it serves the needs of a job (Look.needs).
inline constexpr int64_t kNeedsProtocol = 3;

// The newest that both speak; 0: none.
constexpr int64_t AgreedProtocol(ProtocolRange one, ProtocolRange other) {
  const int64_t newest = one.newest < other.newest ? one.newest : other.newest;
  const auto speaks = [newest](ProtocolRange range) {
    return newest >= (range.oldest > 0 ? range.oldest : range.newest);
  };
  return newest > 0 && speaks(one) && speaks(other) ? newest : 0;
}

}  // namespace ravel
