#pragma once

// Answers of S3 as XML, read by their tags alone. They come from another machine: each takes time
// and memory in proportion to its length.

#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/store/blob_store.h"

namespace ravel::store {

// Text between the first <tag> and </tag>, with the entities that S3 writes as characters; empty
// when there is none.
std::string XmlText(std::string_view xml, std::string_view tag);

// "2026-03-01T12:30:05..." or another format of strptime as milliseconds since 1970; 0: it is none.
int64_t S3TimeMs(const std::string& text, const char* format);

// Adds one page of ListObjectsV2 to `listing`. Returns the token of the next page; empty: that was
// all. DataLoss when a size is not a number of bytes.
absl::StatusOr<std::string> AddListingPage(std::string_view xml, BlobListing& listing);

// One upload in parts that is not complete.
struct UnfinishedUpload {
  std::string key;
  std::string id;
};
// Adds one page of ListMultipartUploads, and says where the next one begins; no key: that was all.
UnfinishedUpload AddUploadsPage(std::string_view xml, std::vector<UnfinishedUpload>& uploads);

}  // namespace ravel::store
