#include "coordinator/jobs/last_resort.h"

#include <chrono>

#include <unistd.h>

#include "common/logging.h"

namespace ravel::coordinator {
namespace {

constexpr auto kExitTime = std::chrono::milliseconds(4500);

}  // namespace

LastResort::~LastResort() {
  {
    MutexLock lock(mutex_);
    done_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void LastResort::Arm(int code) {
  thread_ = std::thread([this, code] {
    const auto end = std::chrono::steady_clock::now() + kExitTime;
    MutexLock lock(mutex_);
    while (!done_ && std::chrono::steady_clock::now() < end) {
      changed_.WaitFor(mutex_, end - std::chrono::steady_clock::now());
    }
    if (!done_) {
      log::Warning("some work hangs and is left behind");
      _exit(code);
    }
  });
}

}  // namespace ravel::coordinator
