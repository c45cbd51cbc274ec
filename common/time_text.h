#pragma once

// Times, durations and sizes as people write and read them.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel {

// "2026-03-01T12:30:05.123Z" from milliseconds since 1970.
std::string FormatTime(int64_t time_ms);

// "90s", "1.5h", "20m", "14d", "250ms", "1h30m" -> milliseconds. Needs a unit (only "0" does
// without); not negative.
absl::StatusOr<int64_t> ParseDurationMs(std::string_view text);
// The two largest units: "14d", "1h30m", "5m", "2s", "1.5s" below ten seconds, "250ms" below one.
// Parses back to the same value only when exact is asked for: FormatDurationExact(5400000) =
// "1h30m", of any milliseconds.
std::string FormatDuration(int64_t duration_ms);
std::string FormatDurationExact(int64_t duration_ms);

// "80GiB", "512MiB", "4k", "1GB", "4096" -> bytes: KiB.. are powers of 1024, kB, MB.. of 1000.
absl::StatusOr<int64_t> ParseBytes(std::string_view text);
// "0 B", "512 B", "1.5 KiB", "80.0 GiB".
std::string FormatBytes(int64_t bytes);

}  // namespace ravel
