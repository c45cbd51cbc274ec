#include "common/plan/program/buffer_index.h"

#include <algorithm>

namespace ravel::plan {

namespace {

BufferIndex::Key KeyOf(const ProgramBuffer& buffer) {
  return {.kind = buffer.kind,
          .owner = buffer.group >= 0 ? BufferIndex::Owner(buffer.group) : buffer.unit,
          .call = buffer.call,
          .slot = buffer.slot};
}

}  // namespace

BufferId FindBuffer(const ProgramBuffers& buffers, const BufferIndex::Key& key) {
  const auto found = std::find_if(
      buffers.begin(), buffers.end(), [&](const auto& buffer) { return KeyOf(buffer) == key; });
  return found == buffers.end() ? BufferId() : static_cast<int>(found - buffers.begin());
}

BufferIndex::BufferIndex(const ProgramBuffers& buffers) {
  by_key_.reserve(buffers.size());
  for (const BufferId id : buffers.ids()) {
    by_key_.push_back({KeyOf(buffers[id]), id});
  }
  std::sort(by_key_.begin(), by_key_.end());
}

BufferId BufferIndex::Find(const Key& key) const {
  const auto found =
      std::lower_bound(by_key_.begin(), by_key_.end(), std::make_pair(key, BufferId()));
  return found != by_key_.end() && found->first == key ? found->second : BufferId();
}

std::vector<BufferId> BufferIndex::OfCall(BufferKind kind, Owner owner, int call) const {
  std::vector<BufferId> found;
  const Key first = {.kind = kind, .owner = owner, .call = call, .slot = 0};
  for (auto at =
           std::lower_bound(by_key_.begin(), by_key_.end(), std::make_pair(first, BufferId()));
       at != by_key_.end() && at->first.kind == kind && at->first.owner == owner &&
       at->first.call == call;
       ++at) {
    found.push_back(at->second);
  }
  return found;
}

}  // namespace ravel::plan
