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

void Narrow(std::vector<ActivationSpec>& specs) {
  for (ActivationSpec& spec : specs) {
    if (spec.dtype == DType::kF32 && !StaysF32(spec)) {
      spec.dtype = DType::kBF16;
    }
  }
}

}  // namespace

DType WeightTypeOf(ComputeType compute) {
  return compute == ComputeType::kBF16 ? DType::kBF16 : DType::kF32;
}

DType MainTypeOf(MainWeightForm form) {
  return form == MainWeightForm::kBF16Remainder ? DType::kI16 : DType::kF32;
}

void UseBf16Activations(ModelInventory& inventory) {
  for (UnitSpec& unit : inventory.units) {
    Narrow(unit.saved);
    Narrow(unit.remade);
    Narrow(unit.workspace);
  }
  Narrow(inventory.shared);
}

}  // namespace ravel::plan
