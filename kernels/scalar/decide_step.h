#pragma once

// Decides a step from its statistics and computes the scalars of its update: one rule for the host
// and for devices. Every operation rounds once.

#include <cmath>
#include <cstdint>

#include "kernels/scalar/adamw.h"

namespace ravel::kernels::scalar {

inline constexpr double kClipEpsilon = 1e-6;

// Words of 8 bytes at the head of a rank's statistics (StatisticsHeader in step_statistics.h;
// asserted where devices are called), and the one that holds the learning rate.
inline constexpr int64_t kStatisticsHeaderWords = 6;
inline constexpr int64_t kStatisticsRateWord = 4;

struct StepTotals {
  double squared_norm = 0;    // of the gradient sums, not yet divided
  int64_t non_finite = 0;     // gradient elements that are NaN or infinite
  int64_t target_tokens = 0;  // of the global batch
  double loss_sum = 0;        // over these tokens
  double loss_scale = 1;      // that the gradient sums are multiplied by, a power of two
};

struct StepDecision {
  bool apply = false;
  float loss = 0;            // mean over the target tokens
  double grad_norm = 0;      // of the divided gradient, before clipping
  float gradient_scale = 0;  // clip coefficient / denominator: the one place that divides
};

// Skips when a gradient element, or the norm, is not finite, or when there are no target tokens.
// clip_norm 0: no clipping.
constexpr StepDecision DecideStep(const StepTotals& totals, double clip_norm) {
  StepDecision decision;
  if (totals.target_tokens == 0) {
    return decision;
  }
  const double tokens = static_cast<double>(totals.target_tokens);
  decision.loss = static_cast<float>(totals.loss_sum / tokens);
  const double denominator = tokens * totals.loss_scale;
  decision.grad_norm = std::sqrt(totals.squared_norm / (denominator * denominator));
  const bool finite = decision.grad_norm - decision.grad_norm == 0.0;
  decision.apply = totals.non_finite == 0 && finite;
  const double clip = clip_norm > 0 ? clip_norm / (decision.grad_norm + kClipEpsilon) : 1.0;
  const double coefficient = clip < 1.0 ? clip : 1.0;
  decision.gradient_scale = static_cast<float>(coefficient / denominator);
  return decision;
}

// Returns what a loss scale becomes after a step: a skipped one lowers it, growth_interval others
// in a row raise it, each within the bounds. `Rule` has the fields of kernels::LossScaleRule.
struct LossScale {
  double scale = 1;
  int64_t good_steps = 0;  // since it last changed
  bool operator==(const LossScale&) const = default;
};
template <typename Rule>
constexpr LossScale NextLossScale(const Rule& rule, const LossScale& now, bool applied) {
  if (applied && now.good_steps + 1 < rule.growth_interval) {
    return {now.scale, now.good_steps + 1};
  }
  const double scale = now.scale * (applied ? rule.growth_factor : rule.backoff_factor);
  const double least = scale < rule.minimum ? rule.minimum : scale;
  return {least > rule.maximum ? rule.maximum : least, 0};
}

// `Scalars` has the fields of kernels::UpdateScalars, `Hyper` those of kernels::UpdateHyper. t:
// updates applied so far + 1.
template <typename Scalars, typename Hyper>
constexpr Scalars ScalarsOfUpdate(const Hyper& hyper, int64_t t, float gradient_scale) {
  Scalars s = {};
  s.beta1 = static_cast<float>(hyper.beta1);
  s.beta2 = static_cast<float>(hyper.beta2);
  s.one_minus_beta1 = 1.0f - s.beta1;
  s.one_minus_beta2 = 1.0f - s.beta2;
  s.inverse_correction1 = static_cast<float>(1.0 / (1.0 - PowerByMultiplication(s.beta1, t)));
  s.inverse_correction2 = static_cast<float>(1.0 / (1.0 - PowerByMultiplication(s.beta2, t)));
  s.epsilon = static_cast<float>(hyper.epsilon);
  s.learning_rate = static_cast<float>(hyper.learning_rate);
  s.weight_decay = static_cast<float>(hyper.weight_decay);
  s.gradient_scale = gradient_scale;
  return s;
}

// `Outcome` has the fields of kernels::StepOutcome; `updates` is what was applied before, and the
// loss scale what the step was computed with. The scalars of a skipped step are nobody's. A step
// without targets says nothing of the scale.
template <typename Outcome, typename Hyper, typename Rule>
constexpr void RecordOutcome(const Hyper& hyper,
                             double learning_rate,
                             double clip_norm,
                             const Rule& rule,
                             StepTotals totals,
                             Outcome& outcome) {
  const bool scales = rule.growth_interval > 0;
  totals.loss_scale = scales ? static_cast<double>(outcome.loss_scale) : 1.0;
  const StepDecision decision = DecideStep(totals, clip_norm);
  outcome.squared_norm = totals.squared_norm;
  outcome.non_finite = totals.non_finite;
  outcome.target_tokens = totals.target_tokens;
  outcome.apply = decision.apply ? 1 : 0;
  outcome.updates += outcome.apply;
  if (scales && totals.target_tokens > 0) {
    const LossScale next =
        NextLossScale(rule, {totals.loss_scale, outcome.good_steps}, decision.apply);
    outcome.loss_scale = static_cast<float>(next.scale);
    outcome.good_steps = next.good_steps;
  }
  Hyper with_rate = hyper;
  with_rate.learning_rate = learning_rate;
  outcome.scalars = ScalarsOfUpdate<decltype(outcome.scalars)>(
      with_rate, outcome.updates, decision.gradient_scale);
}

}  // namespace ravel::kernels::scalar
