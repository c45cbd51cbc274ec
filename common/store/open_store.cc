#include "common/store/open_store.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/store/file_store.h"
#include "common/store/ravel_store_client.h"
#include "common/store/s3_store.h"

namespace ravel::store {

bool IsRemoteStore(std::string_view url) {
  return url.starts_with(kRavelScheme) || url.starts_with(kS3Scheme);
}

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(std::string_view url) {
  if (url.starts_with(kRavelScheme)) {
    return OpenRavelStore(url);
  }
  if (url.starts_with(kS3Scheme)) {
    return OpenS3Store(url);
  }
  if (!url.starts_with("/") && !url.starts_with("file:///")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "store \"",
        std::string(url),
        "\": expected file:///absolute/path, ravel://HOST:PORT/PATH or s3://BUCKET/PATH"));
  }
  return FileStore::FromUrl(url);
}

absl::Status CheckStoreUrl(std::string_view url) {
  return OpenStore(url).status();
}

absl::StatusOr<StorePlace> OpenParent(std::string_view url) {
  while (url.size() > 1 && url.ends_with('/')) {
    url.remove_suffix(1);
  }
  const size_t scheme = url.find("://");
  const size_t first = scheme == std::string_view::npos ? 0 : scheme + 3;
  const size_t slash = url.rfind('/');
  if (slash == std::string_view::npos || slash < first || slash + 1 == url.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", std::string(url), "\": expected an absolute path or the URL of a folder in a store"));
  }
  std::string_view parent = url.substr(0, slash);
  if (parent.size() <= first) {
    parent = url.substr(0, slash + 1);  // "/" or "file:///"
  }
  StorePlace place;
  ASSIGN_OR_RETURN(place.parent, OpenStore(parent));
  place.name = std::string(url.substr(slash + 1));
  return place;
}

}  // namespace ravel::store
