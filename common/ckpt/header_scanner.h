#pragma once

// A pull scanner for the JSON of safetensors headers: strict, bounded, and it shows every key,
// repeated ones too. Pure.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::ckpt {

// Thread-compatible. The text must outlive it. Errors are InvalidArgument "byte 17: expected ','".
class HeaderScanner {
 public:
  explicit HeaderScanner(std::string_view text) : text_(text) {}

  // Skips white space; true, and past it, when the next character is `c`.
  bool Take(char c);
  absl::Status Expect(char c);
  // A string in quotes, escapes decoded; valid UTF-8.
  absl::StatusOr<std::string> TakeString();
  // A whole number >= 0 that int64 holds: no sign, fraction, exponent or leading zero.
  absl::StatusOr<int64_t> TakeCount();
  // Skips white space; true when nothing is left.
  bool AtEnd();
  absl::Status Error(std::string_view expected) const;

 private:
  void SkipSpace();
  absl::Status TakeEscape(std::string& out);
  absl::StatusOr<uint32_t> TakeHex4();

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace ravel::ckpt
