#include "worker/shard/flat_buffer.h"

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/model/tensor_cuts.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

// Which of the equal parts of its outer buffer a buffer is on this rank.
int64_t PartOf(const plan::ShardingPlan& plan,
               const plan::ProgramBuffer& buffer,
               const MeshPlace& place) {
  const plan::ProgramBuffer& outer = plan.buffers[buffer.inside];
  if (outer.bytes == buffer.bytes) {
    return 0;
  }
  if (outer.kind == plan::BufferKind::kGathered) {
    CHECK_EQ(outer.bytes, buffer.bytes * plan.lanes.width());
    return place.inner;
  }
  CHECK_EQ(outer.bytes, buffer.bytes * plan.lanes.replicas);
  return place.outer;
}

}  // namespace

MeshPlace PlaceOf(const plan::Mesh& mesh, int64_t rank) {
  const std::string& inner = plan::InnermostDataAxis(mesh);
  std::vector<std::string> outer;
  for (const plan::MeshAxis& axis : mesh.axes()) {
    if (axis.name != inner && axis.name != plan::kTensorAxis) {
      outer.push_back(axis.name);
    }
  }
  return {.inner = mesh.GroupIndex(rank, {inner}), .outer = mesh.GroupIndex(rank, outer)};
}

ArenaBuffers::ArenaBuffers(const plan::ShardingPlan& plan,
                           comm::Communicator& communicator,
                           std::byte* offload)
    : plan_(plan) {
  CHECK_EQ(plan.buffers.size(), plan.memory.offsets.size());
  const MeshPlace place = PlaceOf(plan.mesh, communicator.rank());
  for (const plan::BufferId i : plan.buffers.ids()) {
    const plan::ProgramBuffer& buffer = plan.buffers[i];
    if (buffer.inside >= 0) {
      CHECK_LT(buffer.inside, i);
      addresses_.push_back(addresses_[buffer.inside] + PartOf(plan, buffer, place) * buffer.bytes);
      continue;
    }
    std::byte* base =
        buffer.memory == plan::MemoryKind::kOffload ? offload : communicator.arena(buffer.memory);
    CHECK_MSG(base != nullptr || buffer.bytes == 0, "the arena lacks a memory kind");
    addresses_.push_back(base + plan.memory.offsets[i]);
  }
}

std::byte* ArenaBuffers::bytes(plan::BufferId buffer) const {
  return buffer < 0 ? nullptr : addresses_[buffer];
}

float* ArenaBuffers::floats(plan::BufferId buffer) const {
  return reinterpret_cast<float*>(bytes(buffer));
}

int64_t ArenaBuffers::elements(plan::BufferId buffer) const {
  return buffer < 0 ? 0 : plan_.buffers[buffer].elements();
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

TensorView GroupView(const plan::ModelInventory& inventory,
                     const plan::GroupLayout& group,
                     plan::TensorId tensor,
                     int64_t coordinate,
                     const GroupBuffer& buffer) {
  const auto found = std::find(group.tensors.begin(), group.tensors.end(), tensor);
  CHECK_MSG(found != group.tensors.end(), "a tensor outside its group");
  const int64_t offset = At(group.tensor_offsets, found - group.tensors.begin());
  const Shape shape = plan::RankShape(inventory.tensors[tensor], coordinate);
  CHECK(shape.size() == 1 || shape.size() == 2);
  TensorView view = shape.size() == 1
                        ? VectorView(nullptr, shape[0])
                        : MatrixView(nullptr, shape[0], DivExact(shape[1], buffer.codes_per_byte));
  view.dtype = buffer.dtype;
  view.data = ElementAt(buffer.base, DivExact(offset, buffer.codes_per_byte), buffer.dtype);
  return view;
}

}  // namespace ravel::shard
