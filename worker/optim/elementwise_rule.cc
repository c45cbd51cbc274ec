#include "worker/optim/elementwise_rule.h"

#include "common/signed_size.h"
#include "kernels/adamw.h"

namespace ravel::optim {
namespace {

// `elements` of a flat view from `begin` on; of an absent one the same.
TensorView PartOf(const TensorView& view, int64_t begin, int64_t elements) {
  if (!view.present()) {
    return view;
  }
  TensorView part = VectorView(nullptr, elements);
  part.dtype = view.dtype;
  part.data = static_cast<std::byte*>(view.data) + begin * DTypeBytes(view.dtype);
  return part;
}

}  // namespace

kernels::GroupedUpdateArgs ElementwiseRule::ArgsOf(const GroupUpdate& update) const {
  const kernels::StepOutcome& outcome = update.outcome;
  const shard::ParameterGroup::Stored& stored = update.stored;
  return {.update = {.main_weight = stored.main_weight,
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
                     .rule = rule_},
          .m_scales = stored.scales[0],
          .v_scales = stored.scales[1]};
}

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
  const kernels::GroupedUpdateArgs args = ArgsOf(update);
  if (group.updates_in_groups()) {
    kernels::GroupedUpdate(stream, args);
  } else {
    kernels::ElementUpdate(stream, args.update);
  }
}

kernels::WeightUpdateArgs ElementwiseRule::WeightUpdateOf(const GroupUpdate& update,
                                                          const kernels::UpdatePiece& at,
                                                          int64_t columns) const {
  kernels::WeightUpdateArgs args = {.update = ArgsOf(update),
                                    .columns = columns,
                                    .row_step = at.row,
                                    .decays = at.decays != 0,
                                    .target = {}};
  kernels::ElementUpdateArgs& element = args.update.update;
  for (TensorView* view : {&element.main_weight, &element.g, &element.m, &element.v}) {
    *view = PartOf(*view, at.offset, at.elements);
  }
  const int64_t groups = DivExact(at.elements, columns) * DivCeil(columns, kernels::kUpdateGroup);
  for (TensorView* scales : {&args.update.m_scales, &args.update.v_scales}) {
    *scales = PartOf(*scales, at.first_scale, groups);
  }
  element.first_index = at.first_index;
  element.site = at.site;
  element.table = {};
  return args;
}

}  // namespace ravel::optim
