#include "coordinator/jobs/recipe_fit.h"

#include <absl/strings/str_cat.h>

#include "common/plan/device_kind.h"

namespace ravel::coordinator {

RecipeFit CheckRecipeHere(const plan::JobSpec& spec, const DeviceInventory& inventory) {
  RecipeFit fit;
  if (spec.cpu_devices) {
    return fit;
  }
  bool runs = inventory.gpu_models.empty();
  for (const std::string& model : inventory.gpu_models) {
    const absl::Status able = plan::CheckRecipeOnGpu(spec.recipe, plan::GemmDeviceOf(model));
    if (able.ok()) {
      runs = true;
      continue;
    }
    fit.status = fit.status.ok() ? Annotate(able, "on the gpus that are here") : fit.status;
    fit.warnings.push_back(absl::StrCat("the job is not placed on ", model, ": ", able.message()));
  }
  if (runs) {
    fit.status = absl::OkStatus();
  } else {
    fit.warnings.clear();
  }
  return fit;
}

}  // namespace ravel::coordinator
