#include "worker/model/layer.h"

namespace ravel::model {

LayerModule::LayerModule(const plan::ModelInventory& inventory,
                         plan::UnitId unit,
                         const plan::MicroBatchShape& micro_batch)
    : attention_(UnitTensors(inventory, unit), micro_batch), mlp_(UnitTensors(inventory, unit)) {}

void LayerModule::Forward(kernels::Stream& stream, const UnitMemory& memory) const {
  attention_.Forward(stream, memory);
  mlp_.Forward(stream, memory);
}

void LayerModule::Remake(kernels::Stream& stream, const UnitMemory& memory) const {
  attention_.Remake(stream, memory);
  mlp_.Remake(stream, memory);
}

void LayerModule::RunBackward(kernels::Stream& stream,
                              const UnitMemory& memory,
                              const WeightGradients& gradients) const {
  mlp_.Backward(stream, memory, gradients);
  attention_.Backward(stream, memory, gradients);
}

}  // namespace ravel::model
