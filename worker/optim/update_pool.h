#pragma once

// Threads that share the work of one update on a host.

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "common/mutex.h"

namespace ravel::optim {

// Run is called by one thread at a time.
class UpdatePool {
 public:
  // `threads` at least 1. They run on `cpus` alone, where that names any.
  UpdatePool(int threads, const std::vector<int>& cpus);
  ~UpdatePool();
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  // Calls run(0) to run(parts - 1), each once, and returns when all have returned. The calling
  // thread takes what no thread has begun, so threads without a core hold nothing up.
  void Run(int64_t parts, const std::function<void(int64_t part)>& run);
  int64_t threads() const { return static_cast<int64_t>(threads_.size()); }

 private:
  void Work();
  // Runs one part, with the lock given up meanwhile. False: none is left to begin.
  bool RunOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  const std::function<void(int64_t)>* run_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t parts_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ravel::optim
