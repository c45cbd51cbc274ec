// Thread pools for blocking calls. A call into a network file system may never return, so threads
// cannot be joined unconditionally: state is shared between pool and threads, a thread that is
// stuck is replaced, and at shutdown one that does not end in time is left behind with its share.
// The queue is bounded in all and per client; rank orders it (commits before upkeep). Threads start
// on demand and end after an idle minute.

#include "coordinator/jobs/work_pools.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/logging.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kPlansAtOnce = 2;

}  // namespace

struct WorkPool::State {
  struct Item {
    Work work;
    int64_t since_ms = 0;
    bool told = false;
  };

  explicit State(Options given) : options(std::move(given)) {}

  static int64_t Now() { return SystemClock::Get().MonotonicMs(); }
  std::deque<Item>::iterator Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    auto best = queue.end();
    for (auto item = queue.begin(); item != queue.end(); ++item) {
      if (options.one_at_a_time && running_of.contains(item->work.client)) {
        continue;
      }
      if (best == queue.end() || item->work.rank < best->work.rank) {
        best = item;
      }
      if (best->work.rank == 0) {
        break;  // nothing comes before it
      }
    }
    return best;
  }
  void Loop();
  void StartThread(const std::shared_ptr<State>& self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // One more thread, if there is work for it that no other will take soon.
  void MayStartThread(const std::shared_ptr<State>& self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const Options options;
  Mutex mutex;
  CondVar changed;
  std::deque<Item> queue ABSL_GUARDED_BY(mutex);
  std::map<int64_t, Item> running ABSL_GUARDED_BY(mutex);
  std::map<std::string, int64_t> running_of ABSL_GUARDED_BY(mutex);
  int64_t last_id ABSL_GUARDED_BY(mutex) = 0;
  int threads ABSL_GUARDED_BY(mutex) = 0;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
};

void WorkPool::State::StartThread(const std::shared_ptr<State>& self) {
  ++threads;
  std::thread thread([self] { self->Loop(); });
  pthread_setname_np(thread.native_handle(), options.name.substr(0, 15).c_str());
  thread.detach();
}

void WorkPool::State::MayStartThread(const std::shared_ptr<State>& self) {
  const int64_t stuck = std::count_if(running.begin(), running.end(), [this](const auto& entry) {
    return Now() - entry.second.since_ms > options.stuck_ms;
  });
  const int64_t idle = threads - static_cast<int64_t>(running.size());
  if (idle < static_cast<int64_t>(queue.size()) && threads - stuck < options.threads &&
      threads < options.max_threads) {
    StartThread(self);
  }
}

void WorkPool::State::Loop() {
  if (options.nice != 0) {
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), options.nice);
  }
  while (true) {
    std::function<void()> run;
    int64_t id = 0;
    std::string client;
    {
      MutexLock lock(mutex);
      auto next = Choose();
      bool idle = false;
      while (!stopping && !idle && next == queue.end()) {
        idle = !changed.WaitFor(mutex, std::chrono::seconds(60)) && queue.empty();
        next = Choose();
      }
      if (stopping || next == queue.end()) {
        --threads;
        changed.NotifyAll();
        return;
      }
      id = ++last_id;
      run = std::move(next->work.run);
      client = next->work.client;
      ++running_of[client];
      next->since_ms = Now();
      next->told = false;
      running.emplace(id, std::move(*next));
      queue.erase(next);
    }
    run();
    run = {};  // what it holds is let go before the pool says that it is done
    MutexLock lock(mutex);
    running.erase(id);
    if (--running_of[client] == 0) {
      running_of.erase(client);
    }
    changed.NotifyAll();
  }
}

WorkPool::WorkPool(Options options) : state_(std::make_shared<State>(std::move(options))) {}

WorkPool::~WorkPool() {
  StopWithin(INT64_MAX);
}

absl::Status WorkPool::Post(Work work) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  if (state.stopping) {
    return absl::UnavailableError("the coordinator is stopping");
  }
  const auto mine = std::count_if(state.queue.begin(), state.queue.end(), [&](const auto& item) {
    return item.work.client == work.client;
  });
  const auto busy = state.running_of.find(work.client);
  const int64_t taken = mine + (busy == state.running_of.end() ? 0 : busy->second);
  if (state.queue.size() >= state.options.max_queued ||
      static_cast<size_t>(taken) >= state.options.max_per_client) {
    return absl::ResourceExhaustedError(
        absl::StrCat(state.queue.size() >= state.options.max_queued
                         ? "the coordinator is busy with requests of this kind"
                         : "this client has too many requests of this kind under way",
                     "; try again in a few seconds"));
  }
  state.queue.push_back({std::move(work), State::Now(), false});
  state.MayStartThread(state_);
  state.changed.NotifyAll();
  return absl::OkStatus();
}

