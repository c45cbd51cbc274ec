#include "coordinator/executor.h"

#include <chrono>
#include <utility>

#include <pthread.h>

#include "common/check.h"
#include "common/clock.h"

namespace ravel::coordinator {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

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
  PostNamed("", std::move(work));
}

void ThreadExecutor::PostNamed(const char* name, std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    if (stopping_) {
      return;
    }
    queue_.push_back({name, NowUs(), std::move(work)});
  }
  changed_.NotifyOne();
}

bool ThreadExecutor::TryPost(std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    if (stopping_ || queue_.size() >= options_.max_queued) {
      return false;
    }
    queue_.push_back({"", NowUs(), std::move(work)});
  }
  changed_.NotifyOne();
  return true;
}

void ThreadExecutor::Drain() {
  Mutex mutex;
  CondVar changed;
  bool done = false;
  Post([&] {
    MutexLock lock(mutex);
    done = true;
    changed.NotifyAll();
  });
  {
    MutexLock lock(mutex);
    while (!done) {
      changed.Wait(mutex);
    }
  }
  Stop();
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

ThreadExecutor::Item ThreadExecutor::Next(int64_t next_tick_ms) {
  const SystemClock clock;
  MutexLock lock(mutex_);
  while (!stopping_) {
    const int64_t left_ms = options_.tick_ms > 0 ? next_tick_ms - clock.MonotonicMs() : 60'000;
    if (options_.tick_ms > 0 && left_ms <= 0) {
      return {"Tick", NowUs(), {}};
    }
    if (!queue_.empty()) {
      Item item = std::move(queue_.front());
      queue_.pop_front();
      return item;
    }
    changed_.WaitFor(mutex_, std::chrono::milliseconds(left_ms));
  }
  return {};
}

void ThreadExecutor::Loop() {
  const SystemClock clock;
  int64_t next_tick_ms = clock.MonotonicMs() + options_.tick_ms;
  while (true) {
    const Item item = Next(next_tick_ms);
    {
      MutexLock lock(mutex_);
      if (stopping_) {
        return;
      }
    }
    const int64_t begin_us = NowUs();
    if (item.work) {
      item.work();
    } else {
      options_.tick();
      next_tick_ms = clock.MonotonicMs() + options_.tick_ms;
    }
    if (options_.lag != nullptr) {
      options_.lag->Record(item.name, begin_us - item.posted_us, NowUs() - begin_us, begin_us);
    }
  }
}

}  // namespace ravel::coordinator
