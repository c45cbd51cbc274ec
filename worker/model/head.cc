#include "worker/model/head.h"

#include "common/check.h"
#include "kernels/loss.h"
#include "kernels/norm.h"

namespace ravel::model {

HeadModule::HeadModule(const plan::ModelInventory& inventory, int unit)
    : config_(inventory.config) {
  const plan::UnitSpec& spec = inventory.units[static_cast<size_t>(unit)];
  // One own vector, the norm; one matrix, own or borrowed: the projection.
  CHECK_EQ(spec.tensors.size() + spec.borrowed.size(), size_t{2});
  for (size_t i = 0; i < 2; ++i) {
    const int tensor = i < spec.tensors.size() ? spec.tensors[i] : spec.borrowed[0];
    const bool matrix = inventory.tensors[static_cast<size_t>(tensor)].shape.size() == 2;
    (matrix ? projection_ : norm_) = i;
  }
  CHECK_NE(norm_, projection_);
  rstd_ = ActivationIndex(spec.saved, "rstd");
  normed_ = ActivationIndex(spec.saved, "n");
  logits_ = ActivationIndex(spec.workspace, "logits");
  d_normed_ = ActivationIndex(spec.workspace, "dn");
  targets_ = ActivationIndex(inventory.shared, "targets");
  loss_ = ActivationIndex(inventory.shared, "loss");
  hidden_ = ActivationIndex(inventory.shared, "hidden");
  dhidden_ = ActivationIndex(inventory.shared, "dhidden");
}

void HeadModule::Forward(kernels::Stream& stream, const UnitMemory& memory) const {
  kernels::RmsNormForward(stream,
                          {.x = memory.shared[hidden_],
                           .residual = {},
                           .w = memory.weights[norm_],
                           .epsilon = static_cast<float>(config_.rms_norm_eps),
                           .sum = {},
                           .y = memory.saved[normed_],
                           .rstd = memory.saved[rstd_]});
}

void HeadModule::ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const {
  Forward(stream, memory);
  kernels::LinearCrossEntropyForward(stream,
                                     {.x = memory.saved[normed_],
                                      .w = memory.weights[projection_],
                                      .targets = memory.shared[targets_],
                                      .loss = memory.shared[loss_],
                                      .workspace = memory.workspace[logits_]});
}

template <typename Gradient>
void HeadModule::RunBackward(kernels::Stream& stream,
                             const UnitMemory& memory,
                             const std::vector<Gradient>& gradients) const {
  kernels::LinearCrossEntropyTrain(stream,
                                   {.x = memory.saved[normed_],
                                    .w = memory.weights[projection_],
                                    .targets = memory.shared[targets_],
                                    .loss = memory.shared[loss_],
                                    .dx = memory.workspace[d_normed_],
                                    .dw = gradients[projection_].view,
                                    .dw_output = Gradient::kOutput,
                                    .workspace = memory.workspace[logits_]});
  kernels::RmsNormBackward(stream,
                           {.dy = memory.workspace[d_normed_],
                            .sum = memory.shared[hidden_],
                            .w = memory.weights[norm_],
                            .rstd = memory.saved[rstd_],
                            .dresidual = {},
                            .dx = memory.shared[dhidden_],
                            .dw = gradients[norm_].view,
                            .dw_output = Gradient::kOutput});
}

void HeadModule::Backward(kernels::Stream& stream,
                          const UnitMemory& memory,
                          const std::vector<FreshGradient>& gradients) const {
  RunBackward(stream, memory, gradients);
}

void HeadModule::Backward(kernels::Stream& stream,
                          const UnitMemory& memory,
                          const std::vector<AccumulatingGradient>& gradients) const {
  RunBackward(stream, memory, gradients);
}

}  // namespace ravel::model
