#pragma once

// One-time tokens as people carry them: "ravel1.FINGERPRINT.SECRET". The fingerprint lets who has
// the token recognise the cluster's authority; the secret lets the cluster recognise the token.

#include <istream>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel {

struct JoinToken {
  std::string fingerprint;  // of the authority's certificate: 64 hex digits
  std::string secret;       // 40 hex digits: 160 random bits
};

std::string FormatJoinToken(const JoinToken& token);
// InvalidArgument never repeats the text.
absl::StatusOr<JoinToken> ParseJoinToken(std::string_view text);

// A token as an argument of a command, or, where that is "-", the first word of `input`: arguments
// can be read by everybody on a host.
std::string TokenOf(const std::string& argument, std::istream& input);

}  // namespace ravel
