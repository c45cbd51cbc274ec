#include "worker/shard/bound_bytes.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/dtype.h"
#include "common/plan/program/buffer_index.h"

namespace ravel::shard {
namespace {

using plan::BufferKind;

// Of weights and gradients: what transfers, sums and updates of the group touch.
int64_t GroupElements(const plan::ShardingPlan& plan,
                      const plan::ProgramBuffer& buffer,
                      const ParameterGroup& group) {
  const int64_t slice = group.slice_elements();
  const int64_t whole = group.layout().layout.total_elements();
  switch (buffer.kind) {
    case BufferKind::kModelWeight:
      return CutAxes(plan.roles[buffer.group].stored).empty() ? whole : slice;
    case BufferKind::kMainWeight:
    case BufferKind::kExpAvg:
    case BufferKind::kExpAvgSq:
      return group.shard_elements();
    case BufferKind::kMainGrad:
    case BufferKind::kOuterReceive:
      return slice;
    case BufferKind::kOuterGrad:
      return DivExact(slice, plan.lanes.replicas);
    case BufferKind::kGathered:
    case BufferKind::kLocalGrad:
    case BufferKind::kFullGrad:
    case BufferKind::kStaging:
    case BufferKind::kReceive:
      return whole;
    default:
      break;
  }
  CheckFailed(__FILE__, __LINE__, "buffer kind", "of no group");
}

class Extents {
 public:
  explicit Extents(const BoundBytesArgs& args) : args_(args), ends_(args.plan.buffers.size(), 0) {}

  void AddViews(plan::BufferId buffer, const std::vector<TensorView>& views) {
    for (const TensorView& view : views) {
      if (buffer < 0 || !view.present()) {
        continue;
      }
      const int64_t elements =
          view.rank == 0 ? 1 : (view.rows() - 1) * view.row_stride + view.columns();
      const int64_t end = static_cast<std::byte*>(view.data) - args_.buffers.bytes(buffer) +
                          elements * DTypeBytes(view.dtype);
      ends_[buffer] = std::max(ends_[buffer], end);
    }
  }

  plan::IdVector<plan::BufferId, int64_t> Take() {
    for (const plan::BufferId i : ends_.ids()) {
      const plan::ProgramBuffer& buffer = args_.plan.buffers[i];
      if (buffer.group >= 0) {
        const ParameterGroup& group = args_.groups[buffer.group];
        ends_[i] = GroupElements(args_.plan, buffer, group) * DTypeBytes(buffer.dtype);
      }
    }
    return std::move(ends_);
  }

 private:
  const BoundBytesArgs& args_;
  plan::IdVector<plan::BufferId, int64_t> ends_;
};

}  // namespace

plan::IdVector<plan::BufferId, int64_t> BoundBytes(const BoundBytesArgs& args) {
  Extents extents(args);
  const plan::BufferId shared = plan::FindBuffer(args.plan.buffers, {.kind = BufferKind::kShared});
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
