#include "common/ckpt/header_scanner.h"

#include <absl/strings/str_cat.h>

#include "common/utf8.h"

namespace ravel::ckpt {

void HeaderScanner::SkipSpace() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
    ++at_;
  }
}

bool HeaderScanner::Take(char c) {
  SkipSpace();
  if (at_ < text_.size() && text_[at_] == c) {
    ++at_;
    return true;
  }
  return false;
}

absl::Status HeaderScanner::Error(std::string_view expected) const {
  return absl::InvalidArgumentError(
      absl::StrCat("byte ", at_, ": expected ", std::string(expected)));
}

absl::Status HeaderScanner::Expect(char c) {
  return Take(c) ? absl::OkStatus() : Error(std::string("'") + c + "'");
}

bool HeaderScanner::AtEnd() {
  SkipSpace();
  return at_ == text_.size();
}

absl::StatusOr<uint32_t> HeaderScanner::TakeHex4() {
  uint32_t value = 0;
  for (int digit = 0; digit < 4; ++digit, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (c >= '0' && c <= '9') {
      value = value * 16 + static_cast<uint32_t>(c - '0');
    } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
      value = value * 16 + static_cast<uint32_t>((c | 0x20) - 'a' + 10);
    } else {
      return Error("four hexadecimal digits");
    }
  }
  return value;
}

absl::Status HeaderScanner::TakeEscape(std::string& out) {
  constexpr std::string_view kNames = "\"\\/bfnrt";
  constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
  const char c = at_ < text_.size() ? text_[at_] : '\0';
  const size_t simple = kNames.find(c);
  if (c != '\0' && simple != std::string_view::npos) {
    out.push_back(kValues[simple]);
    ++at_;
    return absl::OkStatus();
  }
  if (c != 'u') {
    return Error("an escape sequence");
  }
  ++at_;
  ASSIGN_OR_RETURN(uint32_t code, TakeHex4());
  if (code >= 0xd800 && code < 0xdc00) {
    if (text_.substr(at_, 2) != "\\u") {
      return Error("the second half of a surrogate pair");
    }
    at_ += 2;
    ASSIGN_OR_RETURN(const uint32_t low, TakeHex4());
    if (low < 0xdc00 || low > 0xdfff) {
      return Error("the second half of a surrogate pair");
    }
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  } else if (code >= 0xdc00 && code <= 0xdfff) {
    return Error("no lone surrogate");
  }
  AppendUtf8(code, out);
  return absl::OkStatus();
}

absl::StatusOr<std::string> HeaderScanner::TakeString() {
  if (!Take('"')) {
    return Error("a string");
  }
  std::string value;
  while (at_ < text_.size() && text_[at_] != '"') {
    const char c = text_[at_];
    if (static_cast<unsigned char>(c) < 0x20) {
      return Error("no control character in a string");
    }
    ++at_;
    if (c != '\\') {
      value.push_back(c);
      continue;
    }
    RETURN_IF_ERROR(TakeEscape(value));
  }
  RETURN_IF_ERROR(Expect('"'));
  if (FindInvalidUtf8(value) != std::string_view::npos) {
    return Error("UTF-8 in the string before");
  }
  return value;
}

absl::StatusOr<int64_t> HeaderScanner::TakeCount() {
  SkipSpace();
  const size_t start = at_;
  int64_t value = 0;
  for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
    const int digit = text_[at_] - '0';
    if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, digit, &value)) {
      return Error("a number below 2^63");
    }
  }
  if (at_ == start || (text_[start] == '0' && at_ - start > 1)) {
    return Error("a whole number");
  }
  return value;
}

}  // namespace ravel::ckpt
