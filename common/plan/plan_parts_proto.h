#pragma once

// Functions that the two halves of the plan codec share. Internal to it.

#include <cstdint>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/plan/plan_proto.h"
#include "common/status.h"

namespace ravel::plan {

inline absl::Status Invalid(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("plan: ", what));
}

// A number of the wire as an enumerator between two others.
template <typename Enum>
absl::Status ReadEnum(const char* field, int32_t value, Enum last, Enum& out, int32_t first = 0) {
  if (value < first || value > static_cast<int32_t>(last)) {
    return Invalid(absl::StrCat(field, ": no such value: ", value));
  }
  out = static_cast<Enum>(value);
  return absl::OkStatus();
}

inline absl::Status CheckLayerDrop(const char* field, double probability) {
  return probability >= 0 && probability < 1
             ? absl::OkStatus()
             : Invalid(absl::StrCat(field, ": expected 0 to below 1, got ", probability));
}

inline absl::Status CheckOffloadFraction(const char* field, double fraction) {
  return fraction >= 0 && fraction <= 1
             ? absl::OkStatus()
             : Invalid(absl::StrCat(field, ": expected 0 to 1, got ", fraction));
}

inline constexpr int64_t kMostPlannedBytes = int64_t{1} << 50;

// plan.ranks and plan.lanes are read already.
absl::Status OptionsFromProto(const v1::PlannedOptions& proto, ShardingPlan& plan);
void OptionsToProto(const ProgramOptions& options, v1::PlannedOptions& proto);

v1::PlannedModel ModelToProto(const ModelConfig& model);
absl::StatusOr<ModelConfig> ModelFromProto(const v1::PlannedModel& proto);

}  // namespace ravel::plan
