#pragma once

// Messages to the coordinator that it has not acknowledged: sent again on the next stream, in
// order, and bounded in bytes while there is none.

#include <array>
#include <cstdint>
#include <deque>
#include <functional>

#include "proto/fleet.pb.h"

namespace ravel::daemon {

// Used only from one thread. Adding and dropping cost the same however much is kept.
class Backlog {
 public:
  explicit Backlog(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Beyond the limit the oldest step reports go (metrics may have gaps), then the oldest of what
  // the coordinator can ask for again. Seals, failed saves, ends of trainers and drain notices
  // never do: a node has few of them.
  void Add(v1::Up message, int64_t beats_before);
  // Everything that was sent before beat `seq` has arrived.
  void Acknowledge(int64_t seq);
  // In the order of Add.
  void ForEach(const std::function<void(const v1::Up&)>& visit) const;
  // All of it is sent now, after beat `beats_before`.
  void Resend(int64_t beats_before, const std::function<void(const v1::Up&)>& send);

  bool empty() const;
  size_t bytes() const { return bytes_; }
  // Dropped since the last call of this.
  int64_t TakeDropped();
  int64_t dropped() const { return dropped_; }

 private:
  enum Lane : size_t { kReport, kOther, kEssential, kLanes };
  struct Item {
    v1::Up message;
    int64_t serial = 0;        // of Add
    int64_t beats_before = 0;  // number of the last beat sent before it
    size_t bytes = 0;
  };
  static Lane LaneOf(const v1::Up& message);
  void DropFront(std::deque<Item>& lane);

  const size_t max_bytes_;
  std::array<std::deque<Item>, kLanes> lanes_;
  int64_t serial_ = 0;
  size_t bytes_ = 0;
  int64_t dropped_ = 0;
};

}  // namespace ravel::daemon
