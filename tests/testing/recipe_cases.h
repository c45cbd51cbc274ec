#pragma once

// The five recipes, for jobs of CaseJob whose matrices they take.

#include <cstdint>

#include "common/model/job_spec.h"

namespace ravel::trainer {

struct RecipeForm {
  const char* name;
  plan::Recipe recipe;
};
inline constexpr RecipeForm kRecipeForms[] = {{"delayed", plan::Recipe::kDelayed},
                                              {"current", plan::Recipe::kCurrent},
                                              {"fp8_block", plan::Recipe::kFloat8Block},
                                              {"mxfp8", plan::Recipe::kMxFp8},
                                              {"nvfp4", plan::Recipe::kNvFp4}};

// Shorter than the runs: a delayed scale forgets.
inline constexpr int64_t kCaseHistory = 3;

inline void UseRecipe(plan::Recipe recipe, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kBF16;
  spec.recipe = {.recipe = recipe, .keep_bf16 = {}, .history = kCaseHistory};
}

}  // namespace ravel::trainer
