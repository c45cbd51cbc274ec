#include "worker/optim/decide_step.h"

#include <cmath>

namespace ravel::optim {
namespace {

constexpr double kClipEpsilon = 1e-6;

}  // namespace

StepDecision DecideStep(const StepTotals& totals, double clip_norm) {
  StepDecision decision;
  if (totals.target_tokens == 0) {
    return decision;
  }
  const auto denominator = static_cast<double>(totals.target_tokens);
  decision.loss = static_cast<float>(totals.loss_sum / denominator);
  decision.grad_norm = std::sqrt(totals.squared_norm / (denominator * denominator));
  decision.apply = totals.non_finite == 0 && std::isfinite(decision.grad_norm);
  const double clip = clip_norm > 0 ? clip_norm / (decision.grad_norm + kClipEpsilon) : 1.0;
  const double coefficient = clip < 1.0 ? clip : 1.0;
  decision.gradient_scale = static_cast<float>(coefficient / denominator);
  return decision;
}

}  // namespace ravel::optim
