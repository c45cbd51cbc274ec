#include "common/store/s3_listing.h"

#include <array>
#include <ctime>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

namespace ravel::store {
namespace {

constexpr std::array<std::pair<std::string_view, char>, 5> kEntities = {
    {{"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&#34;", '"'}, {"&amp;", '&'}}};

// It takes one pass: an answer of many entities must not cost the square of its length.
std::string Unescape(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  while (!text.empty()) {
    size_t taken = 1;
    char character = text[0];
    for (const auto& [entity, meaning] : kEntities) {
      if (text.starts_with(entity)) {
        taken = entity.size();
        character = meaning;
      }
    }
    plain.push_back(character);
    text.remove_prefix(taken);
  }
  return plain;
}

// Each <tag>...</tag>, inside.
std::vector<std::string_view> Elements(std::string_view xml, std::string_view tag) {
  const std::string open = absl::StrCat("<", std::string(tag), ">");
  const std::string close = absl::StrCat("</", std::string(tag), ">");
  std::vector<std::string_view> found;
  for (size_t at = xml.find(open); at != std::string_view::npos; at = xml.find(open, at)) {
    const size_t begin = at + open.size();
    const size_t end = xml.find(close, begin);
    if (end == std::string_view::npos) {
      break;
    }
    found.push_back(xml.substr(begin, end - begin));
    at = end;
  }
  return found;
}

}  // namespace

std::string XmlText(std::string_view xml, std::string_view tag) {
  const std::string open = absl::StrCat("<", std::string(tag), ">");
  const std::string close = absl::StrCat("</", std::string(tag), ">");
  const size_t begin = xml.find(open);
  const size_t end = begin == std::string_view::npos ? begin : xml.find(close, begin);
  return end == std::string_view::npos
             ? ""
             : Unescape(xml.substr(begin + open.size(), end - begin - open.size()));
}

int64_t S3TimeMs(const std::string& text, const char* format) {
  std::tm utc = {};
  return strptime(text.c_str(), format, &utc) == nullptr ? 0 : int64_t{timegm(&utc)} * 1000;
}

absl::StatusOr<std::string> AddListingPage(std::string_view xml, BlobListing& listing) {
  for (const std::string_view content : Elements(xml, "Contents")) {
    BlobFacts facts;
    facts.key = XmlText(content, "Key");
    facts.version = XmlText(content, "ETag");
    facts.changed_ms = S3TimeMs(XmlText(content, "LastModified"), "%Y-%m-%dT%H:%M:%S");
    if (!absl::SimpleAtoi(XmlText(content, "Size"), &facts.size) || facts.size < 0) {
      return absl::DataLossError("Size: not a number of bytes");
    }
    listing.blobs.push_back(std::move(facts));
  }
  for (const std::string_view common : Elements(xml, "CommonPrefixes")) {
    listing.prefixes.push_back(XmlText(common, "Prefix"));
  }
  return XmlText(xml, "NextContinuationToken");
}

UnfinishedUpload AddUploadsPage(std::string_view xml, std::vector<UnfinishedUpload>& uploads) {
  for (const std::string_view upload : Elements(xml, "Upload")) {
    uploads.push_back({XmlText(upload, "Key"), XmlText(upload, "UploadId")});
  }
  return XmlText(xml, "IsTruncated") == "true"
             ? UnfinishedUpload{XmlText(xml, "NextKeyMarker"), XmlText(xml, "NextUploadIdMarker")}
             : UnfinishedUpload();
}

}  // namespace ravel::store
