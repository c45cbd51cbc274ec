#include "common/plan/buffer_index.h"

#include <algorithm>

namespace ravel::plan {

namespace {

BufferIndex::Key KeyOf(const ProgramBuffer& buffer) {
  return {.kind = buffer.kind,
          .owner = buffer.group >= 0 ? buffer.group : buffer.unit,
          .call = buffer.call,
          .slot = buffer.slot};
}

}  // namespace

int FindBuffer(const std::vector<ProgramBuffer>& buffers, const BufferIndex::Key& key) {
  const auto found = std::find_if(
      buffers.begin(), buffers.end(), [&](const auto& buffer) { return KeyOf(buffer) == key; });
  return found == buffers.end() ? -1 : static_cast<int>(found - buffers.begin());
}

BufferIndex::BufferIndex(const std::vector<ProgramBuffer>& buffers) {
  by_key_.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    by_key_.push_back({KeyOf(buffers[i]), static_cast<int>(i)});
  }
  std::sort(by_key_.begin(), by_key_.end());
}

int BufferIndex::Find(const Key& key) const {
  const auto found = std::lower_bound(by_key_.begin(), by_key_.end(), std::make_pair(key, -1));
  return found != by_key_.end() && found->first == key ? found->second : -1;
}

std::vector<int> BufferIndex::OfCall(BufferKind kind, int owner, int call) const {
  std::vector<int> found;
  const Key first = {.kind = kind, .owner = owner, .call = call, .slot = 0};
  for (auto at = std::lower_bound(by_key_.begin(), by_key_.end(), std::make_pair(first, -1));
       at != by_key_.end() && at->first.kind == kind && at->first.owner == owner &&
       at->first.call == call;
       ++at) {
    found.push_back(at->second);
  }
  return found;
}

}  // namespace ravel::plan
