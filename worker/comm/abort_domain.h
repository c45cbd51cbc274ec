#pragma once

// The control blocks of all shared-memory groups that one rank can see: they fail together.

#include <memory>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "worker/comm/group_block.h"
#include "worker/comm/shared_segment.h"

namespace ravel::comm {

// Thread-safe.
class AbortDomain {
 public:
  // `root` is the group from which the others were split. The segments stay mapped as long as the
  // domain lives: groups of which this rank is no member fail with it, too.
  AbortDomain(GroupHeader& root, std::shared_ptr<SharedSegment> segment);
  // Groups that join after Fail have failed.
  void Add(const std::vector<GroupHeader*>& headers, std::shared_ptr<SharedSegment> segment);
  // Releases all ranks of all groups. The first failure of a group is the one that its ranks
  // report.
  void Fail(const absl::Status& status);

 private:
  Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // of Fail here
  std::vector<GroupHeader*> headers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<SharedSegment>> segments_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::comm
