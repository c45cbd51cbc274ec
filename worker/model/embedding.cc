// hidden_t = E[id_t] (+ P[position of t]);  dE[v] = the sum of dhidden_t over the tokens t with
// id_t = v, in token order, so that its bits depend on nothing else. dP the same over positions.

#include "worker/model/embedding.h"

#include "kernels/embedding.h"

namespace ravel::model {

EmbeddingModule::EmbeddingModule(const plan::ModelInventory& inventory)
    : ids_(ActivationIndex(inventory.shared, "ids")),
      hidden_(ActivationIndex(inventory.shared, "hidden")),
      dhidden_(ActivationIndex(inventory.shared, "dhidden")) {}

void EmbeddingModule::Forward(kernels::Stream& stream, const UnitMemory& memory) const {
  kernels::EmbeddingForward(
      stream,
      {.ids = memory.shared[ids_], .table = memory.weights[0], .out = memory.shared[hidden_]});
}

void EmbeddingModule::RunBackward(kernels::Stream& stream,
                                  const UnitMemory& memory,
                                  const WeightGradients& gradients) const {
  if (gradients.views[0].present()) {
    kernels::EmbeddingBackward(stream,
                               {.ids = memory.shared[ids_],
                                .dout = memory.shared[dhidden_],
                                .dtable = gradients.views[0],
                                .output = gradients.output});
  }
}

PositionsModule::PositionsModule(const plan::ModelInventory& inventory,
                                 const plan::MicroBatchShape& micro_batch)
    : sequence_tokens_(micro_batch.sequence_tokens),
      hidden_(ActivationIndex(inventory.shared, "hidden")),
      dhidden_(ActivationIndex(inventory.shared, "dhidden")) {}

void PositionsModule::Forward(kernels::Stream& stream, const UnitMemory& memory) const {
  kernels::AddPositions(stream,
                        {.x = memory.shared[hidden_],
                         .table = memory.weights[0],
                         .sequence_tokens = sequence_tokens_});
}

void PositionsModule::RunBackward(kernels::Stream& stream,
                                  const UnitMemory& memory,
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
