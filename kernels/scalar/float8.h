#pragma once

// fp8 as bits: E4M3 (largest 448 = 0x7E, NaN 0x7F and 0xFF, no infinity), E5M2 (largest 57344 =
// 0x7B, infinity 0x7C), and E8M0, the powers of two from 2^-127 to 2^127 without sign or zero (NaN
// 255). The formats are those of OCP's "8-bit Floating Point" and "Microscaling Formats" 1.0. UE5M3
// is E4M3 with the sign's bit in the exponent: no sign, bias 15, largest 114688 = 0xFE; 0xFF is
// kept free and has no value here.

#include <bit>
#include <cstdint>

namespace ravel::kernels::scalar {

// The bits of a magnitude above which every fp32 is NaN.
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

// A format of one byte: sign, exponent, kMantissa bits of mantissa.
template <int kMantissa, uint32_t kBias, uint32_t kLargest>
struct Float8 {
  static constexpr uint32_t kShift = 23 - kMantissa;  // bits of an fp32 that it lacks
  static constexpr uint32_t kRebias = (127 - kBias) << kMantissa;
  static constexpr uint32_t kSmallestNormal = (128 - kBias) << 23;  // as bits of an fp32

  // To nearest, ties to even, ending at the largest finite value, infinity too; NaN is 0x7F. The
  // sign of zero stays.
  static constexpr uint8_t Nearest(float x) { return static_cast<uint8_t>(NearestCode(x)); }
  // The same as 32 bits: loops over it stay in lanes of one width.
  static constexpr uint32_t NearestCode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > kInfinityBits) {
      return 0x7F;
    }
    uint32_t code = 0;
    if (magnitude < kSmallestNormal) {
      // Adding a number whose last bit is the smallest step rounds to such steps.
      constexpr uint32_t kStep = (128 - kBias + kShift) << 23;
      const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kStep);
      code = std::bit_cast<uint32_t>(sum) - kStep;
    } else {
      const uint32_t odd = (magnitude >> kShift) & 1u;
      code = ((magnitude + (1u << (kShift - 1)) - 1u + odd) >> kShift) - kRebias;
    }
    return SignedCode(bits, code);
  }

  // The value of NearestCode(x) without the code: loops that need the value alone are shorter.
  static constexpr float Rounded(float x) {
    constexpr uint32_t kDropped = (1u << kShift) - 1u;
    constexpr uint32_t kLargestBits = (kLargest + kRebias) << kShift;
    constexpr float kStep = std::bit_cast<float>((128 - kBias + kShift) << 23);
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t odd = (magnitude >> kShift) & 1u;
    const uint32_t normal = (magnitude + (kDropped >> 1) + odd) & ~kDropped;
    const float subnormal = (std::bit_cast<float>(magnitude) + kStep) - kStep;
    const uint32_t rounded =
        magnitude < kSmallestNormal ? std::bit_cast<uint32_t>(subnormal) : normal;
    const uint32_t capped = rounded < kLargestBits ? rounded : kLargestBits;
    return std::bit_cast<float>(magnitude > kInfinityBits ? 0x7FC00000u
                                                          : capped | (bits & 0x80000000u));
  }

  static constexpr float Value(uint8_t code) { return ValueOfCode(code); }
  static constexpr float ValueOfCode(uint32_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    const uint32_t sign = (code & 0x80u) << 24;
    if (magnitude > kLargest) {
      const bool infinity = kMantissa == 2 && magnitude == kLargest + 1;
      return std::bit_cast<float>((infinity ? kInfinityBits : 0x7FC00000u) | sign);
    }
    if (magnitude < (1u << kMantissa)) {
      const float step = std::bit_cast<float>(kSmallestNormal - (uint32_t{kMantissa} << 23));
      return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(magnitude) * step) |
                                  sign);
    }
    return std::bit_cast<float>(((magnitude + kRebias) << kShift) | sign);
  }

  // The sign of `bits` before a code that ends at the largest.
  static constexpr uint8_t Signed(uint32_t bits, uint32_t code) {
    return static_cast<uint8_t>(SignedCode(bits, code));
  }
  static constexpr uint32_t SignedCode(uint32_t bits, uint32_t code) {
    return (code < kLargest ? code : kLargest) | ((bits >> 24) & 0x80u);
  }
};
using E4M3 = Float8<3, 7, 0x7E>;
using E5M2 = Float8<2, 15, 0x7B>;

