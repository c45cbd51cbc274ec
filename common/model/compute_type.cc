#include "common/model/compute_type.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "common/dtype.h"

namespace ravel::plan {
namespace {

bool StaysF32(const ActivationSpec& spec) {
  constexpr std::array<std::string_view, 4> kNames = {"lse", "scratch", "rope_cos", "rope_sin"};
  return spec.shape.size() < 2 ||
         std::find(kNames.begin(), kNames.end(), spec.name) != kNames.end();
}

void Narrow(DType type, std::vector<ActivationSpec>& specs) {
  for (ActivationSpec& spec : specs) {
    if (spec.dtype == DType::kF32 && !StaysF32(spec)) {
      spec.dtype = type;
    }
  }
}

}  // namespace

const char* ComputeName(ComputeType compute) {
  return ComputeName(WeightTypeOf(compute));
}

const char* ComputeName(DType weight_type) {
  return weight_type == DType::kBF16 ? "bf16" : weight_type == DType::kF16 ? "fp16" : "fp32";
}

DType WeightTypeOf(ComputeType compute) {
  return compute == ComputeType::kBF16  ? DType::kBF16
         : compute == ComputeType::kF16 ? DType::kF16
                                        : DType::kF32;
}

DType MainTypeOf(MainWeightForm form) {
  return form == MainWeightForm::kBF16Remainder ? DType::kI16 : DType::kF32;
}

void NarrowActivations(DType type, ModelInventory& inventory) {
  if (type == DType::kF32) {
    return;
  }
  for (UnitSpec& unit : inventory.units) {
    Narrow(type, unit.saved);
    Narrow(type, unit.remade);
    Narrow(type, unit.workspace);
  }
  Narrow(type, inventory.shared);
}

}  // namespace ravel::plan
