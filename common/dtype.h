#pragma once

// Element types. Standard library only.

#include <cstdint>
#include <optional>
#include <string_view>

namespace ravel {

// Values are on disk (plan, manifest): do not renumber.
enum class DType : uint8_t {
  kF32 = 1,
  kF16 = 2,
  kBF16 = 3,
  kF64 = 4,
  kI64 = 5,
  kI32 = 6,
  kI16 = 7,
  kI8 = 8,
  kU64 = 9,
  kU32 = 10,
  kU16 = 11,
  kU8 = 12,
  kBool = 13,
  kF8E4M3 = 14,
  kF8E5M2 = 15,
};

// Bytes of one element.
int64_t DTypeBytes(DType dtype);
// The safetensors name: "F32", "BF16", "F8_E4M3", ...
std::string_view DTypeName(DType dtype);
// The inverse of DTypeName; empty for an unknown name.
std::optional<DType> ParseDType(std::string_view name);

// bf16 and fp16 as bit patterns. Narrowing rounds to nearest even; NaN stays NaN.
float Bf16ToFloat(uint16_t bits);
uint16_t FloatToBf16(float value);
float Fp16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float value);
// fp8 E4M3 as a bit pattern: 448 is the largest, 0x7F and 0xFF are NaN, there is no infinity.
float Fp8E4M3ToFloat(uint8_t bits);

}  // namespace ravel
