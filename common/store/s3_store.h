#pragma once

// ObjectStore in a bucket of S3 or of a server that speaks its protocol. The one place of libcurl.

#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

inline constexpr std::string_view kS3Scheme = "s3://";

// From "s3://BUCKET" or "s3://BUCKET/PREFIX". How the service is reached comes from the
// environment:
//   RAVEL_S3_ENDPOINT     https://HOST[:PORT]; http only to this host. Default: AWS's in the region
//   RAVEL_S3_REGION       default us-east-1
//   RAVEL_S3_STYLE        path or virtual: where the bucket stands. Default: path with an endpoint
//   RAVEL_S3_CA           file of certificates to trust instead of the system's
//   RAVEL_S3_ACCESS_KEY_ID, RAVEL_S3_SECRET_ACCESS_KEY, RAVEL_S3_SESSION_TOKEN
//                         keys, before those of the file
//   RAVEL_S3_CREDENTIALS  file in the form of ~/.aws/credentials, section [default]
// The file is read again for each store. Keys are in no log and no message. InvalidArgument names
// the URL or the variable; nothing is connected to. An answer that refuses a request says which
// setting to change (s3_refusal.h).
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenS3Store(std::string_view url);

}  // namespace ravel::store
