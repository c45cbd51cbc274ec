#include "coordinator/executor.h"

#include <chrono>
#include <utility>

#include <pthread.h>

#include "common/check.h"
#include "common/clock.h"

namespace ravel::coordinator {

ThreadExecutor::ThreadExecutor(Options options) : options_(std::move(options)) {
  CHECK(options_.threads >= 1 && (options_.tick_ms == 0 || options_.threads == 1));
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
    pthread_setname_np(threads_.back().native_handle(), options_.name.substr(0, 15).c_str());
  }
}

ThreadExecutor::~ThreadExecutor() {
  Stop();
}

void ThreadExecutor::Post(std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    if (stopping_) {
      return;
    }
    queue_.push_back(std::move(work));
  }
  changed_.NotifyOne();
}

void ThreadExecutor::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
  MutexLock lock(mutex_);
  queue_.clear();
}

std::function<void()> ThreadExecutor::Next(int64_t next_tick_ms) {
  const SystemClock clock;
  MutexLock lock(mutex_);
  while (!stopping_) {
    const int64_t left_ms = options_.tick_ms > 0 ? next_tick_ms - clock.MonotonicMs() : 60'000;
    if (options_.tick_ms > 0 && left_ms <= 0) {
      return {};
    }
    if (!queue_.empty()) {
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      return work;
    }
    changed_.WaitFor(mutex_, std::chrono::milliseconds(left_ms));
  }
  return {};
}

void ThreadExecutor::Loop() {
  const SystemClock clock;
  int64_t next_tick_ms = clock.MonotonicMs() + options_.tick_ms;
  while (true) {
    const std::function<void()> work = Next(next_tick_ms);
    {
      MutexLock lock(mutex_);
      if (stopping_) {
        return;
      }
    }
    if (work) {
      work();
    } else {
      options_.tick();
      next_tick_ms = clock.MonotonicMs() + options_.tick_ms;
    }
  }
}

}  // namespace ravel::coordinator
