#include "common/join_token.h"

#include <algorithm>
#include <iomanip>

#include <absl/strings/str_cat.h>

namespace ravel {
namespace {

constexpr std::string_view kBeginning = "ravel1.";
constexpr size_t kFingerprintDigits = 64;
constexpr size_t kSecretDigits = 40;

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
}

}  // namespace

std::string FormatJoinToken(const JoinToken& token) {
  return absl::StrCat(std::string(kBeginning), token.fingerprint, ".", token.secret);
}

absl::StatusOr<JoinToken> ParseJoinToken(std::string_view text) {
  const size_t dot = kBeginning.size() + kFingerprintDigits;
  if (text.size() == dot + 1 + kSecretDigits && text.starts_with(kBeginning) && text[dot] == '.') {
    JoinToken token{.fingerprint = std::string(text.substr(kBeginning.size(), kFingerprintDigits)),
                    .secret = std::string(text.substr(dot + 1))};
    if (IsHex(token.fingerprint) && IsHex(token.secret)) {
      return token;
    }
  }
  return absl::InvalidArgumentError(
      "the token: expected ravel1.FINGERPRINT.SECRET as `ravelctl enrol` prints it");
}

std::string TokenOf(const std::string& argument, std::istream& input) {
  if (argument != "-") {
    return argument;
  }
  constexpr int kLongest = 256;
  std::string token;
  input >> std::setw(kLongest) >> token;
  return token;
}

}  // namespace ravel
