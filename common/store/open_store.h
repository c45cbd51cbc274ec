#pragma once

// The store that a URL names.

#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// A store by its URL, rooted at what it names: "/path", "file:///path", "ravel://HOST:PORT/PATH",
// "s3://BUCKET/PATH". InvalidArgument names the URL and the forms that are known;
// FailedPrecondition says what this process lacks for it, such as keys. Nothing is looked at or
// connected to.
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(std::string_view url);
// InvalidArgument unless OpenStore takes the URL.
absl::Status CheckStoreUrl(std::string_view url);
// True for "SCHEME://..." of a store that is no file system.
bool IsRemoteStore(std::string_view url);

// A folder or step in a store: the store of its parent, and its name there.
struct StorePlace {
  std::unique_ptr<ObjectStore> parent;
  std::string name;
};
// From "/path/step-0000000020" or "ravel://HOST:PORT/PATH/step-0000000020"; trailing slashes are
// dropped. InvalidArgument when there is no name.
absl::StatusOr<StorePlace> OpenParent(std::string_view url);

}  // namespace ravel::store
