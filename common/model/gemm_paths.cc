#include "common/model/gemm_paths.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/field_error.h"
#include "common/model/recipes.h"

namespace ravel::plan {
namespace {

constexpr GemmPath kEmulations[] = {GemmPath::kCpuReference, GemmPath::kDequantBf16};

// A GPU's path without emulation; kNone: there is none for the recipe yet.
GemmPath PathOfCodes(Recipe recipe) {
  return recipe == Recipe::kDelayed || recipe == Recipe::kCurrent ? GemmPath::kFp8Tensor
                                                                  : GemmPath::kNone;
}

bool Allows(const std::vector<GemmPath>& allowed, GemmPath path) {
  return std::find(allowed.begin(), allowed.end(), path) != allowed.end();
}

// What a path asks of a device; versions as cuBLASLt counts them.
struct Needs {
  GemmPath path;
  int compute_major;
  int compute_minor;
  uint64_t cublas_lt_version;
};
constexpr Needs kNeeds[] = {{GemmPath::kFp8Tensor, 8, 9, 120000}};

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

std::vector<GemmPath> AllowedPaths(const RecipeSpec& spec, bool cpu_devices) {
  if (!spec.emulation.empty()) {
    return spec.emulation;
  }
  return cpu_devices ? std::vector<GemmPath>{GemmPath::kCpuReference} : std::vector<GemmPath>();
}

absl::StatusOr<GemmPath> ChooseGemmPath(const RecipeSpec& spec, bool cpu_devices) {
  if (spec.recipe == Recipe::kNone) {
    return spec.emulation.empty()
               ? absl::StatusOr<GemmPath>(GemmPath::kNone)
               : FieldRefusal("precision.emulation", "a precision.recipe beside it", "none");
  }
  const std::vector<GemmPath> allowed = AllowedPaths(spec, cpu_devices);
  const GemmPath path = cpu_devices ? GemmPath::kCpuReference : GemmPath::kDequantBf16;
  if (Allows(allowed, path)) {
    return path;
  }
  if (!cpu_devices && PathOfCodes(spec.recipe) != GemmPath::kNone) {
    return PathOfCodes(spec.recipe);
  }
  const std::string got = absl::StrJoin(
      allowed, ", ", [](std::string* out, GemmPath of) { absl::StrAppend(out, GemmPathName(of)); });
  return FieldRefusal("precision.emulation",
                      absl::StrCat(GemmPathName(path),
                                   " among the paths, since ",
                                   cpu_devices ? "cpu" : "gpu",
                                   " devices have no gemms of ",
                                   RecipeName(spec.recipe),
                                   " codes of their own (",
                                   ClassesText(),
                                   ")"),
                      got.empty() ? "nothing" : got);
}

absl::Status CheckGemmPath(GemmPath path, const GemmDevice& device) {
  for (const Needs& needs : kNeeds) {
    if (needs.path != path) {
      continue;
    }
    const bool computes = std::pair(device.compute_major, device.compute_minor) >=
                          std::pair(needs.compute_major, needs.compute_minor);
    if (!computes || device.cublas_lt_version < needs.cublas_lt_version) {
      return absl::FailedPreconditionError(absl::StrCat(
          "gemm path ",
          GemmPathName(path),
          " (",
          ClassesText(),
          "): expected compute capability ",
          needs.compute_major,
          ".",
          needs.compute_minor,
          " and cuBLASLt ",
          needs.cublas_lt_version,
          ", or later, got ",
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

}  // namespace ravel::plan
