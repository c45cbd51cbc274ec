#pragma once

#include "common/plan/program/step_program.h"

namespace ravel::plan {

// Waits between the steps of passes, which are on two streams where ranks of `tensor` sum
// activations: each step waits for the last one on the other stream whose operands conflict with
// its own. Steps that touch nothing in common run beside each other. Needs operands.
void OrderSteps(StepProgram& program);

}  // namespace ravel::plan
