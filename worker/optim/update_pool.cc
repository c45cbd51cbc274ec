#include "worker/optim/update_pool.h"

#include <pthread.h>
#include <sched.h>

#include "common/check.h"

namespace ravel::optim {
namespace {

// A wish: a container may forbid it.
void BindThread(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    CPU_SET(static_cast<size_t>(cpu), &set);
  }
  if (!cpus.empty()) {
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
}

}  // namespace

UpdatePool::UpdatePool(int threads, const std::vector<int>& cpus) {
  CHECK_GT(threads, 0);
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, cpus] {
      pthread_setname_np(pthread_self(), "host-update");
      BindThread(cpus);
      Work();
    });
  }
}

UpdatePool::~UpdatePool() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

bool UpdatePool::RunOne() {
  if (begun_ == parts_) {
    return false;
  }
  const int64_t part = begun_++;
  const std::function<void(int64_t)>& run = *run_;
  mutex_.Unlock();
  run(part);
  mutex_.Lock();
  if (++done_ == parts_) {
    changed_.NotifyAll();
  }
  return true;
}

void UpdatePool::Work() {
  MutexLock lock(mutex_);
  while (!stopped_) {
    if (!RunOne()) {
      changed_.Wait(mutex_);
    }
  }
}

void UpdatePool::Run(int64_t parts, const std::function<void(int64_t)>& run) {
  MutexLock lock(mutex_);
  CHECK_MSG(done_ == parts_, "one thread at a time runs something");
  run_ = &run;
  begun_ = 0;
  done_ = 0;
  parts_ = parts;
  changed_.NotifyAll();
  while (RunOne()) {
  }
  while (done_ < parts_) {
    changed_.Wait(mutex_);
  }
}

}  // namespace ravel::optim
