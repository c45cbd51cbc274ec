#include "worker/daemon/backlog_proto.h"

#include <algorithm>
#include <utility>

namespace ravel::daemon {

Backlog::Lane Backlog::LaneOf(const v1::Up& message) {
  if (message.has_exited() || message.has_drain()) {
    return kEssential;
  }
  if (message.has_log()) {
    return kReport;
  }
  if (!message.has_trainer()) {
    return kOther;
  }
  const v1::TrainerUp& frame = message.trainer().frame();
  if (frame.has_step() || frame.has_progress()) {
    return kReport;
  }
  return frame.has_seal() ? kEssential : kOther;
}

void Backlog::Add(v1::Up message, int64_t beats_before) {
  const Lane lane = LaneOf(message);
  const size_t bytes = message.ByteSizeLong();
  lanes_[lane].push_back({std::move(message), ++serial_, beats_before, bytes});
  bytes_ += bytes;
  for (const Lane droppable : {kReport, kOther}) {
    while (bytes_ > max_bytes_ && !lanes_[droppable].empty()) {
      DropFront(lanes_[droppable]);
      ++dropped_;
    }
  }
}

void Backlog::DropFront(std::deque<Item>& lane) {
  bytes_ -= lane.front().bytes;
  lane.pop_front();
}

void Backlog::Acknowledge(int64_t seq) {
  for (std::deque<Item>& lane : lanes_) {
    while (!lane.empty() && lane.front().beats_before < seq) {
      DropFront(lane);
    }
  }
}

void Backlog::ForEach(const std::function<void(const v1::Up&)>& visit) const {
  std::array<size_t, kLanes> next = {};
  while (true) {
    size_t first = kLanes;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const bool any = next[lane] < lanes_[lane].size();
      if (any && (first == kLanes ||
                  lanes_[lane][next[lane]].serial < lanes_[first][next[first]].serial)) {
        first = lane;
      }
    }
    if (first == kLanes) {
      return;
    }
    visit(lanes_[first][next[first]].message);
    ++next[first];
  }
}

void Backlog::Resend(int64_t beats_before, const std::function<void(const v1::Up&)>& send) {
  for (std::deque<Item>& lane : lanes_) {
    for (Item& item : lane) {
      item.beats_before = beats_before;
    }
  }
  ForEach(send);
}

bool Backlog::empty() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane.empty(); });
}

int64_t Backlog::TakeDropped() {
  return std::exchange(dropped_, 0);
}

}  // namespace ravel::daemon
