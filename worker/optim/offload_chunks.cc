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

// The part of a piece before `offset`, which is taken from it.
kernels::UpdatePiece TakeUntil(int64_t offset, kernels::UpdatePiece& piece) {
  kernels::UpdatePiece part = piece;
  part.elements = offset - piece.offset;
  piece.offset = offset;
  piece.elements -= part.elements;
  piece.first_index += part.elements;
  if (piece.row > 0) {
    piece.first_scale +=
        DivExact(part.elements, piece.row) * DivCeil(piece.row, kernels::kUpdateGroup);
  }
  return part;
}

std::vector<kernels::UpdatePiece> CutAt(const kernels::PieceTable& pieces,
                                        std::span<const int64_t> cuts) {
  std::vector<kernels::UpdatePiece> parts;
  for (int64_t i = 0; i < pieces.count; ++i) {
    kernels::UpdatePiece rest = pieces.pieces[i];
    for (auto cut = std::upper_bound(cuts.begin(), cuts.end(), rest.offset);
         cut != cuts.end() && *cut < EndOf(rest);
         ++cut) {
      parts.push_back(TakeUntil(*cut, rest));
    }
    parts.push_back(rest);
  }
  return parts;
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

ScaleCuts ScaleCutsOf(const shard::ParameterGroup& group) {
  ScaleCuts cuts;
  if (!plan::EncodesInUpdate(group.recipe())) {
    return cuts;
  }
  for (const quant::QuantPiece& piece : group.quant_pieces()) {
    const int64_t begin = piece.main_weight.As<float>() - group.main_weight();
    const int64_t rows = piece.main_weight.rows();
    const int64_t columns = piece.main_weight.columns();
    // Any rows do without blocks: not so few that they make pieces shorter.
    const int64_t block = plan::BlockEdge(group.recipe());
    const int64_t step =
        block > 0 ? block : DivCeil(kernels::kMaxBlockElements, std::max<int64_t>(1, columns));
    for (int64_t row = 0; row < rows;) {
      const int64_t next = std::min(rows, row + step - (piece.first_row + row) % step);
      cuts.offsets.push_back(begin + row * columns);
      cuts.widest = std::max(cuts.widest, (next - row) * columns);
      row = next;
    }
    cuts.offsets.push_back(begin + piece.main_weight.elements());
  }
  std::sort(cuts.offsets.begin(), cuts.offsets.end());
  cuts.offsets.erase(std::unique(cuts.offsets.begin(), cuts.offsets.end()), cuts.offsets.end());
  return cuts;
}

std::vector<OffloadChunk> CutIntoChunks(plan::GroupId group,
                                        const kernels::PieceTable& pieces,
                                        int64_t chunk_elements,
                                        std::span<const int64_t> cuts) {
  CHECK_GT(chunk_elements, 0);
  std::vector<OffloadChunk> chunks;
  for (const kernels::UpdatePiece& block : kernels::CutForBlocks(CutAt(pieces, cuts))) {
    // A block that begins where a cut is takes all up to the next one with it.
    const auto cut = std::lower_bound(cuts.begin(), cuts.end(), block.offset);
    const bool begins = cut != cuts.end() && *cut == block.offset && cut + 1 != cuts.end();
    const int64_t end = begins ? std::max(cut[1], EndOf(block)) : EndOf(block);
    const bool fits = !chunks.empty() && end - chunks.back().begin <= chunk_elements;
    if (!fits) {
      chunks.push_back({.group = group, .begin = block.offset, .end = 0, .pieces = {}});
    }
    chunks.back().pieces.push_back(block);
    chunks.back().end = EndOf(block);
  }
  return chunks;
}

std::vector<OffloadChunk> CutForCaches(const shard::ParameterGroup& group,
                                       const kernels::PieceTable& pieces,
                                       int64_t most) {
  constexpr int64_t kLeast = int64_t{64} << 10;
  const ScaleCuts cuts = ScaleCutsOf(group);
  const int64_t elements = cuts.widest <= most ? std::max(kLeast, cuts.widest) : kLeast;
  return CutIntoChunks(group.index(), pieces, elements, cuts.offsets);
}

void VisitPiecesOf(const shard::ParameterGroup& group,
                   const kernels::PieceTable& pieces,
                   const VisitUpdated& visit) {
  if (pieces.count == 0) {
    return;
  }
  const int64_t begin = pieces.pieces[0].offset;
  const int64_t end = EndOf(pieces.pieces[pieces.count - 1]);
  const auto* weights = group.StoredAt(begin, end - begin).main_weight.As<float>();
  for (const quant::QuantPiece& piece : group.quant_pieces()) {
    const int64_t at = piece.main_weight.As<float>() - weights;  // from `begin` on
    const int64_t first = std::max<int64_t>(0, -at);
    const int64_t last = std::min(piece.main_weight.elements(), end - begin - at);
    if (first < last) {
      visit(piece, first, last - first);
    }
  }
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
