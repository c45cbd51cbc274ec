#pragma once

// Which matrices of a model a job's recipe quantizes, and what their modules need for it. Pure.

#include <string>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/status.h"

namespace ravel::plan {

// The name of a recipe in plans and numerics: "fp8_tensor/delayed", "mxfp8", ...; "none".
const char* RecipeName(Recipe recipe);

// The type of a recipe's codes: E4M3, or U8 where two E2M1 share a byte.
DType CodeType(Recipe recipe);
// Bytes of so many codes; whole bytes.
int64_t CodeBytes(Recipe recipe, int64_t elements);

// True if the scales of an activation, where a gemm sums over its columns, are each of one token:
// chunks of tokens then have the codes of the whole (parallelism.tensorChunks). Scales of a tensor
// are of all tokens, as is the second scale of NVFP4.
constexpr bool ScalesTokensApart(Recipe recipe) {
  return recipe == Recipe::kFloat8Block || recipe == Recipe::kMxFp8;
}

// Gives the recipe to every trained matrix of a layer that no pattern of `keep_bf16` matches.
// Embeddings, the head, norms, biases and frozen tensors stay as they are. Bundles are taken apart
// of which only some tensors have it. Errors name the field, and the tensor whose shape the recipe
// cannot take: both dimensions must be multiples of the edge of its blocks (of 32, for NVFP4), and
// so must be the tokens of a micro-batch, but for fp8_block; a path of gemms may ask for more
// (GemmStep), of a chunk of tokens, too. Refuses chunks where not ScalesTokensApart.
absl::Status ApplyRecipe(const RecipeSpec& spec,
                         GemmPath path,
                         const MicroBatchShape& micro_batch,
                         ModelInventory& inventory);

// Gives each tensor this recipe, as a plan that is read says; refuses what ApplyRecipe never makes.
absl::Status SetRecipes(const IdVector<TensorId, Recipe>& recipes,
                        GemmPath path,
                        const MicroBatchShape& micro_batch,
                        ModelInventory& inventory);

// Scratch of the layers that have quantized matrices: "q_weight", the decoded weight of one gemm;
// "q_input" and "q_gradient", its decoded activations; "q_scales", kScaleSlots scales of the three.
// Where the path is no emulation, codes take the place of decoded values, and where it reads scales
// of blocks, these lie in "q_weight_scales", "q_input_scales" and "q_gradient_scales". After
// ApplyRecipe.
inline constexpr int64_t kScaleSlots = 64;
void ReserveRecipeScratch(GemmPath path,
                          const MicroBatchShape& micro_batch,
                          ModelInventory& inventory);

// True if any tensor has a recipe.
bool IsQuantized(const ModelInventory& inventory);

}  // namespace ravel::plan
