#pragma once

// The rules by which optimizers update an element: one definition for hosts and devices. Each names
// the states that it keeps, and gives new values from old ones; the order of its operations is its
// specification, and every operation rounds once. A rule that is added here, to the enumeration and
// to ForEachRule, exists on both backends, in every form of main weights.

#include "kernels/scalar/adamw.h"

namespace ravel::kernels {

enum class ElementRule : int32_t { kAdamW = 0 };

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

// visit(rule) for each rule.
template <typename Visit>
constexpr void ForEachRule(const Visit& visit) {
  visit(AdamWElementRule{});
}

// A rule's variants: type of the gradient, then, where it has a choice, of the states.
template <typename Rule>
constexpr int VariantOf(bool bf16_gradient, bool bf16_states) {
  return Rule::kFirstVariant + (Rule::kNarrowStates
                                    ? 2 * (bf16_gradient ? 1 : 0) + (bf16_states ? 1 : 0)
                                    : (bf16_gradient ? 1 : 0));
}

}  // namespace scalar
}  // namespace ravel::kernels
