// Group commit. While one transaction waits for the disk, further changes queue; the next
// transaction takes them all, so throughput grows with load and an idle writer adds no delay. A
// change that fails does not fail its neighbours, unless the commit itself fails. `done` callbacks
// run elsewhere, in the order of Add; callers rely on that order.

#include "coordinator/store/store_writer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <pthread.h>

#include "common/fault_point.h"

namespace ravel::coordinator {
namespace {

constexpr auto kLook = std::chrono::seconds(60);  // nothing depends on it: a wait has an end

absl::Status WriteOne(JobStore& store, const StoreWrite& write) {
  if (write.change == nullptr) {
    return write.work(store);
  }
  RETURN_IF_ERROR(FaultPoint("coordinator.before_persist"));
  return store.Apply(*write.change);
}

// The disk was full, and the store has made room. Once it is full again the rest is not tried.
void WriteSingly(JobStore& store,
                 const std::vector<StoreWrite>& group,
                 std::vector<absl::Status>& results) {
  absl::Status full;
  for (size_t i = 0; i < group.size(); ++i) {
    if (!absl::IsResourceExhausted(results[i])) {
      continue;
    }
    if (full.ok()) {
      results[i] =
          group[i].change == nullptr ? group[i].work(store) : store.Apply(*group[i].change);
      full = absl::IsResourceExhausted(results[i]) ? results[i] : full;
    } else {
      results[i] = full;
    }
  }
}

}  // namespace

std::vector<absl::Status> WriteGroup(JobStore& store, const std::vector<StoreWrite>& group) {
  std::vector<absl::Status> results(group.size());
  absl::Status whole;
  if (group.size() == 1) {
    results.front() = WriteOne(store, group.front());
  } else {
    whole = store.BeginGroup();
    if (whole.ok()) {
      for (size_t i = 0; i < group.size(); ++i) {
        results[i] = WriteOne(store, group[i]);
      }
      whole = store.CommitGroup();
    }
    if (!whole.ok()) {
      // A change whose error spoilt the transaction says it again.
      std::replace_if(
          results.begin(), results.end(), [](const absl::Status& one) { return one.ok(); }, whole);
    }
    if (absl::IsResourceExhausted(whole)) {
      WriteSingly(store, group, results);
    }
  }
  for (size_t i = 0; i < group.size(); ++i) {
    if (results[i].ok() && group[i].change != nullptr) {
      FaultPoint("coordinator.after_persist")
          .IgnoreError();  // done is done: only a crash means anything here
    }
  }
  return results;
}

void InlineStoreWriter::Add(StoreWrite write) {
  std::vector<StoreWrite> group;
  group.push_back(std::move(write));
  const absl::Status status = WriteGroup(*store_, group).front();
  group.front().done(status);
}

ThreadStoreWriter::ThreadStoreWriter(Options options) : options_(std::move(options)) {
  thread_ = std::thread([this] { Loop(); });
  pthread_setname_np(thread_.native_handle(), "store");
}

ThreadStoreWriter::~ThreadStoreWriter() {
  Drain();
}

void ThreadStoreWriter::Tell(StoreWrite write, absl::Status status) {
  options_.post([done = std::move(write.done), status = std::move(status)] { done(status); });
}

void ThreadStoreWriter::Add(StoreWrite write) {
  absl::Status refused;
  {
    MutexLock lock(mutex_);
    if (stopping_) {
      refused = absl::UnavailableError("this coordinator ends");
    } else if (queue_.size() >= options_.max_queued) {
      refused = absl::ResourceExhaustedError("too many changes wait for the database");
    } else {
      queue_.push_back(std::move(write));
    }
  }
  if (!refused.ok()) {
    Tell(std::move(write), refused);
    return;
  }
  changed_.NotifyOne();
}

void ThreadStoreWriter::Drain() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) {
    thread_.join();
  }
}

int64_t ThreadStoreWriter::groups() const {
  MutexLock lock(mutex_);
  return groups_;
}

int64_t ThreadStoreWriter::writes() const {
  MutexLock lock(mutex_);
  return writes_;
}

std::vector<StoreWrite> ThreadStoreWriter::Take() {
  std::vector<StoreWrite> group;
  MutexLock lock(mutex_);
  while (queue_.empty() && !stopping_) {
    changed_.WaitFor(mutex_, kLook);
  }
  while (!queue_.empty() && group.size() < options_.most_in_group) {
    group.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  groups_ += group.empty() ? 0 : 1;
  writes_ += static_cast<int64_t>(group.size());
  return group;
}

void ThreadStoreWriter::Measure(const std::vector<absl::Status>& results,
                                std::chrono::duration<double> taken) {
  latency_.Record(taken.count());
  const auto failed = std::count_if(
      results.begin(), results.end(), [](const absl::Status& one) { return !one.ok(); });
  failed_writes_ += failed;
  works_ = failed == 0;
}

void ThreadStoreWriter::Loop() {
  for (std::vector<StoreWrite> group = Take(); !group.empty(); group = Take()) {
    const auto began = std::chrono::steady_clock::now();
    const std::vector<absl::Status> results = WriteGroup(*options_.store, group);
    Measure(results, std::chrono::steady_clock::now() - began);
    for (size_t i = 0; i < group.size(); ++i) {
      Tell(std::move(group[i]), results[i]);
    }
  }
}

}  // namespace ravel::coordinator
