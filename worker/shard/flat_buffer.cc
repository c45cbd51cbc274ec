#include "worker/shard/flat_buffer.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::shard {

ArenaBuffers::ArenaBuffers(const plan::ShardingPlan& plan, comm::Communicator& communicator)
    : plan_(plan) {
  CHECK_EQ(plan.buffers.size(), plan.memory.offsets.size());
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const plan::ProgramBuffer& buffer = plan.buffers[i];
    if (buffer.inside >= 0) {  // this rank's slice of the weights that all ranks of the host share
      const auto whole = static_cast<size_t>(buffer.inside);
      CHECK_LT(whole, i);
      addresses_.push_back(addresses_[whole] + communicator.rank() * buffer.bytes);
      continue;
    }
    std::byte* base = communicator.arena(buffer.memory);
    CHECK_MSG(base != nullptr || buffer.bytes == 0, "the arena lacks a memory kind");
    addresses_.push_back(base + plan.memory.offsets[i]);
  }
}

std::byte* ArenaBuffers::bytes(int buffer) const {
  return buffer < 0 ? nullptr : addresses_[static_cast<size_t>(buffer)];
}

float* ArenaBuffers::floats(int buffer) const {
  return reinterpret_cast<float*>(bytes(buffer));
}

int ArenaBuffers::Find(const Key& key) const {
  int found = -1;
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    const plan::ProgramBuffer& buffer = plan_.buffers[i];
    if (buffer.kind == key.kind && buffer.unit == key.unit && buffer.call == key.call &&
        buffer.slot == key.slot) {
      CHECK_MSG(found < 0, "two buffers of one role");
      found = static_cast<int>(i);
    }
  }
  return found;
}

std::vector<TensorView> ActivationViews(const std::vector<plan::ActivationSpec>& specs,
                                        std::byte* base) {
  const std::vector<int64_t> offsets = plan::ActivationOffsets(specs);
  std::vector<TensorView> views;
  for (size_t i = 0; i < specs.size(); ++i) {
    const Shape& shape = specs[i].shape;
    CHECK(base != nullptr && !shape.empty() && shape.size() <= TensorView::kMaxRank);
    TensorView view = {.data = base + offsets[i],
                       .dtype = specs[i].dtype,
                       .rank = static_cast<int>(shape.size()),
                       .size = {},
                       .row_stride = RowElements(shape)};
    std::copy(shape.begin(), shape.end(), view.size.begin());
    views.push_back(view);
  }
  return views;
}

std::vector<TensorView> GroupViews(const plan::ModelInventory& inventory,
                                   const plan::GroupLayout& group,
                                   const std::vector<int>& tensors,
                                   float* base) {
  std::vector<TensorView> views;
  for (const int tensor : tensors) {
    const auto found = std::find(group.tensors.begin(), group.tensors.end(), tensor);
    CHECK_MSG(found != group.tensors.end() && base != nullptr, "a tensor outside its group");
    const int64_t offset = group.tensor_offsets[static_cast<size_t>(found - group.tensors.begin())];
    const Shape& shape = inventory.tensors[static_cast<size_t>(tensor)].shape;
    CHECK(shape.size() == 1 || shape.size() == 2);
    views.push_back(shape.size() == 1 ? VectorView(base + offset, shape[0])
                                      : MatrixView(base + offset, shape[0], shape[1]));
  }
  return views;
}

}  // namespace ravel::shard
