#pragma once

#include <cstdint>

#include "kernels/scalar/decide_step.h"

namespace ravel::optim {

// What all ranks agree on in each step's statistics exchange, beside numbers: the larger of
// everybody's values wins.
struct ControlWord {
  int64_t save_sequence = 0;  // newest save request that a rank has heard of
  int64_t stop = 0;           // 1: stop after that save
  int64_t saving = 0;         // 1: a rank still writes its last save
};

// Hosts and devices decide by the same rule.
using StepTotals = kernels::scalar::StepTotals;
using StepDecision = kernels::scalar::StepDecision;
using kernels::scalar::DecideStep;

}  // namespace ravel::optim
