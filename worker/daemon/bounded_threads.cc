#include "worker/daemon/bounded_threads.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <pthread.h>

#include "common/mutex.h"

namespace ravel::daemon {

namespace asio = boost::asio;
using std::chrono::steady_clock;

struct WorkProgress::State {
  Mutex mutex;
  std::string part ABSL_GUARDED_BY(mutex);
  steady_clock::time_point since ABSL_GUARDED_BY(mutex) = steady_clock::now();
  bool abandoned ABSL_GUARDED_BY(mutex) = false;
};

WorkProgress::WorkProgress() : state_(std::make_unique<State>()) {}
WorkProgress::~WorkProgress() = default;

void WorkProgress::At(const std::string& part) {
  const MutexLock lock(state_->mutex);
  state_->part = part;
  state_->since = steady_clock::now();
}

bool WorkProgress::GoesOn() {
  const MutexLock lock(state_->mutex);
  state_->since = steady_clock::now();
  return !state_->abandoned;
}

struct BoundedThreads::Item {
  Item(asio::io_context& context, Limits given, Late callback)
      : timer(context), limits(given), late(std::move(callback)) {}
  asio::steady_timer timer;
  const Limits limits;
  const Late late;
  const steady_clock::time_point start = steady_clock::now();
  // Shared with the thread, which may outlive this.
  const std::shared_ptr<WorkProgress> progress = std::make_shared<WorkProgress>();
};

struct BoundedThreads::Gate {
  Mutex mutex;
  asio::io_context* context ABSL_GUARDED_BY(mutex) = nullptr;
};

BoundedThreads::BoundedThreads(asio::io_context& context, int max_threads)
    : context_(context), max_threads_(max_threads), gate_(std::make_shared<Gate>()) {
  const MutexLock lock(gate_->mutex);
  gate_->context = &context;
}

BoundedThreads::~BoundedThreads() {
  const MutexLock lock(gate_->mutex);
  gate_->context = nullptr;
}

bool BoundedThreads::Run(Limits limits, Work work, Late late) {
  if (running_ >= max_threads_) {
    return false;
  }
  const int64_t id = ++last_id_;
  Item& item = *(open_[id] = std::make_unique<Item>(context_, limits, std::move(late)));
  Watch(id);
  ++running_;
  std::thread thread(
      [this, id, gate = gate_, progress = item.progress, work = std::move(work)]() mutable {
        std::function<void()> answer = work(*progress);
        work = nullptr;
        const MutexLock lock(gate->mutex);
        if (gate->context != nullptr) {
          asio::post(*gate->context, [this, id, answer = std::move(answer)] {
            --running_;
            if (open_.erase(id) > 0) {
              answer();
            }
          });
        }
      });
  pthread_setname_np(thread.native_handle(), "look");
  thread.detach();  // nothing ends a thread that waits for a dead file server
  return true;
}

void BoundedThreads::Watch(int64_t id) {
  Item& item = *open_.at(id);
  steady_clock::time_point since;
  {
    WorkProgress::State& state = *item.progress->state_;
    const MutexLock lock(state.mutex);
    since = state.since;
  }
  item.timer.expires_at(std::min(since + item.limits.each, item.start + item.limits.all));
  item.timer.async_wait([this, id](boost::system::error_code error) {
    if (!error) {
      Judge(id);
    }
  });
}

// The timer may be older than the part that runs now.
void BoundedThreads::Judge(int64_t id) {
  const auto found = open_.find(id);
  if (found == open_.end()) {
    return;
  }
  const Limits limits = found->second->limits;
  const steady_clock::time_point now = steady_clock::now();
  const bool over = now - found->second->start >= limits.all;
  std::string part;
  bool late = false;
  {
    WorkProgress::State& state = *found->second->progress->state_;
    const MutexLock lock(state.mutex);
    late = state.abandoned = over || now - state.since >= limits.each;
    part = state.part;
  }
  if (!late) {
    Watch(id);
    return;
  }
  const std::unique_ptr<Item> item = std::move(found->second);
  open_.erase(found);
  item->late(part, over ? limits.all : limits.each);
}

}  // namespace ravel::daemon
