// A token is "ravel-job-1 FOLDER TAG EPOCH NODE SIGNATURE": hashes, tag and signature in
// hexadecimal, the signature of all before it without the space.

#include "common/job_token.h"

#include <algorithm>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "common/crypto.h"

namespace ravel {
namespace {

constexpr std::string_view kForm = "ravel-job-1";
constexpr size_t kMaxTextBytes = 1024;
constexpr size_t kTagDigits = 8;
constexpr size_t kHashDigits = 64;

absl::Status Refused() {
  return absl::PermissionDeniedError("the token of the job is not of this cluster's coordinator");
}

bool IsPlain(std::string_view node) {
  return !node.empty() &&
         std::all_of(node.begin(), node.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

}  // namespace

std::string JobFolderHash(std::string_view path) {
  return Hex(Sha256(path));
}

absl::StatusOr<std::string> FormatJobToken(const JobToken& token, std::string_view private_key) {
  if (!IsPlain(token.node)) {
    return absl::InvalidArgumentError("node: expected an id without spaces");
  }
  const std::string text = absl::StrCat(std::string(kForm),
                                        " ",
                                        token.folder,
                                        " ",
                                        absl::Hex(token.job_tag, absl::kZeroPad8),
                                        " ",
                                        token.epoch,
                                        " ",
                                        token.node);
  return absl::StrCat(text, " ", Hex(Sign(private_key, text)));
}

absl::StatusOr<JobToken> CheckJobToken(std::string_view text,
                                       const std::vector<std::string>& public_keys) {
  const size_t end = text.rfind(' ');
  if (text.size() > kMaxTextBytes || end == std::string_view::npos) {
    return Refused();
  }
  const std::string_view body = text.substr(0, end);
  const std::string signature = Unhex(text.substr(end + 1));
  const bool known = std::any_of(public_keys.begin(), public_keys.end(), [&](const auto& key) {
    return IsSignature(key, body, signature);
  });
  const std::vector<std::string> fields = absl::StrSplit(std::string(body), ' ');
  JobToken token;
  if (!known || fields.size() != 5 || fields[0] != kForm || fields[1].size() != kHashDigits ||
      fields[2].size() != kTagDigits || !absl::SimpleHexAtoi(fields[2], &token.job_tag) ||
      !absl::SimpleAtoi(fields[3], &token.epoch) || !IsPlain(fields[4])) {
    return Refused();
  }
  token.folder = fields[1];
  token.node = fields[4];
  return token;
}

}  // namespace ravel
