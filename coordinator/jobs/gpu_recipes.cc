#include "coordinator/jobs/gpu_recipes.h"

#include "common/model/gemm_paths.h"
#include "common/plan/device_kind.h"

namespace ravel::coordinator {

RecipeSet RecipesLackedBy(std::string_view model) {
  const plan::GemmDevice device = plan::GemmDeviceOf(model);
  RecipeSet lacked = 0;
  for (const plan::Recipe recipe : {plan::Recipe::kDelayed,
                                    plan::Recipe::kCurrent,
                                    plan::Recipe::kFloat8Block,
                                    plan::Recipe::kMxFp8,
                                    plan::Recipe::kNvFp4}) {
    if (!plan::MultipliesCodes(recipe, device)) {
      lacked |= RecipeSet{1} << static_cast<unsigned>(recipe);
    }
  }
  return lacked;
}

plan::Recipe RecipeOfGpus(const plan::JobSpec& spec) {
  if (spec.cpu_devices) {
    return plan::Recipe::kNone;
  }
  if (spec.recipe.emulation.empty()) {
    return spec.recipe.recipe;
  }
  // The emulation takes gemms of another recipe's codes, or of none.
  return spec.recipe.emulation[0] == plan::GemmPath::kBlockAsMxFp8 ? plan::Recipe::kMxFp8
                                                                   : plan::Recipe::kNone;
}

}  // namespace ravel::coordinator
