#pragma once

// Whose checkpoint folder it is. OWNER is written before anything else of a job and checked before
// everything that reads or changes the folder: a mount that is gone, an emptied folder and the
// folder of another cluster all show as a missing or foreign OWNER, never as "no checkpoints yet".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// On disk: do not rename fields.
struct OwnerRecord {
  std::string cluster_id;
  std::string job_uid;
  std::string job_name;  // NAMESPACE/NAME, for people
  int64_t created_ms = 0;
  bool operator==(const OwnerRecord&) const = default;
};

std::string EncodeOwner(const OwnerRecord& owner);
// Strict, but for unknown fields. Errors name the field; another version is FailedPrecondition.
absl::StatusOr<OwnerRecord> ParseOwner(std::string_view text);

// Empty when the folder or its OWNER is not there; Unavailable when it cannot be read.
absl::StatusOr<std::optional<OwnerRecord>> ReadOwner(const store::ObjectStore& store);

// OK when the folder belongs to this job of this cluster. Unavailable when there is no OWNER, or
// none that can be read: is the store mounted? FailedPrecondition when it is another's.
absl::Status CheckOwner(const store::ObjectStore& store, const OwnerRecord& self);

// The owners of a folder that may be replaced.
enum class Takeover {
  kNever,
  kSameCluster,  // another job of this cluster: names are unique, so that job is deleted
};
// Makes the folder this job's: creates OWNER unless it is there. The folder itself must exist.
// FailedPrecondition when it belongs to another. May be repeated.
absl::Status ClaimFolder(store::ObjectStore& store, const OwnerRecord& self, Takeover takeover);

}  // namespace ravel::coordinator
