// Parses and prints times, durations and sizes. One table of units serves both directions.
// Durations need a unit, because a bare number in a job file is more often a mistake than a choice;
// plain k, M, G of sizes are powers of 1024.

#include "common/time_text.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <ctime>
#include <limits>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

namespace ravel {
namespace {

struct Unit {
  const char* name;
  int64_t factor;
};

constexpr Unit kDurations[] = {
    {"d", 86400000}, {"h", 3600000}, {"m", 60000}, {"s", 1000}, {"ms", 1}};
constexpr Unit kSizes[] = {{"", 1},
                           {"B", 1},
                           {"kB", 1000},
                           {"KB", 1000},
                           {"MB", 1000000},
                           {"GB", 1000000000},
                           {"TB", 1000000000000},
                           {"KiB", int64_t{1} << 10},
                           {"MiB", int64_t{1} << 20},
                           {"GiB", int64_t{1} << 30},
                           {"TiB", int64_t{1} << 40},
                           {"k", int64_t{1} << 10},
                           {"K", int64_t{1} << 10},
                           {"M", int64_t{1} << 20},
                           {"G", int64_t{1} << 30},
                           {"T", int64_t{1} << 40}};

// Splits a number and the letters after it off the front of `text`; false when there is none.
bool TakeQuantity(std::string_view& text, double& number, std::string_view& unit) {
  if (text.empty() || !std::isdigit(static_cast<unsigned char>(text[0]))) {
    return false;
  }
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc()) {
    return false;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  std::size_t letters = 0;
  while (letters < text.size() && std::isalpha(static_cast<unsigned char>(text[letters]))) {
    ++letters;
  }
  unit = text.substr(0, letters);
  text.remove_prefix(letters);
  return true;
}

template <std::size_t kCount>
int64_t FactorOf(const Unit (&units)[kCount], std::string_view name) {
  for (const Unit& unit : units) {
    if (name == unit.name) {
      return unit.factor;
    }
  }
  return 0;
}

absl::Status Bad(const char* expected, std::string_view text) {
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", expected, ", got '", std::string(text), "'"));
}

}  // namespace

std::string FormatTime(int64_t time_ms) {
  int64_t seconds = time_ms / 1000;
  int64_t rest = time_ms % 1000;
  if (rest < 0) {
    rest += 1000;
    --seconds;
  }
  const std::time_t time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  gmtime_r(&time, &parts);
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%03dZ",
                         parts.tm_year + 1900,
                         parts.tm_mon + 1,
                         parts.tm_mday,
                         parts.tm_hour,
                         parts.tm_min,
                         parts.tm_sec,
                         rest);
}

absl::StatusOr<int64_t> ParseDurationMs(std::string_view text) {
  constexpr const char* kExpected = "a duration such as 90s, 20m, 1h30m or 14d";
  if (text == "0") {
    return 0;
  }
  std::string_view rest = text;
  double total = 0;
  do {
    double number = 0;
    std::string_view unit;
    if (!TakeQuantity(rest, number, unit) || FactorOf(kDurations, unit) == 0) {
      return Bad(kExpected, text);
    }
    total += number * static_cast<double>(FactorOf(kDurations, unit));
  } while (!rest.empty());
  if (total > 1e15) {
    return Bad("a duration of at most 11574074 days", text);
  }
  return std::llround(total);
}

std::string FormatDuration(int64_t duration_ms) {
  if (duration_ms < 1000) {
    return absl::StrCat(duration_ms, "ms");
  }
  if (duration_ms < 10000) {
    const int64_t tenths = duration_ms / 100;
    return tenths % 10 == 0 ? absl::StrCat(tenths / 10, "s")
                            : absl::StrCat(tenths / 10, ".", tenths % 10, "s");
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const Unit& large = kDurations[i];
    if (duration_ms >= large.factor) {
      const int64_t below = duration_ms % large.factor / kDurations[i + 1].factor;
      return absl::StrCat(duration_ms / large.factor,
                          large.name,
                          below > 0 ? absl::StrCat(below, kDurations[i + 1].name) : "");
    }
  }
  return absl::StrCat(duration_ms / 1000, "s");
}

std::string FormatDurationExact(int64_t duration_ms) {
  if (duration_ms == 0) {
    return "0s";
  }
  std::string out;
  for (const Unit& unit : kDurations) {
    if (duration_ms >= unit.factor) {
      absl::StrAppend(&out, duration_ms / unit.factor, unit.name);
      duration_ms %= unit.factor;
    }
  }
  return out;
}

absl::StatusOr<int64_t> ParseBytes(std::string_view text) {
  std::string_view rest = text;
  double number = 0;
  std::string_view unit;
  if (!TakeQuantity(rest, number, unit) || !rest.empty() || FactorOf(kSizes, unit) == 0) {
    return Bad("a size such as 512MiB, 80GiB or a number of bytes", text);
  }
  const double bytes = number * static_cast<double>(FactorOf(kSizes, unit));
  if (bytes > 9e18) {
    return Bad("a size below 9 EB", text);
  }
  return std::llround(bytes);
}

std::string FormatBytes(int64_t bytes) {
  if (bytes < 1024) {
    return absl::StrCat(bytes, " B");
  }
  constexpr const char* kNames[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t name = 0;
  while (value >= 1024 && name + 1 < std::size(kNames)) {
    value /= 1024;
    ++name;
  }
  return absl::StrFormat("%.1f %s", value, kNames[name]);
}

}  // namespace ravel
