#pragma once

// Thread pools for slow work, one per kind, so that no kind holds another up: requests of users
// (bounded, shared fairly among clients), looks at the stores that they name, calls of each
// checkpoint store (commits first), reading of files.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "coordinator/jobs/executor.h"
#include "coordinator/jobs/fair_turns.h"

namespace ravel::coordinator {

// Threads over one bounded queue, started on demand and gone when idle for a minute. The threads
// own the queue together with the pool: one that hangs in a call outlives the pool, and the process
// ends without it. Thread-safe.
class WorkPool {
 public:
  struct Options {
    std::string name;
    int threads = 1;
    int max_threads = 1;        // threads that are stuck are replaced, up to so many
    int64_t stuck_ms = 30'000;  // how long a thread may be in one work item before that
    size_t max_queued = 10'000;
    size_t max_per_client = 10'000;  // queued and running
    bool one_at_a_time = false;      // of each client
    int nice = 0;                    // of its threads: whoever decides goes first
  };
  struct Work {
    int rank = 0;        // lower ones first
    std::string client;  // who asked
    std::string name;    // what it is, for the log
    std::function<void()> run;
  };
  explicit WorkPool(Options options);
  // Waits for running work.
  ~WorkPool();

  // ResourceExhausted when the queue, or the client's share of it, is full.
  absl::Status Post(Work work);
  // Drops what is queued. False: some thread was still in its work after `ms`; it is left behind.
  bool StopWithin(int64_t ms);
  // Replaces threads that are stuck while work waits; to be called now and then.
  void Tend();
  // Work that has waited or run for longer than `ms`, each told once.
  std::vector<std::string> Overdue(int64_t ms);
  size_t queued() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads
};

// Order of work on one store.
enum class StoreWork { kCommit = 0, kRestore = 1, kUpkeep = 2 };

class WorkPools {
 public:
  struct Options {
    int64_t overdue_ms = 30'000;
  };
  explicit WorkPools(Options options);
  ~WorkPools();

  WorkPool& plan() { return plan_; }
  FairTurns& plan_turns() { return plan_turns_; }
  WorkPool& look() { return look_; }
  Executor& io() { return *io_; }
  // By the root of the store; made on demand. Outlives nothing that was posted through it.
  Executor& Store(const std::string& root, StoreWork kind);
  // Replaces threads that hang and logs what is overdue; to be called now and then.
  void Watch();
  bool StopWithin(int64_t ms);

 private:
  struct StorePool {
    explicit StorePool(const std::string& root);
    WorkPool commits;
    WorkPool others;  // restore points first
    std::vector<std::unique_ptr<Executor>> by_kind;
  };

  const Options options_;
  FairTurns plan_turns_;
  WorkPool plan_;
  WorkPool look_;
  WorkPool io_pool_;
  std::unique_ptr<Executor> io_;
  Mutex mutex_;
  std::map<std::string, std::unique_ptr<StorePool>> stores_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
