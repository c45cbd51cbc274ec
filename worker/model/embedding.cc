// hidden_t = E[id_t] (+ P[position of t]);  dE[v] = the sum of dhidden_t over the tokens t with
// id_t = v, in token order, so that its bits depend on nothing else. dP the same over positions.
// Each rank has E[id_t] of its part or -0, and x + -0 = x, of -0 too: the sum over ranks
// has the bits of the row.

#include "worker/model/embedding.h"

#include <algorithm>

#include "kernels/part_sum.h"

namespace ravel::model {

GatheredGradient::GatheredGradient(const plan::ModelInventory& inventory, plan::UnitId unit)
    : sequence_(inventory.cut.sequence), dhidden_(ActivationIndex(inventory.shared, "dhidden")) {
  if (sequence_) {
    dy_all_ = ActivationIndex(inventory.units[unit].workspace, "dy_all");
  }
}

void GatheredGradient::Give(kernels::Stream& stream, const UnitMemory& memory) const {
  CopyView(stream, memory.shared[dhidden_], memory.rows);
}

TensorView GatheredGradient::In(const UnitMemory& memory) const {
  return sequence_ ? memory.workspace[dy_all_] : memory.shared[dhidden_];
}

EmbeddingModule::EmbeddingModule(const plan::ModelInventory& inventory, plan::UnitId unit)
    : UnitModule(inventory, unit),
      cut_(plan::TensorRanks(inventory) > 1),
      ids_(ActivationIndex(inventory.shared, "ids")),
      hidden_(ActivationIndex(inventory.shared, "hidden")),
      gradient_(inventory, unit) {
  if (cut_) {
    rows_ = {.first = plan::LocalSizesOf(inventory.config, inventory.cut).first_row,
             .vocabulary = inventory.config.vocab_size};
  }
}

void EmbeddingModule::ForwardSegment(kernels::Stream& stream,
                                     const UnitMemory& memory,
                                     plan::SegmentKind kind) const {
  if (kind == plan::SegmentKind::kTableSum) {
    kernels::SumParts(stream, {.pieces = memory.pieces, .out = memory.rows});
    return;
  }
  kernels::EmbeddingForward(stream,
                            {.ids = memory.shared[ids_],
                             .table = memory.weights[0],
                             .out = cut_ ? memory.addend : memory.shared[hidden_],
                             .rows = rows_});
}

void EmbeddingModule::BackwardSegment(kernels::Stream& stream,
                                      const UnitMemory& memory,
                                      plan::SegmentKind kind,
                                      const WeightGradients& gradients) const {
  if (kind == plan::SegmentKind::kTableGradient) {
    gradient_.Give(stream, memory);
  } else if (gradients.views[0].present()) {
    kernels::EmbeddingBackward(stream,
                               {.ids = memory.shared[ids_],
                                .dout = gradient_.In(memory),
                                .dtable = gradients.views[0],
                                .output = gradients.output,
                                .rows = rows_});
  }
}

PositionsModule::PositionsModule(const plan::ModelInventory& inventory,
                                 plan::UnitId unit,
                                 const plan::MicroBatchShape& micro_batch)
    : UnitModule(inventory, unit),
      sequence_tokens_(micro_batch.sequence_tokens),
      hidden_(ActivationIndex(inventory.shared, "hidden")),
      gradient_(inventory, unit) {
  if (inventory.cut.sequence) {
    first_token_ = inventory.cut.coordinate * inventory.shared[hidden_].shape[0];
  }
}

void PositionsModule::ForwardSegment(kernels::Stream& stream,
                                     const UnitMemory& memory,
                                     plan::SegmentKind) const {
  const TensorView& hidden = memory.shared[hidden_];
  const auto add = [&](int64_t row, int64_t rows, int64_t position, int64_t tokens) {
    kernels::AddPositions(stream,
                          {.x = RowsOf(hidden, row, rows),
                           .table = RowsOf(memory.weights[0], position, tokens),
                           .sequence_tokens = tokens});
  };
  if (!first_token_.has_value()) {
    add(0, hidden.size[0], 0, sequence_tokens_);
    return;
  }
  // The first and the last sequence may be cut.
  for (int64_t row = 0; row < hidden.size[0];) {
    const int64_t position = (*first_token_ + row) % sequence_tokens_;
    const int64_t tokens = std::min(sequence_tokens_ - position, hidden.size[0] - row);
    add(row, tokens, position, tokens);
    row += tokens;
  }
}

void PositionsModule::BackwardSegment(kernels::Stream& stream,
                                      const UnitMemory& memory,
                                      plan::SegmentKind kind,
                                      const WeightGradients& gradients) const {
  if (kind == plan::SegmentKind::kTableGradient) {
    gradient_.Give(stream, memory);
  } else if (gradients.views[0].present()) {
    kernels::PositionGradient(stream,
                              {.dx = gradient_.In(memory),
                               .dtable = gradients.views[0],
                               .sequence_tokens = sequence_tokens_,
                               .output = gradients.output});
  }
}

}  // namespace ravel::model
