#include "worker/shard/bound_bytes.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/dtype.h"

namespace ravel::shard {
namespace {

using plan::BufferKind;

// Of weights and gradients: what transfers, sums and updates of the group touch.
int64_t GroupBytes(const plan::ShardingPlan& plan,
                   const plan::ProgramBuffer& buffer,
                   const ParameterGroup& group) {
  const int64_t weight_bytes = plan.options.weight_element_bytes;
  const int64_t slice = group.slice_elements();
  const int64_t whole = group.layout().layout.total_elements();
  switch (buffer.kind) {
    case BufferKind::kGathered:
      return whole * weight_bytes;
    case BufferKind::kModelWeight:
      return (group.rules().optimizer_sharded ? slice : whole) * weight_bytes;
    case BufferKind::kMainWeight:
      return group.shard_elements() * plan.options.main_element_bytes;
    case BufferKind::kExpAvg:
    case BufferKind::kExpAvgSq:
      return group.shard_elements() * plan.options.state_element_bytes;
    case BufferKind::kMainGrad:
      return slice * comm::kElementBytes;
    case BufferKind::kOuterGrad:
      return DivExact(slice, plan.lanes.replicas) * comm::kElementBytes;
    case BufferKind::kOuterReceive:
      return slice * comm::kElementBytes;
    case BufferKind::kLocalGrad:
    case BufferKind::kFullGrad:
    case BufferKind::kStaging:
    case BufferKind::kReceive:
      return whole * comm::kElementBytes;
    default:
      break;
  }
  CheckFailed(__FILE__, __LINE__, "buffer kind", "of no group");
}

class Extents {
 public:
  explicit Extents(const BoundBytesArgs& args) : args_(args), ends_(args.plan.buffers.size(), 0) {}

  void AddViews(int buffer, const std::vector<TensorView>& views) {
    for (const TensorView& view : views) {
      if (buffer < 0 || !view.present()) {
        continue;
      }
      const int64_t elements =
          view.rank == 0 ? 1 : (view.rows() - 1) * view.row_stride + view.columns();
      const int64_t end = static_cast<std::byte*>(view.data) - args_.buffers.bytes(buffer) +
                          elements * DTypeBytes(view.dtype);
      ends_[static_cast<size_t>(buffer)] = std::max(ends_[static_cast<size_t>(buffer)], end);
    }
  }

  std::vector<int64_t> Take() {
    for (size_t i = 0; i < ends_.size(); ++i) {
      const plan::ProgramBuffer& buffer = args_.plan.buffers[i];
      if (buffer.group >= 0) {
        ends_[i] = GroupBytes(args_.plan, buffer, args_.groups[static_cast<size_t>(buffer.group)]);
      }
    }
    return std::move(ends_);
  }

 private:
  const BoundBytesArgs& args_;
  std::vector<int64_t> ends_;
};

}  // namespace

std::vector<int64_t> BoundBytes(const BoundBytesArgs& args) {
  Extents extents(args);
  const int shared = args.buffers.Find({.kind = BufferKind::kShared});
  for (const BoundProgram& program : args.programs) {
    for (const BoundInstruction& bound : program.instructions) {
      extents.AddViews(plan::BufferOf(bound.instruction, plan::Role::kSaved), bound.memory.saved);
      extents.AddViews(plan::BufferOf(bound.instruction, plan::Role::kRemade), bound.memory.remade);
      extents.AddViews(plan::BufferOf(bound.instruction, plan::Role::kScratch),
                       bound.memory.workspace);
      extents.AddViews(shared, bound.memory.shared);
    }
  }
  return extents.Take();
}

}  // namespace ravel::shard
