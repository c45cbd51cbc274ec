#pragma once

// How the gemms of quantized matrices are computed, and which of the ways a job allows. Pure.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/job_spec.h"
#include "common/status.h"

namespace ravel::plan {

// "cpu_reference", "dequant_bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "block_as_mxfp8";
// "none" where nothing is quantized.
const char* GemmPathName(GemmPath path);
// False where no emulation has that name.
bool ParseEmulation(std::string_view name, GemmPath& path);

// "none", "forward", "forward+dgrad".
const char* FastAccumulationName(FastAccumulation fast);

// The path of all gemms of quantized matrices: forward, input gradient and weight gradient. kNone
// without a recipe. Allowed are the entries of precision.emulation or, without any, on CPUs their
// reference and on GPUs none. On GPUs the emulation that is allowed is taken, else the path of the
// recipe's codes. An error names precision.emulation, and an entry that these devices never take,
// that is not of this recipe, or that is there beside another.
absl::StatusOr<GemmPath> ChooseGemmPath(const RecipeSpec& spec, bool cpu_devices);

// A GPU's path without emulation; kNone without a recipe.
GemmPath PathOfCodes(Recipe recipe);

// False where the path has no gemms for the codes of this recipe.
bool Multiplies(GemmPath path, Recipe recipe);

// True where gemms of the path read RecipeSpec::fast_accumulation.
constexpr bool MayAccumulateFast(GemmPath path) {
  return path == GemmPath::kFp8Tensor;
}

// Refuses precision.fastAccum where nothing reads it. In a RecipeSpec that is a choice other than
// the default.
absl::Status CheckFastAccumulation(FastAccumulation fast, GemmPath path);

// What a GPU and its library are, as far as paths depend on it.
struct GemmDevice {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  uint64_t cublas_lt_version = 0;  // 130100 for 13.1; 0: there is none
};
// An error names the gemms of the path, the device and what it lacks.
absl::Status CheckGemmPath(GemmPath path, const GemmDevice& device);
// False if a GPU of this capability has no gemms of the recipe's codes, whatever library it has;
// true where the capability is not known (0.0).
bool MultipliesCodes(Recipe recipe, const GemmDevice& device);
// Refuses a job's recipe where a GPU of this capability has no gemms of its path, whatever library
// it has; nothing where the capability is not known (0.0) or operands are decoded. The error names
// precision.recipe, the paths that the device has and the emulations that it would take.
absl::Status CheckRecipeOnGpu(const RecipeSpec& spec, const GemmDevice& device);

// The multiple that dimensions of matrices and tokens of a micro-batch have to be for a path: rows
// of codes are whole 16 bytes.
constexpr int64_t GemmStep(GemmPath path) {
  return path == GemmPath::kNone || DecodesOperands(path)              ? 1
         : path == GemmPath::kNvFp4 || path == GemmPath::kBlockAsMxFp8 ? 32
                                                                       : 16;
}

// The gemms that a path computes, as texts name them.
inline constexpr const char* kGemmClasses[] = {"forward", "input gradient", "weight gradient"};

}  // namespace ravel::plan