constexpr uint8_t E4M3Nearest(float x) {
  return E4M3::Nearest(x);
}
constexpr float E4M3Value(uint8_t code) {
  return E4M3::Value(code);
}
constexpr uint8_t E5M2Nearest(float x) {
  return E5M2::Nearest(x);
}
constexpr float E5M2Value(uint8_t code) {
  return E5M2::Value(code);
}

// Up with a probability that is the cut-off fraction, in units of 2^-16 (below the smallest normal
// of the sum as fp32 has it): `random16` is 16 random bits. NaN is 0x7F.
constexpr uint8_t E4M3Stochastic(float x, uint32_t random16) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kInfinityBits) {
    return 0x7F;
  }
  constexpr uint32_t k448 = 0x43E00000u;
  if (magnitude >= k448) {
    return E4M3::Signed(bits, 0x7E);
  }
  if (magnitude < E4M3::kSmallestNormal) {
    const float steps = std::bit_cast<float>(magnitude) * 512.0f +
                        static_cast<float>(static_cast<int32_t>(random16)) * 0x1p-16f;
    return E4M3::Signed(bits, static_cast<uint32_t>(static_cast<int32_t>(steps)));
  }
  return E4M3::Signed(bits, ((magnitude + (random16 << 4)) >> E4M3::kShift) - E4M3::kRebias);
}

struct UE5M3 {
  static constexpr uint32_t kShift = 20;
  static constexpr uint32_t kRebias = (127 - 15) << 3;
  static constexpr uint32_t kSmallestNormal = (128 - 15) << 23;  // as bits of an fp32
  static constexpr uint32_t kLargest = 0xFE;
};

constexpr float UE5M3Value(uint8_t code) {
  return code < 8 ? static_cast<float>(code) * 0x1p-17f
                  : std::bit_cast<float>((code + UE5M3::kRebias) << UE5M3::kShift);
}
// |x| as E4M3Stochastic rounds it, ending at the largest. x is no NaN.
constexpr uint8_t UE5M3Stochastic(float x, uint32_t random16) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
  if (magnitude < UE5M3::kSmallestNormal) {
    const float steps = std::bit_cast<float>(magnitude) * 0x1p17f +
                        static_cast<float>(static_cast<int32_t>(random16)) * 0x1p-16f;
    return static_cast<uint8_t>(static_cast<int32_t>(steps));
  }
  const uint32_t code = ((magnitude + (random16 << 4)) >> UE5M3::kShift) - UE5M3::kRebias;
  return static_cast<uint8_t>(code < UE5M3::kLargest ? code : UE5M3::kLargest);
}

// v >= 0 up to the next power of two. NaN is 255, what is above 2^127 is 2^127, and 0 is 2^-127.
constexpr uint8_t E8M0RoundUp(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFFu;
  if (bits > kInfinityBits) {
    return 255;
  }
  const bool is_smallest = exponent == 0 && mantissa <= 0x400000u;  // 2^-127, or below
  const bool up = mantissa != 0 && exponent < 254 && !is_smallest;
  const uint32_t code = exponent + (up ? 1u : 0u);
  return static_cast<uint8_t>(code < 254 ? code : 254u);
}
// 2^(127 - e).
constexpr float E8M0Multiplier(uint8_t e) {
  if (e == 255) {
    return std::bit_cast<float>(0x7FC00000u);
  }
  return std::bit_cast<float>(e == 254 ? 0x00400000u : (254u - e) << 23);
}
// 2^(e - 127).
constexpr float E8M0Value(uint8_t e) {
  if (e == 255) {
    return std::bit_cast<float>(0x7FC00000u);
  }
  return std::bit_cast<float>(e == 0 ? 0x00400000u : uint32_t{e} << 23);
}

}  // namespace ravel::kernels::scalar
