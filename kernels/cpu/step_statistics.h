#pragma once

// The CPU's side of kernels/step_statistics.h, and of updates whose scalars lie in memory.

#include "kernels/adamw.h"
#include "kernels/step_statistics.h"

namespace ravel::kernels::cpu {

void AdamWUpdate(const AdamWArgs& args);
void SumLoss(const SumLossArgs& args);
void SumRowNodes(const SumRowNodesArgs& args);
void CountFlags(const CountFlagsArgs& args);
void DecideUpdate(const DecideUpdateArgs& args);

}  // namespace ravel::kernels::cpu
