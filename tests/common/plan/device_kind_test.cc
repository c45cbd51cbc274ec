// Kinds of devices: names, memory, rates, and what each can compute.

#include "common/plan/device_kind.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/report/plan_printer.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

TEST(DeviceKind, PeaksAreOfWholeKnownDevices) {
  EXPECT_EQ(DenseBf16Peak("NVIDIA H100 80GB HBM3"), 989.4e12);
  EXPECT_EQ(DenseBf16Peak("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(DenseBf16Peak("NVIDIA H200"), 989.4e12);
  EXPECT_EQ(DenseBf16Peak("NVIDIA H200 NVL"), 835e12);
  EXPECT_EQ(DenseBf16Peak("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(DenseBf16Peak("NVIDIA B200"), 2250e12);
  for (const char* other : {"",
                            "NVIDIA",
                            "NVIDIA B2000",
                            "NVIDIA H100 64GB HBM2",
                            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                            "NVIDIA GeForce RTX 4090",
                            "AMD EPYC 7763"}) {
    EXPECT_EQ(DenseBf16Peak(other), 0) << other;
  }
}

TEST(DeviceKind, CountsNamesAndMemory) {
  const absl::StatusOr<DeviceRequest> h100 = ParseDevices("64xH100-80G", true);
  ASSERT_TRUE(h100.ok());
  EXPECT_EQ(h100->count, 64);
  EXPECT_EQ(h100->kind.name, "H100-80G");
  EXPECT_EQ(h100->kind.memory_bytes, int64_t{80} << 30);
  EXPECT_TRUE(h100->kind.known);
  EXPECT_FALSE(h100->kind.cpu);
  // 6 % are the runtime's: "of 75.2 GiB".
  EXPECT_EQ(BytesText(h100->kind.usable_bytes()), "75.2 GiB");
  EXPECT_EQ(ParseDevices("8xH200-141G", true)->kind.memory_bytes, int64_t{141} << 30);
  const absl::StatusOr<DeviceRequest> other = ParseDevices("2xNext-1-48GiB", true);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->kind.memory_bytes, int64_t{48} << 30);
  EXPECT_FALSE(other->kind.known);
  EXPECT_TRUE(ParseDevices("4xcpu", false)->kind.cpu);
  EXPECT_EQ(ParseDevices("4xcpu", false)->kind.memory_bytes, 0);
  EXPECT_EQ(ParseDevices("4xcpu-16G", false)->kind.memory_bytes, int64_t{16} << 30);
  EXPECT_EQ(ParseDevices("4", true)->kind.name, "cpu");
  EXPECT_EQ(ParseDevices("", true)->count, 0);
  for (const char* bad : {"x",
                          "0xcpu",
                          "4x",
                          "H100-80G",
                          "4xH100",
                          "8xH100--5G",
                          "8x--5G",
                          "4xH100-80",
                          "4xH100-0G",
                          "4xcpu-x",
                          "4xx-1T",
                          "4 "}) {
    const absl::Status status = ParseDevices(bad, true).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("--devices: expected a count and a device"))
        << bad;
  }
}

// The recipes that each kind runs without emulation, in the order of kOfCodes.
struct KindCase {
  const char* devices;
  const char* model;  // as NVML names one
  bool runs[5];       // by kOfCodes
};
constexpr KindCase kKinds[] = {
    {"8xA100-80G", "NVIDIA A100-SXM4-80GB", {false, false, false, false, false}},
    {"8xL40S-48G", "NVIDIA L40S", {true, true, false, false, false}},
    {"8xH100-80G", "NVIDIA H100 80GB HBM3", {true, true, true, false, false}},
    {"8xH200-141G", "NVIDIA H200", {true, true, true, false, false}},
    {"8xB200-180G", "NVIDIA B200", {true, true, false, true, true}},
    {"8xGB200-186G", "NVIDIA GB200", {true, true, false, true, true}},
    {"8xcpu", "AMD EPYC 7763", {true, true, true, true, true}},
    {"8xNext-1-48G", "NVIDIA Next 1", {true, true, true, true, true}},
    {"8", "", {true, true, true, true, true}},
};
constexpr Recipe kOfCodes[] = {
    Recipe::kDelayed, Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4};

TEST(DeviceKind, EachKindRunsItsRecipes) {
  for (const KindCase& tested : kKinds) {
    const absl::StatusOr<DeviceRequest> request = ParseDevices(tested.devices, false);
    ASSERT_TRUE(request.ok()) << request.status();
    const GemmDevice reported = GemmDeviceOf(tested.model);
    EXPECT_EQ(reported.compute_major, request->kind.compute_major) << tested.model;
    EXPECT_EQ(reported.compute_minor, request->kind.compute_minor) << tested.model;
    EXPECT_TRUE(!request->kind.known || request->kind.cpu || request->kind.compute_major > 0)
        << tested.devices << " has rates and no capability";
    for (size_t i = 0; i < std::size(kOfCodes); ++i) {
      RecipeSpec recipe;
      recipe.recipe = kOfCodes[i];
      EXPECT_EQ(CheckRecipeOn(request->kind, recipe).ok(), tested.runs[i])
          << tested.devices << " and recipe " << i;
      EXPECT_EQ(CheckRecipeOnGpu(recipe, reported).ok(), tested.runs[i])
          << tested.model << " and recipe " << i;
      recipe.emulation = {GemmPath::kDequantBf16};
      EXPECT_TRUE(CheckRecipeOn(request->kind, recipe).ok()) << tested.devices;
    }
    EXPECT_TRUE(CheckRecipeOn(request->kind, {}).ok()) << "bf16 runs everywhere";
  }
  RecipeSpec blocks;
  blocks.recipe = Recipe::kMxFp8;
  const DeviceKind hopper = ParseDevices("1xH100-80G", false)->kind;
  EXPECT_THAT(std::string(CheckRecipeOn(hopper, blocks).message()),
              HasSubstr("precision.recipe: expected a recipe whose codes H100-80G (compute "
                        "capability 9.0) multiplies"));
}

// By whole words, so that a device whose name is not known is left to the trainer.
TEST(DeviceKind, CapabilitiesAreOfWholeNamesAndOfSlices) {
  EXPECT_EQ(GemmDeviceOf("NVIDIA H100 80GB HBM3 MIG 1g.10gb").compute_major, 9);
  EXPECT_EQ(GemmDeviceOf("A100-PCIE-40GB").compute_major, 8);
  EXPECT_EQ(GemmDeviceOf("NVIDIA GH200 480GB").compute_major, 9);
  EXPECT_EQ(GemmDeviceOf("NVIDIA GB200").compute_major, 10);
  for (const char* other :
       {"", "NVIDIA H1000", "NVIDIA H100X", "XH100", "NVIDIA GeForce RTX 4090"}) {
    EXPECT_EQ(GemmDeviceOf(other).compute_major, 0) << other;
  }
}

}  // namespace
}  // namespace ravel::plan
