#pragma once

#include <cstdint>

namespace ravel::optim {

// What all ranks agree on in each step's statistics exchange, beside numbers: the larger of
// everybody's values wins.
struct ControlWord {
  int64_t save_sequence = 0;  // newest save request that a rank has heard of
  int64_t stop = 0;           // 1: stop after that save
};

struct StepTotals {
  double squared_norm = 0;    // of the gradient sums, not yet divided
  int64_t non_finite = 0;     // gradient elements that are NaN or infinite
  int64_t target_tokens = 0;  // of the global batch
  double loss_sum = 0;        // over these tokens
};

struct StepDecision {
  bool apply = false;
  float loss = 0;            // mean over the target tokens
  double grad_norm = 0;      // of the divided gradient, before clipping
  float gradient_scale = 0;  // clip coefficient / denominator: the one place that divides
};

// Skips when a gradient element, or the norm, is not finite, or when there are no target tokens.
// clip_norm 0: no clipping.
StepDecision DecideStep(const StepTotals& totals, double clip_norm);

}  // namespace ravel::optim
