#pragma once

// Recipes that models of GPUs have no gemms of codes for: no job with such a recipe is placed
// there. Pure.

#include <cstdint>
#include <string_view>

#include "common/model/job_spec.h"

namespace ravel::coordinator {

// A set of recipes: bit i is the recipe of that value.
using RecipeSet = uint32_t;
constexpr bool Has(RecipeSet recipes, plan::Recipe recipe) {
  return (recipes >> static_cast<unsigned>(recipe) & 1U) != 0;
}

// Recipes that GPUs of this model, as NVML names it, cannot run; none where the model is not known:
// a trainer then finds out at its start.
RecipeSet RecipesLackedBy(std::string_view model);

// The recipe whose gemms a job's GPUs need: of kBlockAsMxFp8 it is kMxFp8. kNone: any device of the
// job's kind will do, since nothing is quantized, or operands are decoded, or the devices are cpus.
plan::Recipe RecipeOfGpus(const plan::JobSpec& spec);

}  // namespace ravel::coordinator
