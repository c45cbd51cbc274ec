#pragma once

// Streams between daemons and coordinator. Within a stream the order holds until it breaks; what
// was written to a stream that then breaks may be lost, also when the daemon is back at once, and
// what an old stream still carries may arrive after the new stream's first words.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <variant>

#include "coordinator/fleet/fleet_messages.h"
#include "tests/coordinator/simulation/events.h"

namespace ravel::coordinator::simulation {

class Network {
 public:
  using Up = std::variant<HelloMessage, UpMessage>;
  struct Ends {
    std::function<void(StreamId, const Up&)> up;             // at the coordinator
    std::function<void(StreamId)> closed_above;              // at the coordinator
    std::function<void(StreamId, const DownMessage&)> down;  // at the daemon
    std::function<void(StreamId)> closed_below;              // at the daemon
  };
  Network(Events& events, Random& random, Ends ends);

  // Opened by the daemon of `node`, towards the coordinator that runs now; without one it is closed
  // again soon.
  StreamId Open(const std::string& node, bool coordinator_is_here);
  void SendUp(StreamId stream, Up message);
  void SendDown(StreamId stream, DownMessage message);
  // By the coordinator, after what was sent.
  void CloseFromAbove(StreamId stream);
  // By the daemon, which hears nothing of the stream any more.
  void CloseFromBelow(StreamId stream);

  // Faults.
  void Break(StreamId stream, int64_t noticed_above_after_us);
  void SwallowUp(StreamId stream);
  void SwallowDown(StreamId stream);
  void Partition(const std::string& node, bool up, bool down, int64_t for_us);
  // The coordinator's process is gone: it hears nothing more of any stream.
  void LoseCoordinator();
  void Heal();  // all that is partitioned or swallowed; such streams break
  void set_repeats(bool repeats) { repeats_ = repeats; }
  void set_latency(int64_t most_us) { most_latency_us_ = most_us; }

 private:
  struct End {};  // of the stream
  struct Stream {
    std::string node;
    bool open_below = true;
    bool open_above = true;
    bool swallows_up = false;
    bool swallows_down = false;
    int64_t up_until_us = INT64_MAX;  // what arrives later is lost
    int64_t up_ready_us = 0;          // of the newest message
    int64_t down_ready_us = 0;
    std::deque<std::pair<int64_t, Up>> up;
    std::deque<std::pair<int64_t, std::variant<DownMessage, End>>> down;
  };
  struct Blocked {
    int64_t up_until_us = 0;
    int64_t down_until_us = 0;
  };

  int64_t Latency();
  void PumpUp(StreamId id);
  void PumpDown(StreamId id);
  void NoticeBelow(StreamId id, int64_t after_us);
  void NoticeAbove(StreamId id, int64_t after_us);
  void Forget(StreamId id);
  Stream* Find(StreamId id);

  Events& events_;
  Random& random_;
  const Ends ends_;
  std::map<StreamId, Stream> streams_;
  std::map<std::string, Blocked> blocked_;
  StreamId last_ = 0;
  int64_t most_latency_us_ = 2000;
  bool repeats_ = false;
};

}  // namespace ravel::coordinator::simulation
