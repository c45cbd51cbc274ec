#pragma once

// Reading of files of lines that somebody appends to, in bounded blocks.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::coordinator {

inline constexpr int64_t kLineBlockBytes = 64 << 10;

// Complete lines of PATH from `offset` on, up to `end` and about `max_bytes`, each without its
// newline and with the offset behind it; `use` says whether to go on. Returns the offset of the
// first byte that was not used: what follows a last newline stays for later. A file that is not
// there has no lines.
absl::StatusOr<int64_t> ReadLines(
    const std::string& path,
    int64_t offset,
    int64_t end,
    int64_t max_bytes,
    const std::function<bool(std::string_view line, int64_t behind)>& use);

// 0 for a file that is not there.
int64_t FileSize(const std::string& path);

// Offset at which the last `count` lines of the first `end` bytes begin.
absl::StatusOr<int64_t> OffsetOfLastLines(const std::string& path, int64_t end, int64_t count);

}  // namespace ravel::coordinator
