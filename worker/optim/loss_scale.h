#pragma once

// The loss scale of an fp16 job from step to step, and its entry in a checkpoint. All ranks know
// the same, since it follows from what was decided of the steps.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/model/loss_scale.h"
#include "common/status.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::optim {

// The scale of the next step. Part of a checkpoint. Hosts and devices follow one rule.
using LossScale = kernels::scalar::LossScale;

LossScale FirstLossScale(const plan::LossScaleSpec& spec);
// After a step: a skipped one lowers the scale, growth_interval others in a row raise it, each
// within the bounds.
LossScale NextLossScale(const plan::LossScaleSpec& spec, const LossScale& now, bool applied);

// The checkpoint's entry of that name, and what it says. A scale that was saved under other bounds
// is brought within those of `spec`; anything that is no power of two is DataLoss.
inline constexpr char kLossScaleBlob[] = "loss_scale";
std::string LossScaleText(const LossScale& scale);
absl::StatusOr<LossScale> ParseLossScale(std::string_view text, const plan::LossScaleSpec& spec);

}  // namespace ravel::optim
