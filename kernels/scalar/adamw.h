#pragma once

// One element of the AdamW update; the order of operations is the specification (kernels/adamw.h).

#include <cmath>
#include <cstdint>

namespace ravel::kernels::scalar {

// base^exponent by binary exponentiation, most significant bit first, multiplications only.
// exponent >= 0.
constexpr double PowerByMultiplication(double base, int64_t exponent) {
  double power = 1.0;
  for (int bit = 62; bit >= 0; --bit) {
    power *= power;
    if ((exponent >> bit) & 1) {
      power *= base;
    }
  }
  return power;
}

struct AdamWElement {
  float p;
  float m;
  float v;
};

// `Scalars` has the fields of kernels::UpdateScalars. Every operation rounds once; fma only where
// it is written.
template <typename Scalars>
constexpr AdamWElement AdamWStep(const Scalars& s, AdamWElement e, float gradient) {
  const float g = gradient * s.gradient_scale;
  const float m = std::fma(s.one_minus_beta1, g, s.beta1 * e.m);
  const float v = std::fma(s.one_minus_beta2 * g, g, s.beta2 * e.v);
  float u = (m * s.inverse_correction1) / (std::sqrt(v * s.inverse_correction2) + s.epsilon);
  if (s.weight_decay != 0.0f) {
    u = std::fma(s.weight_decay, e.p, u);
  }
  return {std::fma(-s.learning_rate, u, e.p), m, v};
}

}  // namespace ravel::kernels::scalar
