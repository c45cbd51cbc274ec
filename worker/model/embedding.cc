// hidden_t = E[id_t] (+ P[position of t]);  dE[v] = the sum of dhidden_t over the tokens t with
// id_t = v, in token order, so that its bits depend on nothing else. dP the same over positions.
// Each rank has E[id_t] of its part or -0, and x + -0 = x, of -0 too: the sum over ranks
// has the bits of the row.

#include "worker/model/embedding.h"

#include "kernels/part_sum.h"

namespace ravel::model {

EmbeddingModule::EmbeddingModule(const plan::ModelInventory& inventory, plan::UnitId unit)
    : UnitModule(inventory, unit),
      cut_(plan::TensorRanks(inventory) > 1),
      ids_(ActivationIndex(inventory.shared, "ids")),
      hidden_(ActivationIndex(inventory.shared, "hidden")),
      dhidden_(ActivationIndex(inventory.shared, "dhidden")) {
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
                                      plan::SegmentKind,
                                      const WeightGradients& gradients) const {
  if (gradients.views[0].present()) {
    kernels::EmbeddingBackward(stream,
                               {.ids = memory.shared[ids_],
                                .dout = memory.shared[dhidden_],
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
      dhidden_(ActivationIndex(inventory.shared, "dhidden")) {}

void PositionsModule::ForwardSegment(kernels::Stream& stream,
                                     const UnitMemory& memory,
                                     plan::SegmentKind) const {
  kernels::AddPositions(stream,
                        {.x = memory.shared[hidden_],
                         .table = memory.weights[0],
                         .sequence_tokens = sequence_tokens_});
}

void PositionsModule::BackwardSegment(kernels::Stream& stream,
                                      const UnitMemory& memory,
                                      plan::SegmentKind,
                                      const WeightGradients& gradients) const {
  if (gradients.views[0].present()) {
    kernels::PositionGradient(stream,
                              {.dx = memory.shared[dhidden_],
                               .dtable = gradients.views[0],
                               .sequence_tokens = sequence_tokens_,
                               .output = gradients.output});
  }
}

}  // namespace ravel::model
