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

void EmbeddingModule::ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const {
  Forward(stream, memory);
}

void EmbeddingModule::Backward(kernels::Stream& stream,
                               const UnitMemory& memory,
                               const std::vector<FreshGradient>& gradients) const {
  kernels::EmbeddingBackward(stream,
                             {.ids = memory.shared[ids_],
                              .dout = memory.shared[dhidden_],
                              .dtable = gradients[0].view,
                              .output = FreshGradient::kOutput});
}

void EmbeddingModule::Backward(kernels::Stream& stream,
                               const UnitMemory& memory,
                               const std::vector<AccumulatingGradient>& gradients) const {
  kernels::EmbeddingBackward(stream,
                             {.ids = memory.shared[ids_],
                              .dout = memory.shared[dhidden_],
                              .dtable = gradients[0].view,
                              .output = AccumulatingGradient::kOutput});
}

}  // namespace ravel::model
