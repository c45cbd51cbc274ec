#pragma once

// UTF-8 without tables: decoding, encoding, repair.

#include <cstdint>
#include <string>
#include <string_view>

namespace ravel {

struct DecodedCharacter {
  uint32_t code_point = 0;
  int bytes = 0;  // 0: the text is not UTF-8 here (or is at its end)
};

// The character that starts at text[offset]. Overlong forms, surrogates and values above U+10FFFF
// are not UTF-8.
DecodedCharacter DecodeUtf8(std::string_view text, std::size_t offset);

// Appends the UTF-8 form of a code point up to U+10FFFF.
void AppendUtf8(uint32_t code_point, std::string& out);

// Offset of the first byte that is not UTF-8, or std::string_view::npos.
std::size_t FindInvalidUtf8(std::string_view text);

// Each byte that is not part of UTF-8 becomes U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

}  // namespace ravel
