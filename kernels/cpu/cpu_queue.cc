#include "kernels/cpu_queue.h"

#include <chrono>
#include <utility>

namespace ravel::kernels {
namespace {

int64_t WaitForAll(const std::vector<std::shared_ptr<const CpuEvent>>& events) {
  int64_t wait_ns = 0;
  for (const std::shared_ptr<const CpuEvent>& event : events) {
    if (!event->done()) {
      const auto begin = std::chrono::steady_clock::now();
      event->Wait();
      wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                     std::chrono::steady_clock::now() - begin)
                     .count();
    }
  }
  return wait_ns;
}

}  // namespace

void CpuEvent::Set() {
  state_.store(1, std::memory_order_release);
  state_.notify_all();
}

void CpuEvent::Wait() const {
  state_.wait(0, std::memory_order_acquire);
}

CpuQueue::CpuQueue() : thread_([this] { Loop(); }) {}

CpuQueue::~CpuQueue() {
  {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void CpuQueue::Submit(Work work) {
  MutexLock lock(mutex_);
  pending_.push_back(std::move(work));
  changed_.NotifyAll();
}

void CpuQueue::Drain() {
  MutexLock lock(mutex_);
  while (running_ || !pending_.empty()) {
    changed_.Wait(mutex_);
  }
}

void CpuQueue::Loop() {
  while (true) {
    Work work;
    {
      MutexLock lock(mutex_);
      running_ = false;
      changed_.NotifyAll();
      while (pending_.empty() && !closed_) {
        changed_.Wait(mutex_);
      }
      if (pending_.empty()) {
        return;
      }
      work = std::move(pending_.front());
      pending_.pop_front();
      running_ = true;
    }
    work.run(WaitForAll(work.waits));
    if (work.done != nullptr) {
      work.done->Set();
    }
  }
}

}  // namespace ravel::kernels
