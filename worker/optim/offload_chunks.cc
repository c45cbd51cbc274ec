#include "worker/optim/offload_chunks.h"

#include <algorithm>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::optim {
namespace {

int64_t EndOf(const kernels::UpdatePiece& piece) {
  return piece.offset + piece.elements;
}

// Scales of a block (kernels::CutForBlocks): of whole rows, or of a part of one.
int64_t ScalesOf(const kernels::UpdatePiece& piece) {
  return piece.row == 0
             ? 0
             : DivCeil(piece.elements, piece.row) * DivCeil(piece.row, kernels::kUpdateGroup);
}

}  // namespace

std::vector<plan::GroupId> UpdateOrder(const plan::ShardingPlan& plan) {
  const plan::StepSlot last = plan::SlotOf(plan.lanes, plan.lanes.programs() - 1);
  std::vector<plan::GroupId> order;
  for (const plan::Instruction& at : plan.program(last.phase, last.part).instructions) {
    if (at.op == plan::OpCode::kOptimizerStep) {
      order.push_back(at.group);
    }
  }
  return order;
}

bool IsOffloaded(const plan::ShardingPlan& plan, plan::GroupId group) {
  return std::any_of(
      plan.buffers.begin(), plan.buffers.end(), [&](const plan::ProgramBuffer& buffer) {
        return buffer.group == group && buffer.memory == plan::MemoryKind::kOffload;
      });
}

std::vector<OffloadChunk> CutIntoChunks(plan::GroupId group,
                                        const kernels::PieceTable& pieces,
                                        int64_t chunk_elements) {
  CHECK_GT(chunk_elements, 0);
  std::vector<OffloadChunk> chunks;
  for (const kernels::UpdatePiece& block :
       kernels::CutForBlocks({pieces.pieces, pieces.pieces + pieces.count})) {
    const bool fits = !chunks.empty() && EndOf(block) - chunks.back().begin <= chunk_elements;
    if (!fits) {
      chunks.push_back({.group = group, .begin = block.offset, .end = 0, .pieces = {}});
    }
    chunks.back().pieces.push_back(block);
    chunks.back().end = EndOf(block);
  }
  return chunks;
}

std::vector<std::span<std::byte>> MemoryOf(const shard::ParameterGroup& group,
                                           const OffloadChunk& chunk,
                                           const std::function<bool(const void*)>& holds) {
  const kernels::UpdatePiece& first = chunk.pieces.front();
  const kernels::UpdatePiece& last = chunk.pieces.back();
  const shard::ParameterGroup::Stored stored = group.StoredAt(chunk.begin, chunk.elements());
  std::vector<std::span<std::byte>> memory;
  const auto add = [&](const TensorView& view, int64_t begin, int64_t elements) {
    const int64_t bytes = DTypeBytes(view.dtype);
    auto* at = static_cast<std::byte*>(view.data) + begin * bytes;
    if (view.present() && holds(at) && elements > 0) {
      memory.push_back({at, Size(elements * bytes)});
    }
  };
  add(stored.main_weight, 0, stored.main_weight.elements());
  add(stored.remainder, 0, stored.remainder.elements());
  for (const TensorView& state : stored.states) {
    add(state, 0, state.elements());
  }
  for (const TensorView& scales : stored.scales) {
    add(scales, first.first_scale, last.first_scale + ScalesOf(last) - first.first_scale);
  }
  return memory;
}

}  // namespace ravel::optim
