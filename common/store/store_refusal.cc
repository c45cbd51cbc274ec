#include "common/store/store_refusal.h"

#include <string>
#include <utility>

#include <absl/strings/cord.h>

namespace ravel::store {
namespace {

constexpr char kPayload[] = "ravel/store_refusal";
constexpr RefusalCause kCauses[] = {
    RefusalCause::kSettings, RefusalCause::kKeys, RefusalCause::kJobKeys};

std::string TextOf(RefusalCause cause) {
  return std::to_string(static_cast<int>(cause));
}

}  // namespace

absl::Status MarkRefused(absl::Status status, RefusalCause cause) {
  status.SetPayload(kPayload, absl::Cord(TextOf(cause)));
  return status;
}

RefusalCause RefusalOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  for (const RefusalCause cause : kCauses) {
    if (payload.has_value() && *payload == TextOf(cause)) {
      return cause;
    }
  }
  return RefusalCause::kNone;
}

}  // namespace ravel::store
