#include "worker/optim/loss_scale.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "common/json.h"

namespace ravel::optim {
namespace {

double Bounded(const plan::LossScaleSpec& spec, double scale) {
  return std::clamp(scale, spec.minimum, spec.maximum);
}

}  // namespace

LossScale FirstLossScale(const plan::LossScaleSpec& spec) {
  return {.scale = spec.initial};
}

LossScale NextLossScale(const plan::LossScaleSpec& spec, const LossScale& now, bool applied) {
  return kernels::scalar::NextLossScale(spec, now, applied);
}

std::string LossScaleText(const LossScale& scale) {
  json::Value value;
  // Whole, by its bounds.
  value.Set("scale", static_cast<int64_t>(scale.scale)).Set("good_steps", scale.good_steps);
  return json::Serialize(value);
}

absl::StatusOr<LossScale> ParseLossScale(std::string_view text, const plan::LossScaleSpec& spec) {
  ASSIGN_OR_RETURN(const json::Value value, json::Parse(text));
  const json::Value* scale = value.is_object() ? value.Find("scale") : nullptr;
  const json::Value* good = value.is_object() ? value.Find("good_steps") : nullptr;
  if (scale == nullptr || !scale->is_number() || !plan::IsPowerOfTwo(scale->AsDouble()) ||
      good == nullptr || !good->is_int() || good->AsInt() < 0) {
    return absl::DataLossError(
        absl::StrCat(kLossScaleBlob,
                     ": expected a power of two as scale, and good_steps, got ",
                     absl::string_view(text.data(), text.size())));
  }
  LossScale read = {.scale = Bounded(spec, scale->AsDouble()), .good_steps = good->AsInt()};
  // An interval that is shorter now has passed.
  read.good_steps = std::min(read.good_steps, spec.growth_interval - 1);
  return read;
}

}  // namespace ravel::optim
