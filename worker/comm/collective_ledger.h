#pragma once

// The logs of all communicators of one rank, for whoever looks from outside while the rank may be
// stuck in a collective.

#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "worker/comm/issue_log.h"

namespace ravel::comm {

// Thread-safe.
class CollectiveLedger {
 public:
  // Messages say unit names from now on.
  void SetUnitNames(std::vector<std::string> names);
  // A log for a new communicator; the ledger keeps it.
  std::shared_ptr<IssueLog> Open(IssueLog::Group group);
  // In the order of their making.
  std::vector<std::shared_ptr<const IssueLog>> logs() const;
  std::vector<std::string> unit_names() const;

 private:
  const std::shared_ptr<IssueLog::Context> context_ = std::make_shared<IssueLog::Context>();
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<IssueLog>> logs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::comm
