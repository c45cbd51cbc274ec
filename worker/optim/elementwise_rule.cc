#include "worker/optim/elementwise_rule.h"

#include "kernels/adamw.h"
#include "kernels/grouped_update.h"

namespace ravel::optim {

void ElementwiseRule::Update(kernels::Stream& stream, const GroupUpdate& update) const {
  const shard::ParameterGroup& group = update.group;
  const kernels::StepOutcome& outcome = update.outcome;
  const shard::ParameterGroup::Stored& stored = update.stored;
  const bool fp32_states = stored.states[0].dtype == DType::kF32 &&
                           (!stored.states[1].present() || stored.states[1].dtype == DType::kF32);
  // The same bits, with vectors.
  if (rule_ == kernels::ElementRule::kAdamW && !group.rounds_weights() && fp32_states) {
    kernels::AdamWUpdate(stream,
                         {.p = stored.main_weight,
                          .g = update.gradient,
                          .m = stored.states[0],
                          .v = stored.states[1],
                          .device_scalars = &outcome.scalars,
                          .apply = &outcome.apply,
                          .table = update.pieces});
    return;
  }
  const kernels::ElementUpdateArgs args = {.main_weight = stored.main_weight,
                                           .weight = stored.model_weight,
                                           .remainder = stored.remainder,
                                           .g = update.gradient,
                                           .m = stored.states[0],
                                           .v = stored.states[1],
                                           .seed = seed_,
                                           .device_scalars = &outcome.scalars,
                                           .device_step = &outcome.step,
                                           .apply = &outcome.apply,
                                           .table = update.pieces,
                                           .rule = rule_};
  if (group.updates_in_groups()) {
    kernels::GroupedUpdate(
        stream, {.update = args, .m_scales = stored.scales[0], .v_scales = stored.scales[1]});
  } else {
    kernels::ElementUpdate(stream, args);
  }
}

}  // namespace ravel::optim
