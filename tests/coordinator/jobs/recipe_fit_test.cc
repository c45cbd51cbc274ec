// Recipes of jobs against the GPUs that nodes report.

#include "coordinator/jobs/recipe_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/field_error.h"
#include "coordinator/jobs/gpu_recipes.h"

namespace ravel::coordinator {
namespace {

using plan::Recipe;
using ::testing::HasSubstr;

plan::JobSpec GpuJob(Recipe recipe) {
  plan::JobSpec spec;
  spec.cpu_devices = false;
  spec.recipe.recipe = recipe;
  return spec;
}
RecipeFit FitOn(const plan::JobSpec& spec, const std::set<std::string>& models) {
  return CheckRecipeHere(spec, {.gpu_models = models});
}

constexpr char kA100[] = "NVIDIA A100-SXM4-80GB";
constexpr char kH100[] = "NVIDIA H100 80GB HBM3";
constexpr char kB200[] = "NVIDIA B200";

TEST(RecipeFit, ARecipeThatNoGpuHereCanRunIsRefusedByItsField) {
  const RecipeFit fit = FitOn(GpuJob(Recipe::kMxFp8), {kA100, kH100});
  EXPECT_TRUE(fit.warnings.empty());
  const std::vector<FieldError> errors = FieldErrorsOf(fit.status);
  ASSERT_EQ(errors.size(), 1u) << fit.status;
  EXPECT_EQ(errors[0].path, "precision.recipe");
  EXPECT_THAT(errors[0].expected, HasSubstr(kA100));
  EXPECT_THAT(errors[0].expected, HasSubstr("precision.emulation: [dequant_bf16]"));
  EXPECT_FALSE(FitOn(GpuJob(Recipe::kCurrent), {kA100}).status.ok());
  EXPECT_FALSE(FitOn(GpuJob(Recipe::kFloat8Block), {kB200}).status.ok());
}

TEST(RecipeFit, OneModelThatCanIsEnoughAndTheOthersAreNamed) {
  const RecipeFit fit = FitOn(GpuJob(Recipe::kFloat8Block), {kB200, kH100});
  EXPECT_TRUE(fit.status.ok()) << fit.status;
  ASSERT_EQ(fit.warnings.size(), 1u);
  EXPECT_THAT(fit.warnings[0],
              HasSubstr("the job is not placed on NVIDIA B200: precision.recipe: expected "));
  EXPECT_TRUE(FitOn(GpuJob(Recipe::kCurrent), {kB200, kH100}).warnings.empty());
}

TEST(RecipeFit, WhatIsNotKnownIsLeftToTheTrainer) {
  EXPECT_TRUE(FitOn(GpuJob(Recipe::kMxFp8), {}).status.ok());
  const RecipeFit fit = FitOn(GpuJob(Recipe::kMxFp8), {kA100, "Emulated device 0"});
  EXPECT_TRUE(fit.status.ok()) << fit.status;
  EXPECT_EQ(fit.warnings.size(), 1u);
}

TEST(RecipeFit, EmulationCpuDevicesAndBf16RunEverywhere) {
  plan::JobSpec emulated = GpuJob(Recipe::kMxFp8);
  emulated.recipe.emulation = {plan::GemmPath::kDequantBf16};
  EXPECT_TRUE(FitOn(emulated, {kA100}).status.ok());
  EXPECT_TRUE(FitOn(GpuJob(Recipe::kNone), {kA100}).status.ok());
  plan::JobSpec cpu = GpuJob(Recipe::kMxFp8);
  cpu.cpu_devices = true;
  EXPECT_TRUE(FitOn(cpu, {kA100}).status.ok());
}

TEST(RecipeFit, Float8BlockByGemmsOfMxFp8IsOfTheGpusThatHaveThese) {
  plan::JobSpec spec = GpuJob(Recipe::kFloat8Block);
  spec.recipe.emulation = {plan::GemmPath::kBlockAsMxFp8};
  EXPECT_TRUE(FitOn(spec, {kB200}).status.ok());
  const std::vector<FieldError> errors = FieldErrorsOf(FitOn(spec, {kH100}).status);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_THAT(errors[0].got, HasSubstr("whose path block_as_mxfp8 needs compute capability 10.0"));
  for (const char* model : {kA100, kH100, kB200}) {
    EXPECT_EQ(Has(RecipesLackedBy(model), RecipeOfGpus(spec)), !FitOn(spec, {model}).status.ok());
  }
}

}  // namespace
}  // namespace ravel::coordinator
