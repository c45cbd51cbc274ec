#pragma once

// Work that may hang in a file system: each piece on a thread of its own, with an end for whoever
// waits. A thread that hangs is left behind; only so many may.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace boost::asio {
class io_context;
}

namespace ravel::daemon {

// The place that a piece of work has reached. Thread-safe.
class WorkProgress {
 public:
  WorkProgress();
  ~WorkProgress();
  WorkProgress(const WorkProgress&) = delete;
  WorkProgress& operator=(const WorkProgress&) = delete;
  // From the thread: the next part begins.
  void At(const std::string& part);
  // From the thread: the part makes progress. False: it was too late, nobody waits for its answer.
  bool GoesOn();

 private:
  friend class BoundedThreads;
  struct State;
  const std::unique_ptr<State> state_;
};

// Used only from the thread of its io_context.
class BoundedThreads {
 public:
  struct Limits {
    std::chrono::milliseconds each;  // without progress
    std::chrono::milliseconds all;   // for all of them
  };
  // Runs on the thread; what it returns runs on the io_context's unless the limit came first. It
  // owns all that it touches: it may go on for ever.
  using Work = std::function<std::function<void()>(WorkProgress&)>;
  // The part that was begun last, and the limit that has passed.
  using Late = std::function<void(const std::string& part, std::chrono::milliseconds limit)>;

  BoundedThreads(boost::asio::io_context& context, int max_threads);
  ~BoundedThreads();
  BoundedThreads(const BoundedThreads&) = delete;
  BoundedThreads& operator=(const BoundedThreads&) = delete;
  // Either the answer of `work` or `late` is called, once, never inside this call. False, and
  // neither is, while `max_threads` work or hang.
  bool Run(Limits limits, Work work, Late late);

 private:
  struct Item;
  struct Gate;
  void Watch(int64_t id);
  void Judge(int64_t id);

  boost::asio::io_context& context_;
  const int max_threads_;
  std::map<int64_t, std::unique_ptr<Item>> open_;  // not answered yet
  int64_t last_id_ = 0;
  int running_ = 0;  // threads
  // Threads that hang outlive this: they find the way back only while it is open.
  const std::shared_ptr<Gate> gate_;
};

}  // namespace ravel::daemon
