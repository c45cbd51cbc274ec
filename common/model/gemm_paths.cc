#include "common/model/gemm_paths.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/field_error.h"
#include "common/model/recipes.h"

namespace ravel::plan {
namespace {

constexpr GemmPath kEmulations[] = {
    GemmPath::kCpuReference, GemmPath::kDequantBf16, GemmPath::kBlockAsMxFp8};

// An entry that allows nothing is a mistake of the job file.
absl::Status CheckEntries(const RecipeSpec& spec, bool cpu_devices) {
  const GemmPath of_devices = cpu_devices ? GemmPath::kCpuReference : GemmPath::kDequantBf16;
  const bool as_mxfp8 = !cpu_devices && spec.recipe == Recipe::kFloat8Block;
  for (size_t i = 0; i < spec.emulation.size(); ++i) {
    const std::string at = absl::StrCat("precision.emulation[", i, "]");
    const char* name = GemmPathName(spec.emulation[i]);
    const bool known = spec.emulation[i] == of_devices ||
                       (as_mxfp8 && spec.emulation[i] == GemmPath::kBlockAsMxFp8);
    if (!known) {
      const std::string expected =
          as_mxfp8 ? "dequant_bf16 or block_as_mxfp8, the emulations of gpu devices for fp8_block"
                   : absl::StrCat(GemmPathName(of_devices),
                                  ", the emulation of ",
                                  cpu_devices ? "cpu" : "gpu",
                                  " devices");
      return FieldRefusal(at, expected, name);
    }
    if (i > 0) {
      return FieldRefusal(at, "one path, which all gemms take", absl::StrCat(name, " beside it"));
    }
  }
  return absl::OkStatus();
}

// The device that a path needs: a compute capability from one on, or of one major number alone,
// since scales of 128 codes are of Hopper and those of 32 and 16 are tried for on the first
// Blackwell alone; versions as cuBLASLt counts them.
struct Needs {
  GemmPath path;
  int compute_major;
  int compute_minor;
  bool that_major_alone;
  uint64_t cublas_lt_version;
};
constexpr Needs kNeeds[] = {{GemmPath::kFp8Tensor, 8, 9, false, 120000},
                            {GemmPath::kFp8Block, 9, 0, true, 120900},
                            {GemmPath::kMxFp8, 10, 0, true, 120800},
                            {GemmPath::kNvFp4, 10, 0, true, 120800},
                            {GemmPath::kBlockAsMxFp8, 10, 0, true, 120800}};

bool HasCapability(const Needs& needs, const GemmDevice& device) {
  return std::pair(device.compute_major, device.compute_minor) >=
             std::pair(needs.compute_major, needs.compute_minor) &&
         (!needs.that_major_alone || device.compute_major == needs.compute_major);
}

// "8.9 or later", "9.0 to 9.9".
std::string CapabilityText(const Needs& needs) {
  return absl::StrCat(
      needs.compute_major,
      ".",
      needs.compute_minor,
      needs.that_major_alone ? absl::StrCat(" to ", needs.compute_major, ".9") : " or later");
}

// The emulations that a GPU may be allowed, as an entry of precision.emulation.
std::string EmulationsText(Recipe recipe, const GemmDevice& device) {
  const Needs* const needs = std::ranges::find(kNeeds, GemmPath::kBlockAsMxFp8, &Needs::path);
  return recipe == Recipe::kFloat8Block && HasCapability(*needs, device)
             ? "[block_as_mxfp8] or [dequant_bf16]"
             : "[dequant_bf16]";
}

std::string ClassesText() {
  return absl::StrJoin(kGemmClasses, ", ");
}

}  // namespace

const char* GemmPathName(GemmPath path) {
  switch (path) {
    case GemmPath::kNone:
      return "none";
    case GemmPath::kCpuReference:
      return "cpu_reference";
    case GemmPath::kDequantBf16:
      return "dequant_bf16";
    case GemmPath::kFp8Tensor:
      return "fp8_tensor";
    case GemmPath::kFp8Block:
      return "fp8_block";
    case GemmPath::kMxFp8:
      return "mxfp8";
    case GemmPath::kNvFp4:
      return "nvfp4";
    case GemmPath::kBlockAsMxFp8:
      return "block_as_mxfp8";
  }
  return "unknown";
}

bool ParseEmulation(std::string_view name, GemmPath& path) {
  for (const GemmPath known : kEmulations) {
    if (name == GemmPathName(known)) {
      path = known;
      return true;
    }
  }
  return false;
}

GemmPath PathOfCodes(Recipe recipe) {
  switch (recipe) {
    case Recipe::kDelayed:
    case Recipe::kCurrent:
      return GemmPath::kFp8Tensor;
    case Recipe::kFloat8Block:
      return GemmPath::kFp8Block;
    case Recipe::kMxFp8:
      return GemmPath::kMxFp8;
    case Recipe::kNvFp4:
      return GemmPath::kNvFp4;
    default:
      return GemmPath::kNone;
  }
}

bool Multiplies(GemmPath path, Recipe recipe) {
  return path == GemmPath::kNone || DecodesOperands(path) || PathOfCodes(recipe) == path ||
         (path == GemmPath::kBlockAsMxFp8 && recipe == Recipe::kFloat8Block);
}

const char* FastAccumulationName(FastAccumulation fast) {
  switch (fast) {
    case FastAccumulation::kForward:
      return "forward";
    case FastAccumulation::kNone:
      return "none";
    case FastAccumulation::kForwardAndInputGradient:
      return "forward+dgrad";
  }
  return "unknown";
}

absl::StatusOr<GemmPath> ChooseGemmPath(const RecipeSpec& spec, bool cpu_devices) {
  if (spec.recipe == Recipe::kNone) {
    return spec.emulation.empty()
               ? absl::StatusOr<GemmPath>(GemmPath::kNone)
               : FieldRefusal("precision.emulation", "a precision.recipe beside it", "none");
  }
  RETURN_IF_ERROR(CheckEntries(spec, cpu_devices));
  if (cpu_devices) {
    return GemmPath::kCpuReference;
  }
  return spec.emulation.empty() ? PathOfCodes(spec.recipe) : spec.emulation[0];
}

absl::Status CheckFastAccumulation(FastAccumulation fast, GemmPath path) {
  return MayAccumulateFast(path)
             ? absl::OkStatus()
             : FieldRefusal("precision.fastAccum",
                            "nothing, or gpu devices and recipe fp8_tensor without emulation",
                            FastAccumulationName(fast));
}

absl::Status CheckGemmPath(GemmPath path, const GemmDevice& device) {
  for (const Needs& needs : kNeeds) {
    if (needs.path != path) {
      continue;
    }
    if (!HasCapability(needs, device) || device.cublas_lt_version < needs.cublas_lt_version) {
      return absl::FailedPreconditionError(absl::StrCat(
          "gemm path ",
          GemmPathName(path),
          " (",
          ClassesText(),
          "): expected compute capability ",
          CapabilityText(needs),
          " and cuBLASLt ",
          needs.cublas_lt_version,
          " or later, got ",
          device.compute_major,
          ".",
          device.compute_minor,
          " of ",
          device.name,
          device.cublas_lt_version == 0 ? " without cuBLASLt"
                                        : absl::StrCat(" with cuBLASLt ", device.cublas_lt_version),
          "; precision.emulation: [dequant_bf16] runs there"));
    }
  }
  return absl::OkStatus();
}

bool MultipliesCodes(Recipe recipe, const GemmDevice& device) {
  const Needs* const needs = std::ranges::find(kNeeds, PathOfCodes(recipe), &Needs::path);
  return device.compute_major == 0 || needs == std::end(kNeeds) || HasCapability(*needs, device);
}

absl::Status CheckRecipeOnGpu(const RecipeSpec& spec, const GemmDevice& device) {
  const GemmPath path = spec.emulation.empty() ? PathOfCodes(spec.recipe) : spec.emulation[0];
  const Needs* const needs = std::ranges::find(kNeeds, path, &Needs::path);
  if (device.compute_major == 0 || needs == std::end(kNeeds) || HasCapability(*needs, device)) {
    return absl::OkStatus();
  }
  std::vector<const char*> paths;
  for (const Needs& known : kNeeds) {
    if (HasCapability(known, device) && !IsEmulation(known.path)) {
      paths.push_back(GemmPathName(known.path));
    }
  }
  return FieldRefusal(
      "precision.recipe",
      absl::StrCat("a recipe whose codes ",
                   device.name,
                   " (compute capability ",
                   device.compute_major,
                   ".",
                   device.compute_minor,
                   ") multiplies, which has ",
                   paths.empty() ? "no gemm path of codes"
                                 : absl::StrCat("the gemm paths ", absl::StrJoin(paths, ", ")),
                   ", or precision.emulation: ",
                   EmulationsText(spec.recipe, device),
                   " beside it"),
      absl::StrCat(RecipeName(spec.recipe),
                   ", whose path ",
                   GemmPathName(path),
                   " needs compute capability ",
                   CapabilityText(*needs)));
}

}  // namespace ravel::plan
