#include "worker/model/module.h"

#include "common/check.h"
#include "kernels/rope.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"
#include "worker/model/layer.h"
#include "worker/model/rope_frequencies.h"

namespace ravel::model {

const std::vector<plan::SegmentKind>& Module::segments(plan::UnitPass pass) const {
  static const std::vector<plan::SegmentKind> kNone;
  const auto found = segments_.find(pass);
  return found == segments_.end() ? kNone : found->second;
}

void Module::Run(kernels::Stream& stream, const UnitMemory& memory, plan::UnitPass pass) const {
  for (const plan::SegmentKind kind : segments(pass)) {
    RunSegment(stream, memory, pass, kind);
  }
}

Modules MakeModules(const plan::ModelInventory& of_any,
                    const plan::MicroBatchShape& micro_batch,
                    int64_t coordinate) {
  plan::ModelInventory inventory = of_any;
  inventory.cut.coordinate = coordinate;
  Modules modules;
  for (const plan::UnitId unit : inventory.units.ids()) {
    switch (inventory.units[unit].kind) {
      case plan::UnitKind::kEmbedding:
        modules.push_back(std::make_unique<EmbeddingModule>(inventory, unit));
        break;
      case plan::UnitKind::kPositions:
        modules.push_back(std::make_unique<PositionsModule>(inventory, unit, micro_batch));
        break;
      case plan::UnitKind::kLayer:
        modules.push_back(std::make_unique<LayerModule>(inventory, unit, micro_batch));
        break;
      case plan::UnitKind::kHead:
        modules.push_back(std::make_unique<HeadModule>(inventory, unit));
        break;
    }
  }
  return modules;
}

void FillRopeTables(kernels::Stream& stream,
                    const plan::ModelInventory& inventory,
                    const std::vector<TensorView>& shared) {
  const plan::Architecture& architecture = plan::ArchitectureOf(inventory.config.architecture);
  if (architecture.positions != plan::PositionKind::kRotary) {
    return;
  }
  std::vector<float> frequencies = InverseFrequencies(inventory.config);
  kernels::BuildRopeTable(stream,
                          {.inverse_frequency = VectorView(
                               frequencies.data(), static_cast<int64_t>(frequencies.size())),
                           .cosine = shared[ActivationIndex(inventory.shared, "rope_cos")],
                           .sine = shared[ActivationIndex(inventory.shared, "rope_sin")]});
}

size_t ActivationIndex(const std::vector<plan::ActivationSpec>& specs, std::string_view name) {
  for (size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) {
      return i;
    }
  }
  CheckFailed(__FILE__, __LINE__, "activation", "the inventory lacks an activation of the module");
}

}  // namespace ravel::model
