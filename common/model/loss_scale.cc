#include "common/model/loss_scale.h"

#include <cmath>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/field_error.h"

namespace ravel::plan {
namespace {

// All digits: "16777216", "0.25".
std::string ScaleText(double value) {
  return absl::StrFormat("%.10g", value);
}

absl::Status Refuse(const char* field, const std::string& expected, double got) {
  return FieldRefusal(absl::StrCat("precision.lossScale.", field), expected, ScaleText(got));
}

absl::Status CheckPower(const char* field, double value, double least, double most) {
  if (IsPowerOfTwo(value) && value >= least && value <= most) {
    return absl::OkStatus();
  }
  return Refuse(field,
                absl::StrCat("a power of two from ", ScaleText(least), " to ", ScaleText(most)),
                value);
}

}  // namespace

bool IsPowerOfTwo(double value) {
  int exponent = 0;
  return value > 0 && std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

absl::Status CheckLossScale(const LossScaleSpec& spec) {
  RETURN_IF_ERROR(CheckPower("minimum", spec.minimum, 1, kMostLossScale));
  RETURN_IF_ERROR(CheckPower("maximum", spec.maximum, spec.minimum, kMostLossScale));
  RETURN_IF_ERROR(CheckPower("initial", spec.initial, spec.minimum, spec.maximum));
  RETURN_IF_ERROR(CheckPower("growthFactor", spec.growth_factor, 2, kMostLossScale));
  RETURN_IF_ERROR(CheckPower("backoffFactor", spec.backoff_factor, 1 / kMostLossScale, 0.5));
  if (spec.growth_interval < 1 || spec.growth_interval > kMostGrowthInterval) {
    return Refuse("growthInterval",
                  absl::StrCat("a whole number from 1 to ", kMostGrowthInterval),
                  static_cast<double>(spec.growth_interval));
  }
  return absl::OkStatus();
}

}  // namespace ravel::plan
