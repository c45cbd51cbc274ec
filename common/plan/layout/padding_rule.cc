#include "common/plan/layout/padding_rule.h"

#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/model/bundles.h"
#include "common/model/tensor_cuts.h"

namespace ravel::plan {
namespace {

constexpr double kMostPercent = 10.0;

bool TooMuch(const UnitPadding& padding, int64_t width) {
  return padding.percent() > kMostPercent && padding.padding > width * kFreePaddingElements;
}

// The tensor of the unit whose atom costs most: with atoms of one alignment instead, the padding is
// least.
TensorId ForcingTensor(const ModelInventory& inventory, UnitId unit, int64_t width) {
  TensorId worst;
  int64_t least = 0;
  for (const TensorId index : inventory.units[unit].tensors) {
    ModelInventory without = inventory;
    TensorSpec& tensor = without.tensors[index];
    const int64_t elements = ItemElements(tensor);
    tensor.shape = {elements};
    tensor.cut = {};
    tensor.block_rows = 1;
    DissolveBundles(without);
    const int64_t padding = PaddingOf(PlanGroups(without, unit, width), unit).padding;
    const bool larger =
        worst >= 0 && padding == least && elements > ItemElements(inventory.tensors[worst]);
    if (worst < 0 || padding < least || larger) {
      worst = index;
      least = padding;
    }
  }
  return worst;
}

// Replicas, with the widest shard axis that is not too much.
std::string NarrowerRemedy(const ModelInventory& inventory, UnitId unit, int64_t width) {
  for (int64_t replicas = 2; width % replicas == 0; replicas *= 2) {
    const int64_t narrower = width / replicas;
    const UnitPadding padding = PaddingOf(PlanGroups(inventory, unit, narrower), unit);
    if (!TooMuch(padding, narrower)) {
      return absl::StrFormat(
          "parallelism.strategy: hsdp with parallelism.replicas: %d (shard width %d: %.2f %%)",
          replicas,
          narrower,
          padding.percent());
    }
  }
  return "parallelism.strategy: hsdp, for a narrower shard axis";
}

absl::Status Refuse(const ModelInventory& inventory,
                    UnitId unit,
                    int64_t width,
                    const UnitPadding& padding) {
  const TensorSpec& tensor = inventory.tensors[ForcingTensor(inventory, unit, width)];
  std::string remedies = NarrowerRemedy(inventory, unit, width);
  absl::StrAppend(&remedies, "; larger units, so that consecutive layers are gathered as one");
  if (tensor.block_rows > 1) {
    absl::StrAppend(&remedies, "; row atoms with shared tile amaxes");
  }
  absl::StrAppend(&remedies, "; parallelism.allowPadding: true");
  return absl::InvalidArgumentError(absl::StrFormat(
      "parallelism: unit %s would be padded by %.1f %% on a shard axis of %d (at most %g %%), "
      "forced by %s %s, which is cut between blocks of %d row(s); remedies: %s",
      inventory.units[unit].name,
      padding.percent(),
      width,
      kMostPercent,
      tensor.name,
      ShapeText(tensor.shape),
      tensor.block_rows,
      remedies));
}

}  // namespace

double UnitPadding::percent() const {
  return elements == 0 ? 0.0 : 100.0 * static_cast<double>(padding) / static_cast<double>(elements);
}

UnitPadding PaddingOf(const GroupLayouts& groups, UnitId unit) {
  UnitPadding sum;
  for (const GroupLayout& group : groups) {
    if (group.unit == unit) {
      sum.padding += group.layout.padding_elements;
      sum.elements += group.layout.total_elements() - group.layout.padding_elements;
      sum.tensors += static_cast<int64_t>(group.tensors.size());
    }
  }
  return sum;
}

absl::Status CheckPadding(const ModelInventory& inventory, const GroupLayouts& groups) {
  UnitId last;
  for (const GroupLayout& group : groups) {
    if (group.unit == last) {
      continue;
    }
    last = group.unit;
    const UnitPadding padding = PaddingOf(groups, group.unit);
    if (TooMuch(padding, group.layout.width)) {
      return Refuse(inventory, group.unit, group.layout.width, padding);
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::plan
