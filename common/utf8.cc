#include "common/utf8.h"

namespace ravel {

DecodedCharacter DecodeUtf8(std::string_view text, std::size_t offset) {
  if (offset >= text.size()) {
    return {};
  }
  const auto byte = [&](std::size_t i) { return static_cast<uint8_t>(text[offset + i]); };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    return {first, 1};
  }
  int length = 0;
  uint32_t code_point = 0;
  uint32_t smallest = 0;
  if ((first & 0xE0) == 0xC0) {
    length = 2;
    code_point = first & 0x1F;
    smallest = 0x80;
  } else if ((first & 0xF0) == 0xE0) {
    length = 3;
    code_point = first & 0x0F;
    smallest = 0x800;
  } else if ((first & 0xF8) == 0xF0) {
    length = 4;
    code_point = first & 0x07;
    smallest = 0x10000;
  } else {
    return {};
  }
  if (text.size() - offset < static_cast<std::size_t>(length)) {
    return {};
  }
  for (int i = 1; i < length; ++i) {
    const uint32_t next = byte(static_cast<std::size_t>(i));
    if ((next & 0xC0) != 0x80) {
      return {};
    }
    code_point = code_point << 6 | (next & 0x3F);
  }
  const bool surrogate = code_point >= 0xD800 && code_point < 0xE000;
  if (code_point < smallest || code_point > 0x10FFFF || surrogate) {
    return {};
  }
  return {code_point, length};
}

void AppendUtf8(uint32_t code_point, std::string& out) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

std::size_t FindInvalidUtf8(std::string_view text) {
  std::size_t offset = 0;
  while (offset < text.size()) {
    const DecodedCharacter character = DecodeUtf8(text, offset);
    if (character.bytes == 0) {
      return offset;
    }
    offset += static_cast<std::size_t>(character.bytes);
  }
  return std::string_view::npos;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bad = FindInvalidUtf8(text);
    out.append(text.substr(0, bad));
    if (bad == std::string_view::npos) {
      break;
    }
    out += "\xEF\xBF\xBD";
    text.remove_prefix(bad + 1);
  }
  return out;
}

}  // namespace ravel
