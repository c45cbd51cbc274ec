#pragma once

// The Hadamard transform with signs that NVFP4 puts before blocks along rows:
// y_j = 1/4 * sum over i of s_i x_i (-1)^popcount(i & j), for 16 values. It is orthogonal, so a
// matrix product that sums over these 16 keeps its value if both operands are transformed.

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ravel::kernels::scalar {

inline constexpr int kHadamardSize = 16;
inline constexpr float kHadamardFactor = 0.25f;

// s = + + + - + - - - - - - + - + - -.
constexpr float HadamardSign(size_t i) {
  constexpr uint32_t kNegative = 0b1101'0111'1110'1000;
  return (kNegative >> i & 1u) != 0 ? -1.0f : 1.0f;
}

// x_i and x_j become their sum and their difference.
constexpr void HadamardPair(float& low, float& high) {
  const float difference = low - high;
  low = low + high;
  high = difference;
}

// Indices are constants throughout, so that a device keeps all 16 in registers.
template <size_t kStride, size_t... kPair>
constexpr void HadamardStage(float (&x)[kHadamardSize], std::index_sequence<kPair...>) {
  (HadamardPair(x[kPair / kStride * 2 * kStride + kPair % kStride],
                x[kPair / kStride * 2 * kStride + kPair % kStride + kStride]),
   ...);
}
template <size_t... kIndex>
constexpr void HadamardSigns(float (&x)[kHadamardSize], std::index_sequence<kIndex...>) {
  ((x[kIndex] *= HadamardSign(kIndex)), ...);
}
template <size_t... kIndex>
constexpr void HadamardScale(float (&x)[kHadamardSize], std::index_sequence<kIndex...>) {
  ((x[kIndex] *= kHadamardFactor), ...);
}

// In this order: signs, stages of strides 1, 2, 4, 8, the factor. Every operation rounds once.
constexpr void Hadamard16(float (&x)[kHadamardSize]) {
  constexpr auto kAll = std::make_index_sequence<kHadamardSize>();
  constexpr auto kPairs = std::make_index_sequence<kHadamardSize / 2>();
  HadamardSigns(x, kAll);
  HadamardStage<1>(x, kPairs);
  HadamardStage<2>(x, kPairs);
  HadamardStage<4>(x, kPairs);
  HadamardStage<8>(x, kPairs);
  HadamardScale(x, kAll);
}

}  // namespace ravel::kernels::scalar
