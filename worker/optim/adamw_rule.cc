#include "worker/optim/adamw_rule.h"

#include "kernels/adamw.h"
#include "kernels/mixed_adamw.h"

namespace ravel::optim {

kernels::AdamWHyper AdamWRule::hyper() const {
  return {.beta1 = optimizer_.beta1,
          .beta2 = optimizer_.beta2,
          .epsilon = optimizer_.eps,
          .weight_decay = optimizer_.weight_decay};
}

void AdamWRule::Update(kernels::Stream& stream,
                       const shard::ParameterGroup& group,
                       const kernels::StepOutcome& outcome) {
  const auto update = [&](const plan::TensorSpec& tensor, const plan::OwnedRun& run) {
    const shard::ParameterGroup::Stored stored = group.StoredAt(run.offset, run.elements);
    const kernels::MixedAdamWArgs args = {
        .main_weight = stored.main_weight,
        .weight = stored.model_weight,
        .remainder = stored.remainder,
        .g = VectorView(group.optimizer_gradient() + run.offset, run.elements),
        .m = stored.states[0],
        .v = stored.states[1],
        .seed = seed_,
        .site = tensor.site,
        .first_index = run.first,
        .device_scalars = tensor.decay ? &outcome.with_decay : &outcome.without_decay,
        .device_step = &outcome.step,
        .apply = &outcome.apply};
    if (group.rounds_weights()) {
      kernels::MixedAdamWUpdate(stream, args);
      return;
    }
    kernels::AdamWUpdate(stream,
                         {.p = args.main_weight,
                          .g = args.g,
                          .m = args.m,
                          .v = args.v,
                          .device_scalars = args.device_scalars,
                          .apply = args.apply});
  };
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const plan::TensorSpec& tensor = plan_.inventory.tensors[piece.tensor];
    piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) { update(tensor, run); });
  }
}

}  // namespace ravel::optim
