#pragma once

#include <cstdint>

#include "kernels/scalar/decide_step.h"

namespace ravel::optim {

// Decisions that all ranks agree on in each step's statistics exchange: the largest value of any
// rank wins.
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
