#pragma once

// CPU ops that are plain loops, or loops around the vectorised ones. Shapes are already checked
// (kernels/dispatch.cc).

#include <cstdint>

#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/philox.h"
#include "kernels/rope.h"

namespace ravel::kernels::cpu {

void Gemm(const GemmArgs& args);
void LinearCrossEntropyForward(const LinearCrossEntropyForwardArgs& args);
void LinearCrossEntropyTrain(const LinearCrossEntropyTrainArgs& args);
void EmbeddingForward(const EmbeddingForwardArgs& args);
void BuildRopeTable(const RopeTableArgs& args);
void InitNormal(const InitNormalArgs& args);
uint64_t DigestRange(const TensorView& range, uint64_t first_index);
double TreeSumDouble(const double* values, int64_t count);

}  // namespace ravel::kernels::cpu
