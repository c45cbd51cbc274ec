#include "worker/optim/update_pool.h"

#include <atomic>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "common/mutex.h"

namespace ravel::optim {
namespace {

TEST(UpdatePool, RunsEveryPartOnceAndReturnsWhenAllAreDone) {
  for (const int threads : {1, 3}) {
    UpdatePool pool(threads, {0, 1});
    EXPECT_EQ(pool.threads(), threads);
    for (const int64_t parts : {0, 1, 2, 7, 100}) {
      std::vector<int> runs(static_cast<size_t>(parts),
                            0);  // of each part, by one thread at a time
      pool.Run(parts, [&](int64_t part) { ++runs[static_cast<size_t>(part)]; });
      EXPECT_EQ(runs, std::vector<int>(runs.size(), 1));
    }
  }
}

// The only thread waits in its part until the caller has done all others.
TEST(UpdatePool, TheCallerTakesWhatNoThreadHasBegun) {
  UpdatePool pool(1, {});
  Mutex mutex;
  CondVar changed;
  int64_t done = 0;
  std::atomic<bool> held = false;
  pool.Run(6, [&](int64_t) {
    MutexLock lock(mutex);
    if (!held.exchange(true)) {
      while (done < 5) {
        changed.Wait(mutex);
      }
    }
    ++done;
    changed.NotifyAll();
  });
  EXPECT_EQ(done, 6);
}

}  // namespace
}  // namespace ravel::optim