bool WorkPool::StopWithin(int64_t ms) {
  State& state = *state_;
  std::deque<State::Item> dropped;  // destroyed without the lock
  const int64_t start_ms = State::Now();
  MutexLock lock(state.mutex);
  state.stopping = true;
  dropped.swap(state.queue);
  state.changed.NotifyAll();
  while (state.threads > 0 && State::Now() - start_ms < ms) {
    state.changed.WaitFor(state.mutex, std::chrono::milliseconds(20));
  }
  return state.threads == 0;
}

void WorkPool::Tend() {
  MutexLock lock(state_->mutex);
  if (!state_->stopping) {
    state_->MayStartThread(state_);
  }
}

std::vector<std::string> WorkPool::Overdue(int64_t ms) {
  State& state = *state_;
  const int64_t now_ms = State::Now();
  std::vector<std::string> names;
  MutexLock lock(state.mutex);
  const auto look = [&](State::Item& item, const char* how) {
    if (!item.told && now_ms - item.since_ms > ms) {
      item.told = true;
      names.push_back(absl::StrCat(
          item.work.name, " has ", how, " for ", (now_ms - item.since_ms) / 1000, " s"));
    }
  };
  for (auto& [id, item] : state.running) {
    look(item, "not returned");
  }
  for (State::Item& item : state.queue) {
    look(item, "waited");
  }
  return names;
}

size_t WorkPool::queued() const {
  MutexLock lock(state_->mutex);
  return state_->queue.size();
}

namespace {

class PoolExecutor : public Executor {
 public:
  PoolExecutor(WorkPool* pool, int rank, std::string name)
      : pool_(pool), rank_(rank), name_(std::move(name)) {}
  void Post(std::function<void()> work) override {
    const absl::Status posted = pool_->Post({rank_, "", name_, std::move(work)});
    if (absl::IsResourceExhausted(posted)) {
      log::Error(absl::StrCat(name_, " is dropped: ", std::string(posted.message())));
    }
  }

 private:
  WorkPool* pool_;
  const int rank_;
  const std::string name_;
};

}  // namespace

WorkPools::StorePool::StorePool(const std::string& root)
    : commits({.name = "commits", .threads = 2, .max_threads = 8, .stuck_ms = 5000}),
      others({.name = "store", .threads = 2, .max_threads = 8}) {
  const auto add = [&](WorkPool& pool, StoreWork kind, const char* name) {
    by_kind.push_back(std::make_unique<PoolExecutor>(
        &pool, static_cast<int>(kind), absl::StrCat("store ", root, ": ", name)));
  };
  add(commits, StoreWork::kCommit, "a commit");
  add(others, StoreWork::kRestore, "a restore point");
  add(others, StoreWork::kUpkeep, "upkeep");
}

WorkPools::WorkPools(Options options)
    : options_(options),
      plan_turns_(kPlansAtOnce),
      plan_({.name = "plan",
             .threads = 64,  // most of them wait: for a turn, or for a node that looks at paths
             .max_threads = 64,
             .max_queued = 256,
             .max_per_client = 8,
             .one_at_a_time = true,
             .nice = 10}),
      look_({.name = "look", .threads = 16, .max_threads = 64, .stuck_ms = 1000}),
      io_pool_({.name = "io", .threads = 2, .max_threads = 8}),
      io_(std::make_unique<PoolExecutor>(&io_pool_, 0, "a reading of files")) {}

WorkPools::~WorkPools() = default;

Executor& WorkPools::Store(const std::string& root, StoreWork kind) {
  MutexLock lock(mutex_);
  std::unique_ptr<StorePool>& store = stores_[root];
  if (store == nullptr) {
    store = std::make_unique<StorePool>(root);
  }
  return *store->by_kind[static_cast<size_t>(kind)];
}

void WorkPools::Watch() {
  std::vector<std::string> overdue;
  const auto watch = [&](WorkPool& pool) {
    pool.Tend();
    const std::vector<std::string> more = pool.Overdue(options_.overdue_ms);
    overdue.insert(overdue.end(), more.begin(), more.end());
  };
  watch(plan_);
  watch(look_);
  watch(io_pool_);
  {
    MutexLock lock(mutex_);
    for (auto& [root, store] : stores_) {
      watch(store->commits);
      watch(store->others);
    }
  }
  for (const std::string& line : overdue) {
    log::Warning(line);
  }
}

bool WorkPools::StopWithin(int64_t ms) {
  const int64_t end_ms = SystemClock::Get().MonotonicMs() + ms;
  const auto left = [end_ms] {
    return std::max<int64_t>(0, end_ms - SystemClock::Get().MonotonicMs());
  };
  bool stopped = plan_.StopWithin(left());
  stopped = look_.StopWithin(left()) && stopped;
  stopped = io_pool_.StopWithin(left()) && stopped;
  MutexLock lock(mutex_);
  for (auto& [root, store] : stores_) {
    stopped = store->commits.StopWithin(left()) && stopped;
    stopped = store->others.StopWithin(left()) && stopped;
  }
  return stopped;
}

}  // namespace ravel::coordinator
