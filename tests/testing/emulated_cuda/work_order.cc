#include "tests/testing/emulated_cuda/work_order.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ravel::kernels::cuda::emulated {
namespace {

// Of a stream; the oldest are forgotten where the host never waits.
constexpr int64_t kMostPending = 1 << 14;

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

uint64_t StreamClock::At(int stream) const {
  for (const Count& count : counts_) {
    if (count.stream >= stream) {
      return count.stream == stream ? count.items : 0;
    }
  }
  return 0;
}

uint64_t& StreamClock::Of(int stream) {
  const auto at = std::find_if(counts_.begin(), counts_.end(), [stream](const Count& count) {
    return count.stream >= stream;
  });
  return at != counts_.end() && at->stream == stream
             ? at->items
             : counts_.insert(at, {.stream = stream, .items = 0})->items;
}

uint64_t StreamClock::Advance(int stream) {
  return ++Of(stream);
}

void StreamClock::Merge(const StreamClock& other) {
  for (const Count& count : other.counts_) {
    uint64_t& known = Of(count.stream);
    known = std::max(known, count.items);
  }
}

void StreamClock::Remove(int stream) {
  std::erase_if(counts_, [stream](const Count& count) { return count.stream == stream; });
}

std::string WorkOrder::Conflict(int stream, const EmulatedWork& work) const {
  const StreamClock& before = ClockOf(stream);
  for (const auto& [other, items] : pending_) {
    if (other == stream) {
      continue;
    }
    const uint64_t known = before.At(other);
    for (auto item = items.rbegin(); item != items.rend() && item->number > known; ++item) {
      for (const Access& access : work.accesses) {
        for (const Access& earlier : item->accesses) {
          if (emulated::Conflict(access, earlier)) {
            return "no event orders stream " + std::to_string(stream) + ", where " + work.name +
                   VerbOf(access) + access.name + ", after stream " + std::to_string(other) +
                   ", where " + item->name + VerbOf(earlier) + earlier.name + " of the same memory";
          }
        }
      }
    }
  }
  return "";
}

void WorkOrder::Add(int stream, const EmulatedWork& work) {
  const uint64_t number = clocks_[stream].Advance(stream);
  std::vector<Item>& items = pending_[stream];
  if (static_cast<int64_t>(items.size()) > kMostPending) {
    items.erase(items.begin(), items.begin() + kMostPending / 2);
  }
  Item item = {.number = number, .name = work.name, .accesses = {}};
  std::copy_if(work.accesses.begin(),
               work.accesses.end(),
               std::back_inserter(item.accesses),
               [](const Access& access) { return !access.empty(); });
  if (!item.accesses.empty()) {
    items.push_back(std::move(item));
  }
}

const StreamClock& WorkOrder::ClockOf(int stream) const {
  static const StreamClock& nothing = *new StreamClock;
  const auto found = clocks_.find(stream);
  return found == clocks_.end() ? nothing : found->second;
}

void WorkOrder::After(int stream, const StreamClock& clock) {
  clocks_[stream].Merge(clock);
}

void WorkOrder::Forget(const StreamClock& clock) {
  for (auto& [stream, items] : pending_) {
    const uint64_t done = clock.At(stream);
    const auto left = std::find_if(
        items.begin(), items.end(), [done](const Item& item) { return item.number > done; });
    items.erase(items.begin(), left);
  }
}

void WorkOrder::Remove(int stream) {
  clocks_.erase(stream);
  pending_.erase(stream);
  for (auto& [other, clock] : clocks_) {
    clock.Remove(stream);
  }
}

bool WorkOrder::IsLast(int stream) const {
  const StreamClock& known = ClockOf(stream);
  return std::all_of(clocks_.begin(), clocks_.end(), [&known](const auto& entry) {
    return entry.second.At(entry.first) <= known.At(entry.first);
  });
}

}  // namespace ravel::kernels::cuda::emulated
