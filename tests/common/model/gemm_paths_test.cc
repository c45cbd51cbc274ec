// Which GPUs have the gemms of a path: every path on every compute capability that is of interest.

#include "common/model/gemm_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/field_error.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kNewLibrary = 130100;

GemmDevice GpuOf(int compute_major, int compute_minor) {
  return {.name = "G",
          .compute_major = compute_major,
          .compute_minor = compute_minor,
          .cublas_lt_version = kNewLibrary};
}

RecipeSpec SpecOf(Recipe recipe) {
  RecipeSpec spec;
  spec.recipe = recipe;
  return spec;
}

struct CapabilityCase {
  int compute_major;
  int compute_minor;
  bool fp8_tensor;
  bool fp8_block;
  bool mxfp8;
  bool nvfp4;
};
constexpr CapabilityCase kCapabilities[] = {{7, 5, false, false, false, false},
                                            {8, 0, false, false, false, false},
                                            {8, 6, false, false, false, false},
                                            {8, 9, true, false, false, false},
                                            {9, 0, true, true, false, false},
                                            {10, 0, true, false, true, true},
                                            {10, 3, true, false, true, true},
                                            {12, 0, true, false, false, false}};

TEST(GemmPaths, EachCapabilityHasItsPaths) {
  for (const CapabilityCase& tested : kCapabilities) {
    const GemmDevice device = GpuOf(tested.compute_major, tested.compute_minor);
    SCOPED_TRACE(tested.compute_major * 10 + tested.compute_minor);
    EXPECT_EQ(CheckGemmPath(GemmPath::kFp8Tensor, device).ok(), tested.fp8_tensor);
    EXPECT_EQ(CheckGemmPath(GemmPath::kFp8Block, device).ok(), tested.fp8_block);
    EXPECT_EQ(CheckGemmPath(GemmPath::kMxFp8, device).ok(), tested.mxfp8);
    EXPECT_EQ(CheckGemmPath(GemmPath::kNvFp4, device).ok(), tested.nvfp4);
    EXPECT_EQ(CheckGemmPath(GemmPath::kBlockAsMxFp8, device).ok(), tested.mxfp8);
    EXPECT_TRUE(CheckGemmPath(GemmPath::kNone, device).ok());
    EXPECT_TRUE(CheckGemmPath(GemmPath::kDequantBf16, device).ok());
  }
}

// The same rule as the trainer's, for all that a job can ask for without an emulation.
TEST(GemmPaths, ARecipeIsRefusedWhereItsPathIs) {
  for (const CapabilityCase& tested : kCapabilities) {
    for (const Recipe recipe : {Recipe::kNone,
                                Recipe::kDelayed,
                                Recipe::kCurrent,
                                Recipe::kFloat8Block,
                                Recipe::kMxFp8,
                                Recipe::kNvFp4}) {
      const GemmDevice device = GpuOf(tested.compute_major, tested.compute_minor);
      RecipeSpec spec = SpecOf(recipe);
      EXPECT_EQ(CheckRecipeOnGpu(spec, device).ok(),
                CheckGemmPath(PathOfCodes(recipe), device).ok());
      spec.emulation = {GemmPath::kDequantBf16};
      EXPECT_TRUE(CheckRecipeOnGpu(spec, device).ok());
      EXPECT_TRUE(CheckRecipeOnGpu(spec, GpuOf(0, 0)).ok());
      spec.emulation.clear();
      EXPECT_TRUE(CheckRecipeOnGpu(spec, GpuOf(0, 0)).ok()) << "not known";
    }
  }
}

TEST(GemmPaths, Float8BlockMayRunByGemmsOfMxFp8WhereADeviceHasThem) {
  RecipeSpec spec = SpecOf(Recipe::kFloat8Block);
  const absl::Status refused = CheckRecipeOnGpu(spec, GpuOf(10, 0));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("which has the gemm paths fp8_tensor, mxfp8, nvfp4, or "
                        "precision.emulation: [block_as_mxfp8] or [dequant_bf16] beside it"));
  spec.emulation = {GemmPath::kBlockAsMxFp8};
  EXPECT_EQ(ChooseGemmPath(spec, false).value(), GemmPath::kBlockAsMxFp8);
  for (const CapabilityCase& tested : kCapabilities) {
    EXPECT_EQ(CheckRecipeOnGpu(spec, GpuOf(tested.compute_major, tested.compute_minor)).ok(),
              tested.mxfp8);
  }
  EXPECT_TRUE(CheckRecipeOnGpu(spec, GpuOf(0, 0)).ok()) << "not known";
  EXPECT_THAT(std::string(CheckRecipeOnGpu(spec, GpuOf(9, 0)).message()),
              HasSubstr("or precision.emulation: [dequant_bf16] beside it, got fp8_block, whose "
                        "path block_as_mxfp8 needs compute capability 10.0 to 10.9"));

  for (const Recipe other : {Recipe::kDelayed, Recipe::kMxFp8, Recipe::kNvFp4}) {
    EXPECT_FALSE(Multiplies(GemmPath::kBlockAsMxFp8, other));
    spec.recipe = other;
    EXPECT_THAT(std::string(ChooseGemmPath(spec, false).status().message()),
                HasSubstr("precision.emulation[0]: expected dequant_bf16, the emulation of gpu"));
  }
  EXPECT_TRUE(Multiplies(GemmPath::kBlockAsMxFp8, Recipe::kFloat8Block));
  spec = SpecOf(Recipe::kFloat8Block);
  spec.emulation = {GemmPath::kBlockAsMxFp8};
  EXPECT_THAT(std::string(ChooseGemmPath(spec, true).status().message()),
              HasSubstr("precision.emulation[0]: expected cpu_reference, the emulation of cpu"));
  spec.emulation = {GemmPath::kBlockAsMxFp8, GemmPath::kDequantBf16};
  EXPECT_THAT(std::string(ChooseGemmPath(spec, false).status().message()),
              HasSubstr("precision.emulation[1]: expected one path, which all gemms take, got "));
}

TEST(GemmPaths, ARefusalNamesWhatTheDeviceHasAndWhatItWouldTake) {
  EXPECT_EQ(CheckRecipeOnGpu(SpecOf(Recipe::kMxFp8), GpuOf(9, 0)).message(),
            "precision.recipe: expected a recipe whose codes G (compute capability 9.0) "
            "multiplies, which has the gemm paths fp8_tensor, fp8_block, or precision.emulation: "
            "[dequant_bf16] beside it, got mxfp8, whose path mxfp8 needs compute capability 10.0 "
            "to 10.9");
  const absl::Status none = CheckRecipeOnGpu(SpecOf(Recipe::kDelayed), GpuOf(8, 0));
  EXPECT_THAT(std::string(none.message()), HasSubstr("which has no gemm path of codes, or "));
  EXPECT_THAT(std::string(none.message()), HasSubstr("needs compute capability 8.9 or later"));
  ASSERT_EQ(FieldErrorsOf(none).size(), 1u);
  EXPECT_EQ(FieldErrorsOf(none)[0].path, "precision.recipe");
}

}  // namespace
}  // namespace ravel::plan
