// Where a build links no libcurl: s3:// is refused by name.

#include "common/store/s3_store.h"

namespace ravel::store {

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenS3Store(std::string_view /*url*/) {
  return absl::UnimplementedError("s3:// is not part of this build: it has no libcurl");
}

}  // namespace ravel::store
