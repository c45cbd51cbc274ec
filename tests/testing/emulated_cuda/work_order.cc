#include "tests/testing/emulated_cuda/work_order.h"

#include <algorithm>

namespace ravel::kernels::cuda::emulated {
namespace {

// Of a stream; the oldest are forgotten where the host never waits.
constexpr int64_t kMostPending = 1 << 14;

uint64_t At(const StreamClock& clock, int stream) {
  const auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

void Merge(const StreamClock& from, StreamClock& to) {
  for (const auto& [stream, count] : from) {
    uint64_t& known = to[stream];
    known = std::max(known, count);
  }
}

const char* VerbOf(const Access& access) {
  switch (access.kind) {
    case Access::Kind::kRead:
      return " reads ";
    case Access::Kind::kWrite:
      return " writes ";
    default:
      return " changes ";
  }
}

}  // namespace

std::string WorkOrder::Conflict(int stream, const EmulatedWork& work) const {
  const StreamClock before = ClockOf(stream);
  for (const auto& [other, items] : pending_) {
    if (other == stream) {
      continue;
    }
    const uint64_t known = At(before, other);
    for (auto item = items.rbegin(); item != items.rend() && item->number > known; ++item) {
      for (const Access& access : work.accesses) {
        if (emulated::Conflict(access, item->access)) {
          return "no event orders stream " + std::to_string(stream) + ", where " + work.name +
                 VerbOf(access) + access.name + ", after stream " + std::to_string(other) +
                 ", where " + item->name + VerbOf(item->access) + item->access.name +
                 " of the same memory";
        }
      }
    }
  }
  return "";
}

void WorkOrder::Add(int stream, const EmulatedWork& work) {
  const uint64_t number = ++clocks_[stream][stream];
  std::vector<Item>& items = pending_[stream];
  if (static_cast<int64_t>(items.size()) > kMostPending) {
    items.erase(items.begin(), items.begin() + kMostPending / 2);
  }
  for (const Access& access : work.accesses) {
    if (!access.empty()) {
      items.push_back({number, work.name, access});
    }
  }
}

StreamClock WorkOrder::ClockOf(int stream) const {
  const auto found = clocks_.find(stream);
  return found == clocks_.end() ? StreamClock() : found->second;
}

void WorkOrder::After(int stream, const StreamClock& clock) {
  Merge(clock, clocks_[stream]);
}

void WorkOrder::Forget(const StreamClock& clock) {
  for (auto& [stream, items] : pending_) {
    const uint64_t done = At(clock, stream);
    const auto left = std::find_if(
        items.begin(), items.end(), [done](const Item& item) { return item.number > done; });
    items.erase(items.begin(), left);
  }
}

bool WorkOrder::IsLast(int stream) const {
  const StreamClock known = ClockOf(stream);
  return std::all_of(clocks_.begin(), clocks_.end(), [&known](const auto& entry) {
    return At(entry.second, entry.first) <= At(known, entry.first);
  });
}

}  // namespace ravel::kernels::cuda::emulated
