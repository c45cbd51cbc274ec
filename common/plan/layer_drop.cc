#include "common/plan/layer_drop.h"

#include <array>
#include <charconv>

#include "common/check.h"
#include "common/philox.h"

namespace ravel::plan {
namespace {

// Part of what a run is: another purpose or place in the counter changes the loss curve.
constexpr uint32_t kLayerDropPurpose = 7;  // top byte of the counter
constexpr int kMostLayerBits = 24;

}  // namespace

IdVector<UnitId, bool> UsedUnits(const ModelInventory& inventory, const LayerDraw& draw) {
  CHECK(draw.probability >= 0 && draw.probability < 1);
  if (draw.probability == 0) {
    return {};
  }
  const auto threshold = static_cast<uint32_t>(draw.probability * 0x1p32);
  IdVector<UnitId, bool> used(inventory.units.size(), true);
  for (const UnitId id : inventory.units.ids()) {
    const UnitSpec& unit = inventory.units[id];
    if (!unit.optional) {
      continue;
    }
    CHECK(unit.layer >= 0 && unit.layer < 1 << kMostLayerBits);
    const PhiloxBlock words =
        PhiloxDraw(draw.seed,
                   {static_cast<uint32_t>(draw.step),
                    static_cast<uint32_t>(draw.lane),
                    static_cast<uint32_t>(draw.micro_batch),
                    static_cast<uint32_t>(unit.layer) | (kLayerDropPurpose << kMostLayerBits)});
    used[id] = words[0] >= threshold;
  }
  return used;
}

std::string LayerDropText(double probability) {
  std::array<char, 32> digits = {};
  const auto [end, error] =
      std::to_chars(digits.data(), digits.data() + digits.size(), probability);
  CHECK(error == std::errc());
  return {digits.data(), end};
}

}  // namespace ravel::plan
