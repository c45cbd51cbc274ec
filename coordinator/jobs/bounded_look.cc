#include "coordinator/jobs/bounded_look.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/mutex.h"

namespace ravel::coordinator {

struct LookProgress::State {
  Mutex mutex;
  CondVar changed;
  std::string field ABSL_GUARDED_BY(mutex);
  int64_t since_ms ABSL_GUARDED_BY(mutex) = 0;
  bool done ABSL_GUARDED_BY(mutex) = false;
};

LookProgress::LookProgress() : state_(std::make_unique<State>()) {}
LookProgress::~LookProgress() = default;

void LookProgress::At(const std::string& field) {
  MutexLock lock(state_->mutex);
  state_->field = field;
  state_->since_ms = SystemClock::Get().MonotonicMs();
}

absl::Status BoundedLook(WorkPool& pool,
                         const std::string& what,
                         LookLimits limits,
                         std::function<void(LookProgress&)> work) {
  const auto progress = std::make_shared<LookProgress>();
  LookProgress::State& state = *progress->state_;
  progress->At(what);
  const int64_t end_ms = SystemClock::Get().MonotonicMs() + limits.all_ms;
  RETURN_IF_ERROR(pool.Post({0, "", absl::StrCat("a look at ", what), [progress, work] {
                               work(*progress);
                               MutexLock lock(progress->state_->mutex);
                               progress->state_->done = true;
                               progress->state_->changed.NotifyAll();
                             }}));
  MutexLock lock(state.mutex);
  while (!state.done) {
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    const int64_t due_ms = std::min(end_ms, state.since_ms + limits.each_ms);
    if (now_ms >= due_ms) {
      const int64_t limit_ms = due_ms == end_ms ? limits.all_ms : limits.each_ms;
      return absl::DeadlineExceededError(
          absl::StrCat(state.field, ": no answer within ", limit_ms / 1000, " s"));
    }
    state.changed.WaitFor(state.mutex, std::chrono::milliseconds(due_ms - now_ms));
  }
  return absl::OkStatus();
}

}  // namespace ravel::coordinator
