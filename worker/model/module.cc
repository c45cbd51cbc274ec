#include "worker/model/module.h"

#include "common/check.h"
#include "kernels/rope.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"
#include "worker/model/layer.h"
#include "worker/model/rope_frequencies.h"

namespace ravel::model {

Modules MakeModules(const plan::ModelInventory& inventory,
                    const plan::MicroBatchShape& micro_batch) {
  Modules modules;
  for (const plan::UnitId unit : inventory.units.ids()) {
    switch (inventory.units[unit].kind) {
      case plan::UnitKind::kEmbedding:
        modules.push_back(std::make_unique<EmbeddingModule>(inventory));
        break;
      case plan::UnitKind::kPositions:
        modules.push_back(std::make_unique<PositionsModule>(inventory, micro_batch));
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
