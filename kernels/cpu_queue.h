#pragma once

// An ordered queue of host work with events: what a device stream is on the CPU. Work of one queue
// runs one after another on a thread of its own; between queues only events order anything.

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::kernels {

// Done once, for good. Thread-safe.
class CpuEvent {
 public:
  void Set();
  // Returns at once when the event is set; what happened before Set is visible afterwards.
  void Wait() const;
  bool done() const { return state_.load(std::memory_order_acquire) != 0; }

 private:
  std::atomic<uint32_t> state_ = 0;
};

// Thread-safe.
class CpuQueue {
 public:
  CpuQueue();
  // Waits for the work that was submitted.
  ~CpuQueue();
  CpuQueue(const CpuQueue&) = delete;
  CpuQueue& operator=(const CpuQueue&) = delete;

  // Runs `run` after all that was submitted before and after the events of `waits`; then sets
  // `done`, which may be null. `run` is told for how long the queue stood still for the events.
  struct Work {
    std::function<void(int64_t wait_ns)> run;
    std::vector<std::shared_ptr<const CpuEvent>> waits = {};
    std::shared_ptr<CpuEvent> done = nullptr;
  };
  void Submit(Work work);
  // All work submitted so far is done.
  void Drain();

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Work> pending_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ravel::kernels
