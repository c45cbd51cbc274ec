#pragma once

// Takes changes of the durable state off the controller's strand. One thread writes what is queued
// in groups: one wait for the disk, however many changes came while it waited the last time. Nobody
// waits for a group to fill: an idle writer writes a single change at once.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/latency_histogram.h"
#include "common/mutex.h"
#include "common/status.h"
#include "coordinator/store/job_store.h"

namespace ravel::coordinator {

// A change, or other work on the database that is a transaction of its own.
struct StoreWrite {
  std::shared_ptr<const StoreChange> change =
      {};  // shared with its author, who applies it in memory
  std::function<absl::Status(JobStore&)> work = {};  // instead of a change
  std::function<void(absl::Status)> done = {};       // durable, or why nothing of it stands
};

// Writes a group; what became of each. A write that fails does not take the others along. When the
// commit fails, all that had not failed before fail with it; a full disk is tried once more, change
// by change, after the store has made room. The fault points coordinator.before_persist and
// after_persist are reached once for each change.
std::vector<absl::Status> WriteGroup(JobStore& store, const std::vector<StoreWrite>& group);

// Each `done` is called once, in the order of Add; of a write that was not even queued, at once.
class StoreWriter {
 public:
  virtual ~StoreWriter() = default;
  virtual void Add(StoreWrite write) = 0;
};

// Without a thread: written, and `done` called, before Add returns. For tests and for tools.
class InlineStoreWriter : public StoreWriter {
 public:
  explicit InlineStoreWriter(JobStore* store) : store_(store) {}
  void Add(StoreWrite write) override;

 private:
  JobStore* store_;
};

// Thread-safe.
class ThreadStoreWriter : public StoreWriter {
 public:
  struct Options {
    JobStore* store = nullptr;  // outlives the writer; nobody else writes to it
    // Runs `done` elsewhere: it posts to the strand. Called on the writer's thread.
    std::function<void(std::function<void()>)> post;
    size_t most_in_group = 256;
    size_t max_queued = 100'000;  // above that a write is refused: ResourceExhausted
  };
  explicit ThreadStoreWriter(Options options);
  ~ThreadStoreWriter() override;

  void Add(StoreWrite write) override ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes what is queued and ends the thread; what comes later is refused: Unavailable. May be
  // called more than once.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Numbers of commits so far, and of writes in them.
  int64_t groups() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t writes() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t failed_writes() const { return failed_writes_; }
  // False when the newest commit failed: the disk is full, or the database is another's.
  bool works() const { return works_; }
  // The time of each commit, with what it waited for the disk.
  LatencyHistogram::Look latency() const { return latency_.Get(); }

 private:
  void Loop();
  // Empty: nothing is queued, and nothing will come.
  std::vector<StoreWrite> Take() ABSL_LOCKS_EXCLUDED(mutex_);
  void Tell(StoreWrite write, absl::Status status);
  void Measure(const std::vector<absl::Status>& results, std::chrono::duration<double> taken);

  const Options options_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<StoreWrite> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t groups_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t writes_ ABSL_GUARDED_BY(mutex_) = 0;
  LatencyHistogram latency_;
  std::atomic<int64_t> failed_writes_ = 0;
  std::atomic<bool> works_ = true;
  std::thread thread_;
};

}  // namespace ravel::coordinator
