// Changes of documents. Each is blind: it knows neither format nor parser, only what often breaks
// them.

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "tests/testing/fuzz.h"

namespace ravel::testing {
namespace {

constexpr size_t kMaxInputBytes = size_t{1} << 20;

constexpr std::array kNumbers = {int64_t{0},
                                 int64_t{1},
                                 int64_t{-1},
                                 int64_t{2},
                                 int64_t{7},
                                 int64_t{63},
                                 int64_t{64},
                                 int64_t{255},
                                 int64_t{256},
                                 int64_t{4096},
                                 int64_t{65535},
                                 int64_t{65536},
                                 int64_t{INT32_MAX},
                                 int64_t{INT32_MIN},
                                 int64_t{INT32_MAX} + 1,
                                 int64_t{UINT32_MAX},
                                 int64_t{UINT32_MAX} + 1,
                                 int64_t{1} << 40,
                                 int64_t{1} << 53,
                                 int64_t{1} << 61,
                                 int64_t{1} << 62,
                                 INT64_MAX,
                                 INT64_MAX - 1,
                                 INT64_MAX / 2 + 1,
                                 INT64_MIN,
                                 INT64_MIN + 1};

constexpr std::array<std::string_view, 44> kTokens = {"0",
                                                      "-0",
                                                      "-1",
                                                      "1e999",
                                                      "-1e999",
                                                      "1e-400",
                                                      "0.1",
                                                      ".5",
                                                      "00",
                                                      "0x10",
                                                      "1_000",
                                                      "9223372036854775807",
                                                      "9223372036854775808",
                                                      "-9223372036854775808",
                                                      "-9223372036854775809",
                                                      "18446744073709551615",
                                                      "18446744073709551616",
                                                      "4294967295",
                                                      "123456789012345678901234567890",
                                                      "nan",
                                                      "NaN",
                                                      ".inf",
                                                      "Infinity",
                                                      "true",
                                                      "null",
                                                      "~",
                                                      "\"\"",
                                                      "\"\\ud800\"",
                                                      "\"\\u0000\"",
                                                      "{}",
                                                      "[]",
                                                      "[[]]",
                                                      "{\"\":0}",
                                                      ",",
                                                      ":",
                                                      "&a",
                                                      "*a",
                                                      "!!binary",
                                                      "|",
                                                      "---",
                                                      "<<: *a",
                                                      "#",
                                                      "\t",
                                                      "\xff"};

void Replace(std::string& text, size_t at, size_t bytes, std::string_view with) {
  text.replace(at, bytes, with.data(), with.size());
}

void FlipBit(std::string& input, FuzzRandom& random) {
  char& byte = input[random.Below(input.size())];
  byte = static_cast<char>(byte ^ (1 << random.Below(8)));
}

void SetByte(std::string& input, FuzzRandom& random) {
  constexpr std::array<unsigned char, 8> kBytes = {0, 1, 0x7f, 0x80, 0xff, ' ', '\n', '"'};
  input[random.Below(input.size())] = static_cast<char>(
      random.OneIn(2) ? kBytes[random.Below(kBytes.size())] : random.Next() & 0xff);
}

// A number of 2, 4 or 8 bytes, little-endian, at a place that it divides or anywhere.
void SetLength(std::string& input, FuzzRandom& random) {
  const size_t bytes = size_t{2} << random.Below(3);
  if (input.size() < bytes) {
    return;
  }
  size_t at = random.Below(input.size() - bytes + 1);
  if (!random.OneIn(3)) {
    at -= at % bytes;
  }
  const int64_t number = HostileNumber(random);
  std::memcpy(input.data() + at, &number, bytes);
}

// A little more or less than it was.
void AddToLength(std::string& input, FuzzRandom& random) {
  if (input.size() < 8) {
    return;
  }
  const size_t at = random.Below(input.size() - 7);
  uint64_t number = 0;
  std::memcpy(&number, input.data() + at, 8);
  number += random.Below(17) - uint64_t{8};
  std::memcpy(input.data() + at, &number, 8);
}

void Cut(std::string& input, FuzzRandom& random) {
  input.resize(random.Below(input.size() + 1));
}

void EraseBlock(std::string& input, FuzzRandom& random) {
  const size_t at = random.Below(input.size());
  input.erase(at, 1 + random.Below(random.OneIn(4) ? input.size() : 16));
}

void RepeatBlock(std::string& input, FuzzRandom& random) {
  const size_t at = random.Below(input.size());
  const std::string block = input.substr(at, 1 + random.Below(random.OneIn(4) ? 4096 : 32));
  const size_t times = random.OneIn(8) ? 1 + random.Below(1000) : 1 + random.Below(3);
  std::string blocks;
  for (size_t i = 0; i < times && blocks.size() < kMaxInputBytes; ++i) {
    blocks += block;
  }
  input.insert(random.Below(input.size() + 1), blocks);
}

// The beginning of one document and the end of another.
void Splice(std::string& input, const std::string& other, FuzzRandom& random) {
  const size_t from = random.Below(other.size() + 1);
  input = absl::StrCat(input.substr(0, random.Below(input.size() + 1)), other.substr(from));
}

void InsertText(std::string& input, FuzzRandom& random) {
  input.insert(random.Below(input.size() + 1), HostileText(random));
}

// A word, a number, a quoted text or one other character.
std::pair<size_t, size_t> TokenAt(const std::string& text, size_t at) {
  const auto in_word = [&](size_t i) {
    return std::isalnum(static_cast<unsigned char>(text[i])) != 0 || text[i] == '_' ||
           text[i] == '.' || text[i] == '-';
  };
  if (text[at] == '"') {
    const size_t end = text.find('"', at + 1);
    return {at, end == std::string::npos ? 1 : end + 1 - at};
  }
  size_t begin = at;
  while (in_word(at) && begin > 0 && in_word(begin - 1)) {
    --begin;
  }
  size_t end = at + 1;
  while (in_word(at) && end < text.size() && in_word(end)) {
    ++end;
  }
  return {begin, end - begin};
}

void SetToken(std::string& text, FuzzRandom& random) {
  const auto [at, bytes] = TokenAt(text, random.Below(text.size()));
  switch (random.Below(4)) {
    case 0:
      return Replace(text, at, bytes, absl::StrCat(HostileNumber(random)));
    case 1: {
      const auto [from, length] = TokenAt(text, random.Below(text.size()));
      return Replace(text, at, bytes, text.substr(from, length));
    }
    default:
      return Replace(text, at, bytes, kTokens[random.Below(kTokens.size())]);
  }
}

void EraseToken(std::string& text, FuzzRandom& random) {
  const auto [at, bytes] = TokenAt(text, random.Below(text.size()));
  text.erase(at, bytes);
}

void RepeatLine(std::string& text, FuzzRandom& random) {
  const size_t newline = text.find('\n', random.Below(text.size()));
  const size_t begin = newline == std::string::npos ? 0 : newline + 1;
  const size_t end = text.find('\n', begin);
  const std::string line = text.substr(begin, end == std::string::npos ? end : end + 1 - begin);
  text.insert(begin, line);
}

// Brackets around, or in place of, a token.
void Nest(std::string& text, FuzzRandom& random) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kBrackets = {
      {{"[", "]"}, {"{\"a\":", "}"}, {"{a: ", "}"}, {"- ", ""}, {"(", ")"}, {"? ", ""}}};
  const auto& [open, close] = kBrackets[random.Below(kBrackets.size())];
  const size_t times = random.OneIn(4) ? 1 + random.Below(20'000) : 1 + random.Below(70);
  std::string before;
  std::string behind;
  for (size_t i = 0; i < times; ++i) {
    before += open;
    behind += close;
  }
  const auto [at, bytes] = TokenAt(text, random.Below(text.size()));
  text.insert(at + bytes, random.OneIn(4) ? "" : behind);
  text.insert(at, before);
}

// Aliases of aliases: a text of a few lines that stands for very many.
void AddAliases(std::string& text, FuzzRandom& random) {
  std::string lines = "a0: &a0 [x, x]\n";
  const size_t levels = 1 + random.Below(30);
  for (size_t i = 1; i <= levels; ++i) {
    absl::StrAppend(&lines, "a", i, ": &a", i, " [*a", i - 1, ", *a", i - 1, "]\n");
  }
  text = random.OneIn(2) ? lines + text : text + "\n" + lines;
}

void ChangeBytes(std::string& input, const std::vector<std::string>& seeds, FuzzRandom& random) {
  switch (random.Below(10)) {
    case 0:
    case 1:
      return FlipBit(input, random);
    case 2:
      return SetByte(input, random);
    case 3:
    case 4:
      return SetLength(input, random);
    case 5:
      return AddToLength(input, random);
    case 6:
      return random.OneIn(2) ? Cut(input, random) : EraseBlock(input, random);
    case 7:
      return RepeatBlock(input, random);
    case 8:
      return Splice(input, seeds[random.Below(seeds.size())], random);
    default:
      return InsertText(input, random);
  }
}

void ChangeText(std::string& text, const std::vector<std::string>& seeds, FuzzRandom& random) {
  switch (random.Below(12)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
      return SetToken(text, random);
    case 5:
      return EraseToken(text, random);
    case 6:
      return RepeatLine(text, random);
    case 7:
      return random.OneIn(4) ? Nest(text, random) : SetToken(text, random);
    case 8:
      return random.OneIn(8) ? AddAliases(text, random) : EraseToken(text, random);
    default:
      return ChangeBytes(text, seeds, random);
  }
}

}  // namespace

uint64_t FuzzRandom::Next() {
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

int64_t HostileNumber(FuzzRandom& random) {
  if (random.OneIn(8)) {
    return static_cast<int64_t>(random.Next());
  }
  return kNumbers[random.Below(kNumbers.size())];
}

std::string HostileText(FuzzRandom& random) {
  constexpr std::array<std::string_view, 20> kTexts = {"",
                                                       " ",
                                                       "\n",
                                                       "\r\n\r\n",
                                                       "..",
                                                       "../../../../etc/passwd",
                                                       "/",
                                                       "/dev/null",
                                                       "a/../b",
                                                       "\xff\xfe",
                                                       "\xed\xa0\x80",
                                                       "\xf4\x90\x80\x80",
                                                       "\x1b[2J",
                                                       "%s%n%x",
                                                       "${HOME}",
                                                       "\xe2\x80\xae",
                                                       "-----BEGIN CERTIFICATE-----\n",
                                                       "' OR 1=1; --",
                                                       "-1",
                                                       "\xef\xbb\xbf"};
  switch (random.Below(8)) {
    case 0:
      return std::string(1, '\0');
    case 1:
      return std::string(random.Below(300), 'a');
    case 2:
      return std::string(random.OneIn(16) ? 100'000 : 5000, static_cast<char>(random.Next()));
    case 3:
      return absl::StrCat(HostileNumber(random));
    default:
      return std::string(kTexts[random.Below(kTexts.size())]);
  }
}

std::string MutateInput(FuzzForm form, const std::vector<std::string>& seeds, FuzzRandom& random) {
  std::string input = seeds[random.Below(seeds.size())];
  const size_t changes = 1 + (random.OneIn(2) ? 0 : random.Below(8));
  for (size_t i = 0; i < changes; ++i) {
    if (input.empty()) {
      input = HostileText(random);
    } else if (form == FuzzForm::kText) {
      ChangeText(input, seeds, random);
    } else {
      ChangeBytes(input, seeds, random);
    }
    input.resize(std::min(input.size(), kMaxInputBytes));
  }
  return input;
}

}  // namespace ravel::testing
