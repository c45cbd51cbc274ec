#include "common/plan/buffer_index.h"

#include <algorithm>

namespace ravel::plan {

BufferIndex::BufferIndex(const std::vector<ProgramBuffer>& buffers) {
  by_key_.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const ProgramBuffer& buffer = buffers[i];
    by_key_.push_back({{.kind = buffer.kind,
                        .owner = buffer.group >= 0 ? buffer.group : buffer.unit,
                        .call = buffer.call,
                        .slot = buffer.slot},
                       static_cast<int>(i)});
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
