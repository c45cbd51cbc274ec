#include "worker/comm/collective_ledger.h"

#include <utility>

namespace ravel::comm {

void CollectiveLedger::SetUnitNames(std::vector<std::string> names) {
  MutexLock lock(context_->mutex);
  context_->unit_names = std::move(names);
}

std::shared_ptr<IssueLog> CollectiveLedger::Open(IssueLog::Group group) {
  auto log = std::make_shared<IssueLog>(std::move(group), context_);
  MutexLock lock(mutex_);
  logs_.push_back(log);
  return log;
}

std::vector<std::shared_ptr<const IssueLog>> CollectiveLedger::logs() const {
  MutexLock lock(mutex_);
  return {logs_.begin(), logs_.end()};
}

std::vector<std::string> CollectiveLedger::unit_names() const {
  MutexLock lock(context_->mutex);
  return context_->unit_names;
}

}  // namespace ravel::comm
