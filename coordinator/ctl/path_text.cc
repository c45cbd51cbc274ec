#include "coordinator/ctl/path_text.h"

#include <algorithm>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace ravel::ctl {
namespace {

constexpr std::string_view kFile = "file://";

// "s3:/", "gs://": letters, digits and signs of a scheme, a colon and a slash.
bool LooksLikeUrl(std::string_view text) {
  const size_t colon = text.find(":/");
  if (colon == std::string_view::npos || colon == 0) {
    return false;
  }
  return std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(colon), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '+' || c == '-' || c == '.';
  });
}

}  // namespace

absl::Status CheckIsPath(std::string_view field, std::string_view text) {
  const bool file = text.starts_with(kFile);
  const std::string_view path = file ? text.substr(kFile.size()) : text;
  if (path.empty() || (file && !path.starts_with('/')) || (!file && LooksLikeUrl(path))) {
    return absl::InvalidArgumentError(absl::StrCat(
        std::string(field),
        ": \"",
        std::string(text),
        "\": expected a path or file:///absolute/path, or, where a store may stand, "
        "ravel://HOST:PORT/PATH or s3://BUCKET/PATH; a folder of such a name is ./NAME"));
  }
  return absl::OkStatus();
}

}  // namespace ravel::ctl
