#pragma once

// Interfaces to the places where work runs: the controller's strand (one thread, in order) and the
// pool for planning and commits.

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "coordinator/jobs/strand_lag.h"

namespace ravel::coordinator {

// Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;
  // Runs `work` later, never inside this call. After Stop the work is dropped.
  virtual void Post(std::function<void()> work) = 0;
  // The same; `name` (a literal) says what it is when it took long.
  virtual void PostNamed(const char* /*name*/, std::function<void()> work) {
    Post(std::move(work));
  }
};

// Named threads over one queue; one thread makes a strand. Thread-safe.
class ThreadExecutor : public Executor {
 public:
  struct Options {
    std::string name;
    int threads = 1;
    int64_t tick_ms =
        0;  // > 0: `tick` runs at least this often, between other work; one thread only
    std::function<void()> tick;
    LagMeter* lag = nullptr;  // hears of every turn; outlives the executor
    // Above that, work that need not be done is refused by TryPost.
    size_t max_queued = 100'000;
  };
  explicit ThreadExecutor(Options options);
  ~ThreadExecutor() override;

  void Post(std::function<void()> work) override;
  void PostNamed(const char* name, std::function<void()> work) override;
  // False, and dropped, when max_queued are waiting.
  bool TryPost(std::function<void()> work);
  // Does what is queued, then stops.
  void Drain();
  // Ends after the work at hand; what is queued is dropped. May be called more than once, not from
  // own threads.
  void Stop();

 private:
  void Loop();
  struct Item {
    const char* name = "";
    int64_t posted_us = 0;
    std::function<void()> work;
  };
  // Waits for work until the next tick is due; an empty item means: tick.
  Item Next(int64_t next_tick_ms) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ravel::coordinator
