#include "worker/comm/abort_domain.h"

#include <utility>

namespace ravel::comm {

AbortDomain::AbortDomain(GroupHeader& root, std::shared_ptr<SharedSegment> segment)
    : headers_({&root}), segments_({std::move(segment)}) {}

void AbortDomain::Add(const std::vector<GroupHeader*>& headers,
                      std::shared_ptr<SharedSegment> segment) {
  MutexLock lock(mutex_);
  for (GroupHeader* header : headers) {
    headers_.push_back(header);
    if (!failure_.ok()) {
      FailGroup(*header, failure_);
    }
  }
  segments_.push_back(std::move(segment));
}

void AbortDomain::Fail(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (failure_.ok()) {
    failure_ = status;
  }
  // First what later calls of any group look at; then the groups fail one after another.
  RecordDomainFailure(*headers_.front(), status);
  for (GroupHeader* header : headers_) {
    FailGroup(*header, status);
  }
}

}  // namespace ravel::comm
