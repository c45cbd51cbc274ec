#include "coordinator/access/audit_log.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/logging.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMinuteMs = 60'000;
constexpr int64_t kTrimEvery = 10'000;  // rows written between looks at the log's length

}  // namespace

AuditLog::AuditLog(SqliteAccessStore* store, const Clock* clock) : store_(store), clock_(clock) {
  thread_ = std::thread([this] { Run(); });
}

AuditLog::~AuditLog() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

bool AuditLog::TooMany(const AuditRow& row) {
  if (queue_.size() >= kMaxQueued) {
    return true;
  }
  if (row.who != "anonymous" && row.result != "UNAUTHENTICATED") {
    return false;
  }
  const int64_t minute = clock_->MonotonicMs() / kMinuteMs;
  if (std::exchange(minute_, minute) != minute) {
    anonymous_ = 0;
  }
  return ++anonymous_ > kMaxAnonymous;
}

void AuditLog::Record(AuditRow row) {
  row.time_ms = clock_->WallMs();
  {
    MutexLock lock(mutex_);
    if (TooMany(row)) {
      ++left_out_;
      return;
    }
    if (const int64_t left_out = std::exchange(left_out_, 0); left_out > 0) {
      absl::StrAppend(&row.message,
                      row.message.empty() ? "" : "; ",
                      left_out,
                      " calls before this one were left out of the log: too many at once");
    }
    queue_.push_back(std::move(row));
  }
  changed_.NotifyAll();
}

void AuditLog::Flush() {
  MutexLock lock(mutex_);
  while (!queue_.empty() || writing_) {
    changed_.Wait(mutex_);
  }
}

void AuditLog::Run() {
  int64_t written = kTrimEvery;  // the first look is at the start
  while (true) {
    AccessChange change;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) {
        changed_.Wait(mutex_);
      }
      if (queue_.empty()) {
        return;
      }
      change.audit.assign(std::make_move_iterator(queue_.begin()),
                          std::make_move_iterator(queue_.end()));
      queue_.clear();
      writing_ = true;
    }
    written += static_cast<int64_t>(change.audit.size());
    absl::Status status = store_->Apply(change);
    if (status.ok() && written >= kTrimEvery) {
      written = 0;
      status = store_->Trim(kMaxRows);
    }
    if (!status.ok()) {
      log::Error(absl::StrCat("the audit log cannot be written: ", std::string(status.message())));
    }
    {
      MutexLock lock(mutex_);
      writing_ = false;
    }
    changed_.NotifyAll();
  }
}

}  // namespace ravel::coordinator
