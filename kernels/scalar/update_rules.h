#pragma once

// The rules by which optimizers update an element: one definition for hosts and devices. Each names
// the states that it keeps, and gives new values from old ones; the order of its operations is its
// specification, and every operation rounds once. A rule that is added here, to the enumeration and
// to ForEachRule, exists on both backends, in every form of main weights.

#include "kernels/scalar/adamw.h"

namespace ravel::kernels {

enum class ElementRule : int32_t { kAdamW = 0, kSgd = 1, kSgdNesterov = 2, kLion = 3 };

namespace scalar {

// kStates: 1 (m) or 2 (m and v). kNarrowStates: they may be bf16, m to nearest and v
// stochastically. kFirstVariant: of the device's kernels, of which a rule has two per type of
// states.
struct AdamWElementRule {
  static constexpr ElementRule kRule = ElementRule::kAdamW;
  static constexpr int kStates = 2;
  static constexpr bool kNarrowStates = true;
  static constexpr int kFirstVariant = 0;
  template <typename Scalars>
  static constexpr AdamWElement Step(const Scalars& s, AdamWElement e, float gradient) {
    return AdamWStep(s, e, gradient);
  }
};

// Stochastic gradient descent with momentum beta1 [Polyak 1964], or Nesterov's, and decoupled
// decay: g' = g*s; m = b1*m + g'; u = m, or g' + b1*m; u = u + decay*p unless decay is 0;
// p = p - lr*u. No fused operations: plain loops give its bits.
template <bool kNesterov>
struct SgdElementRule {
  static constexpr ElementRule kRule = kNesterov ? ElementRule::kSgdNesterov : ElementRule::kSgd;
  static constexpr int kStates = 1;
  static constexpr bool kNarrowStates = false;
  static constexpr int kFirstVariant = kNesterov ? 6 : 4;
  template <typename Scalars>
  static constexpr AdamWElement Step(const Scalars& s, AdamWElement e, float gradient) {
    const float g = gradient * s.gradient_scale;
    const float m = s.beta1 * e.m + g;
    float u = kNesterov ? g + s.beta1 * m : m;
    if (s.weight_decay != 0.0f) {
      u = u + s.weight_decay * e.p;
    }
    return {e.p - s.learning_rate * u, m, 0.0f};
  }
};

// Lion [Chen et al. 2023] with decoupled decay: g' = g*s; u = sign(fma(1-b1, g', b1*m)), of which
// sign(0) = 0; u = fma(decay, p, u) unless decay is 0; p = fma(-lr, u, p);
// m = fma(1-b2, g', b2*m). The update sees the old m.
struct LionElementRule {
  static constexpr ElementRule kRule = ElementRule::kLion;
  static constexpr int kStates = 1;
  static constexpr bool kNarrowStates = true;
  static constexpr int kFirstVariant = 8;
  template <typename Scalars>
  static constexpr AdamWElement Step(const Scalars& s, AdamWElement e, float gradient) {
    const float g = gradient * s.gradient_scale;
    const float direction = std::fma(s.one_minus_beta1, g, s.beta1 * e.m);
    float u = (direction > 0.0f ? 1.0f : 0.0f) - (direction < 0.0f ? 1.0f : 0.0f);
    if (s.weight_decay != 0.0f) {
      u = std::fma(s.weight_decay, e.p, u);
    }
    const float m = std::fma(s.one_minus_beta2, g, s.beta2 * e.m);
    return {std::fma(-s.learning_rate, u, e.p), m, 0.0f};
  }
};

// visit(rule) for each rule.
template <typename Visit>
constexpr void ForEachRule(const Visit& visit) {
  visit(AdamWElementRule{});
  visit(SgdElementRule<false>{});
  visit(SgdElementRule<true>{});
  visit(LionElementRule{});
}

// A rule's variants: type of the gradient, then, where it has a choice, of the states.
template <typename Rule>
constexpr int VariantOf(bool bf16_gradient, bool bf16_states) {
  return Rule::kFirstVariant + (Rule::kNarrowStates
                                    ? 2 * (bf16_gradient ? 1 : 0) + (bf16_states ? 1 : 0)
                                    : (bf16_gradient ? 1 : 0));
}

// A rule's variants where the types of its states are values.
template <typename Rule>
constexpr int GroupedVariantOf(bool bf16_gradient) {
  return 2 * static_cast<int>(Rule::kRule) + (bf16_gradient ? 1 : 0);
}

}  // namespace scalar
}  // namespace ravel::kernels
