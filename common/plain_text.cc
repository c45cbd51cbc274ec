#include "common/plain_text.h"

#include <cstdint>
#include <cstdio>

#include "common/utf8.h"

namespace ravel {
namespace {

bool IsControl(uint32_t code_point) {
  return code_point < 0x20 || (code_point >= 0x7F && code_point < 0xA0);
}

// Marks that make later text look as if it stood before earlier text.
bool TurnsText(uint32_t code_point) {
  return (code_point >= 0x202A && code_point <= 0x202E) ||
         (code_point >= 0x2066 && code_point <= 0x2069);
}

void AppendEscape(const char* format, uint32_t number, std::string& out) {
  char text[16];
  std::snprintf(text, sizeof text, format, number);
  out += text;
}

}  // namespace

bool HasControlText(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const DecodedCharacter character = DecodeUtf8(text, at);
    if (character.bytes == 0 || IsControl(character.code_point)) {
      return true;
    }
    at += static_cast<std::size_t>(character.bytes);
  }
  return false;
}

std::string EscapeControlText(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const DecodedCharacter character = DecodeUtf8(text, at);
    if (character.bytes == 0) {
      AppendEscape("\\x%02x", static_cast<unsigned char>(text[at]), out);
      at += 1;
      continue;
    }
    const uint32_t code_point = character.code_point;
    if (IsControl(code_point) && code_point != '\t' && code_point != '\n') {
      AppendEscape("\\x%02x", code_point, out);
    } else if (TurnsText(code_point)) {
      AppendEscape("\\u%04x", code_point, out);
    } else {
      out.append(text.substr(at, static_cast<std::size_t>(character.bytes)));
    }
    at += static_cast<std::size_t>(character.bytes);
  }
  return out;
}

std::string CutText(std::string text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) {
    return text;
  }
  std::size_t end = max_bytes < 3 ? 0 : max_bytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    --end;  // inside of a character
  }
  text.resize(end);
  return text + "...";
}

}  // namespace ravel
