#pragma once

// Which work comes after which, by streams and events alone, and what of it touches the same
// memory: a missing event is found when work is issued, whatever the timing.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/testing/emulated_cuda/emulated_memory.h"

namespace ravel::kernels::cuda::emulated {

struct EmulatedWork {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
  bool any_device = false;  // memory of other devices, too
  bool of_copies = false;   // a copy, or work of the host: has a pace of its own
  // In place of `run`: makes it whenever the work is given to a queue, in the order of the queues.
  std::function<std::function<void()>()> prepare = nullptr;
  bool of_peers = false;  // ends only when other ranks have come
};

// By stream number: its items 1 to n are done. Few streams live at a time.
class StreamClock {
 public:
  uint64_t At(int stream) const;
  uint64_t Advance(int stream);  // the number of its next item
  // Takes the larger number of each stream.
  void Merge(const StreamClock& other);
  void Remove(int stream);

 private:
  struct Count {
    int stream = 0;
    uint64_t items = 0;
  };
  uint64_t& Of(int stream);

  std::vector<Count> counts_;  // by stream, ascending
};

// Thread-compatible.
class WorkOrder {
 public:
  // The conflict of the stream's next work with work of another stream that it does not come
  // after; empty where there is none.
  std::string Conflict(int stream, const EmulatedWork& work) const;
  void Add(int stream, const EmulatedWork& work);
  // What comes before the stream's next work.
  const StreamClock& ClockOf(int stream) const;
  // The stream's next work comes after all that is in `clock`.
  void After(int stream, const StreamClock& clock);
  // The host has seen all of `clock` done, so whatever is issued from now on comes after it.
  void Forget(const StreamClock& clock);
  // All work of a stream is done and forgotten, and there will be no more.
  void Remove(int stream);
  // Whether the stream's next work comes after all work of all streams.
  bool IsLast(int stream) const;

 private:
  struct Item {
    uint64_t number;
    std::string name;
    std::vector<Access> accesses;
  };
  std::map<int, StreamClock> clocks_;
  std::map<int, std::vector<Item>> pending_;  // in the order of numbers
};

}  // namespace ravel::kernels::cuda::emulated
