#pragma once

// The recipes by which matrices are quantized for gemms: the type of their codes, and the square
// blocks of a weight that share a scale.

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/dtype.h"

namespace ravel::plan {

// On disk (plan proto, numerics): do not renumber.
enum class Recipe : uint8_t {
  kNone = 0,
  kDelayed = 1,  // fp8_tensor, scaling: delayed: one scale per tensor, from the history of its amax
  kCurrent = 2,  // fp8_tensor, scaling: current: one scale per tensor, from its own amax
  kFloat8Block = 3,  // fp8_block: a scale for 128 x 128 elements, a power of two
  kMxFp8 = 4,        // mxfp8: 32 x 32, E8M0
  kNvFp4 = 5,        // nvfp4: 16 x 16, E4M3, with a second scale for the tensor
};

// Ways to compute the gemms of quantized matrices. On disk (plan proto): do not renumber.
// Emulations run where a device has no gemms of the recipe's own, and are taken if the job allows
// them.
enum class GemmPath : uint8_t {
  kNone = 0,
  kCpuReference = 1,  // emulation on a CPU: operands are decoded exactly, its gemm of bf16 follows
  kDequantBf16 = 2,   // emulation on a GPU: the same, by its gemm of bf16 operands
  kFp8Tensor = 3,     // of a GPU: gemms of FP8 codes with one scale for each operand
  kFp8Block = 4,      // of a GPU: of FP8 codes with an fp32 scale for each 128, or 128 x 128
  kMxFp8 = 5,         // of a GPU: of FP8 codes with an E8M0 scale for each 32
  kNvFp4 = 6,         // of a GPU: of E2M1 codes with an E4M3 scale for each 16, and one for all
  // Emulation on a GPU: codes of kFloat8Block by gemms of kMxFp8. A scale of 128 codes, a power of
  // two, becomes four equal ones of E8M0.
  kBlockAsMxFp8 = 7,
};
inline constexpr GemmPath kLastGemmPath = GemmPath::kBlockAsMxFp8;

// Operands are decoded before gemms read them.
constexpr bool DecodesOperands(GemmPath path) {
  return path == GemmPath::kCpuReference || path == GemmPath::kDequantBf16;
}

constexpr bool IsEmulation(GemmPath path) {
  return DecodesOperands(path) || path == GemmPath::kBlockAsMxFp8;
}

// True of gemms that read a scale for each block of codes.
constexpr bool ReadsBlockScales(GemmPath path) {
  return path == GemmPath::kFp8Block || path == GemmPath::kMxFp8 || path == GemmPath::kNvFp4 ||
         path == GemmPath::kBlockAsMxFp8;
}

// The gemms of FP8 codes with one scale for each operand (kFp8Tensor) that may sum fast: they are
// faster and lose low bits on some devices. On disk (plan proto): do not renumber.
enum class FastAccumulation : uint8_t {
  kForward = 0,  // also of plans that were made before there was a choice
  kNone = 1,
  kForwardAndInputGradient = 2,
};
inline constexpr FastAccumulation kLastFastAccumulation =
    FastAccumulation::kForwardAndInputGradient;

// Edge of a weight's square blocks: 0 where the whole tensor is one.
constexpr int64_t BlockEdge(Recipe recipe) {
  switch (recipe) {
    case Recipe::kFloat8Block:
      return 128;
    case Recipe::kMxFp8:
      return 32;
    case Recipe::kNvFp4:
      return 16;
    default:
      return 0;
  }
}

// Amaxes that a delayed scale follows from, unless the job says otherwise.
inline constexpr int64_t kAmaxHistory = 1024;
inline constexpr int64_t kMostAmaxHistory = 65536;
// Binades that a delayed scale leaves free above the largest of those amaxes, unless the job says
// otherwise: what grows faster within a step saturates.
inline constexpr int64_t kAmaxMargin = 2;
inline constexpr int64_t kMostAmaxMargin = 8;

// What of its history a delayed scale follows from, and what it is without one. On disk (plan
// proto): do not renumber.
enum class AmaxAlgorithm : uint8_t {
  kMax = 0,         // the largest amax
  kMostRecent = 1,  // the newest
};
enum class FirstScale : uint8_t {
  kCurrent = 0,  // that of the tensor's own amax
  kOnes = 1,     // 1
};

// Scales of these recipes follow from no amax below the job's epsilon.
constexpr bool HasAmaxEpsilon(Recipe recipe) {
  return recipe == Recipe::kCurrent || recipe == Recipe::kFloat8Block;
}
inline constexpr double kMostAmaxEpsilon = 1.0;

// Two codes of NVFP4 share a byte; all others have one of their own.
constexpr int64_t CodesPerByte(Recipe recipe) {
  return recipe == Recipe::kNvFp4 ? 2 : 1;
}

}  // namespace ravel::plan
