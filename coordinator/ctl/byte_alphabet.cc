#include "coordinator/ctl/byte_alphabet.h"

#include <absl/strings/str_cat.h>

#include "common/utf8.h"

namespace ravel::ctl {
namespace {

constexpr uint32_t kFirstMoved = 256;
constexpr uint32_t kLastMoved = 256 + 67;

bool IsPrintable(uint32_t byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

// Code points: printable Latin-1 stands for itself, the other bytes follow from U+0100 in order.
std::array<uint32_t, 256> CodePoints() {
  std::array<uint32_t, 256> out{};
  uint32_t next = kFirstMoved;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    out[byte] = IsPrintable(byte) ? byte : next++;
  }
  return out;
}

std::array<int, kLastMoved + 1> Inverse() {
  std::array<int, kLastMoved + 1> out{};
  out.fill(-1);
  const std::array<uint32_t, 256> points = CodePoints();
  for (int byte = 0; byte < 256; ++byte) {
    out[points[static_cast<std::size_t>(byte)]] = byte;
  }
  return out;
}

}  // namespace

const std::array<std::string, 256>& ByteStandIns() {
  static const std::array<std::string, 256> stand_ins = [] {
    std::array<std::string, 256> out;
    const std::array<uint32_t, 256> points = CodePoints();
    for (std::size_t byte = 0; byte < 256; ++byte) {
      AppendUtf8(points[byte], out[byte]);
    }
    return out;
  }();
  return stand_ins;
}

std::string BytesToStandIns(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    out += ByteStandIns()[static_cast<uint8_t>(c)];
  }
  return out;
}

absl::StatusOr<std::string> StandInsToBytes(std::string_view text) {
  static const std::array<int, kLastMoved + 1> inverse = Inverse();
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const DecodedCharacter character = DecodeUtf8(text, i);
    if (character.bytes == 0 || character.code_point > kLastMoved ||
        inverse[character.code_point] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", std::string(text), "' is not written in byte-level characters"));
    }
    out += static_cast<char>(inverse[character.code_point]);
    i += static_cast<std::size_t>(character.bytes);
  }
  return out;
}

}  // namespace ravel::ctl
