#pragma once

// Streams, events and graphs of emulated devices. A stream is an ordered queue with a thread of its
// own; nothing but events orders two streams, and random delays let them drift apart.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "kernels/cpu_queue.h"
#include "tests/testing/emulated_cuda/emulated_memory.h"
#include "tests/testing/emulated_cuda/work_order.h"

namespace ravel::kernels::cuda::emulated {

// A recorded list of work, in the order in which it was issued.
struct Graph {
  std::vector<EmulatedWork> work;
};

// Work under recording: of the stream that began it and of those that an event brought in.
struct Capture {
  int origin = 0;
  std::thread::id thread;
  bool invalid = false;
  std::vector<EmulatedWork> work;
  WorkOrder order;
};

// One recording of an event: a point in a stream, and when it was reached.
struct Recording {
  StreamClock clock;
  CpuEvent reached;
  std::atomic<int64_t> time_ns = 0;
  std::shared_ptr<Capture> capture;  // shared with its streams; null: not of a capture
};

struct Event {
  bool timed = false;
  std::shared_ptr<Recording> recording;  // shared with the work that waits; null: never recorded
};

struct EmulatedStream {
  int number = 0;
  int32_t device = 0;
  uint64_t issued = 0;
  std::shared_ptr<const CpuEvent> last_done;  // of what was issued last, shared with the queue
  std::shared_ptr<Capture> capture;           // shared by the streams of one capture
  std::unique_ptr<CpuQueue> queue;
};

// All streams, events and graphs of the process. Functions return 0 or an error of
// emulated_errors.h. Thread-safe.
class EmulatedStreams {
 public:
  // Least times of work, in which other streams go on.
  struct Pace {
    std::chrono::microseconds kernels;
    std::chrono::microseconds copies;  // and work of the host
  };
  // With a seed that is not 0 items are delayed at random.
  EmulatedStreams(const EmulatedMemory& memory, uint64_t delay_seed, const Pace& pace)
      : memory_(memory), delay_seed_(delay_seed), pace_(pace) {}

  void* CreateStream(int32_t device);
  int32_t DestroyStream(void* stream);
  // The device of a stream; -1 for what is none.
  int32_t DeviceOf(void* stream);
  int32_t Issue(void* stream, EmulatedWork work);
  int32_t StreamDone(void* stream, int32_t* done);
  int32_t Synchronize(void* stream);
  // All work of a device's streams. Refused where the thread captures.
  int32_t SynchronizeDevice(int32_t device);
  // kCaptureUnsupported, and the capture is lost, where the thread captures.
  int32_t RefuseInCapture();
  // The first work of peers that this thread issued and that no event or wait has told the host is
  // done, by name; empty where there is none. Whoever waits for the device waits for peers then.
  std::string WaitsForPeers();
  // Work of peers has been ended.
  void ForgetPeers();

  void* CreateEvent(bool timed);
  int32_t DestroyEvent(void* event);
  int32_t Record(void* event, void* stream);
  int32_t Wait(void* stream, void* event);
  int32_t EventDone(void* event, int32_t* done);
  int32_t EventSynchronize(void* event);
  int32_t Elapsed(void* begin, void* end, float* milliseconds);

  int32_t BeginCapture(void* stream);
  int32_t EndCapture(void* stream, void** graph);
  int32_t LaunchGraph(void* graph, void* stream);
  int32_t DestroyGraph(void* graph);
  bool IsCapturing(void* stream);

 private:
  EmulatedStream* Find(void* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Event* FindEvent(void* event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int32_t Check(const EmulatedStream& stream, const WorkOrder& order, const EmulatedWork& work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the queue an item; `done` is set after it.
  void Enqueue(EmulatedStream& stream,
               std::function<void()> run,
               std::shared_ptr<CpuEvent> done,
               std::vector<std::shared_ptr<const CpuEvent>> waits = {})
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnqueueWork(EmulatedStream& stream, const EmulatedWork& work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int32_t WaitInCapture(EmulatedStream& stream, const Recording& recording)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const StreamClock& clock);

  struct PeerWork {
    std::thread::id thread;
    int stream = 0;
    uint64_t number = 0;  // of the stream's items
    std::string name;
  };

  const EmulatedMemory& memory_;
  const uint64_t delay_seed_;
  const Pace pace_;
  Mutex mutex_;
  int last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  WorkOrder order_ ABSL_GUARDED_BY(mutex_);
  std::map<void*, std::unique_ptr<EmulatedStream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<void*, std::unique_ptr<Event>> events_ ABSL_GUARDED_BY(mutex_);
  std::map<void*, std::unique_ptr<Graph>> graphs_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Capture>> captures_ ABSL_GUARDED_BY(mutex_);  // under way
  std::vector<PeerWork> of_peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::kernels::cuda::emulated
