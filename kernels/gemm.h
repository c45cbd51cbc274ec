#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

enum class Transpose { kNo, kYes };
// kOverwrite is BLAS beta 0 (c may hold garbage, NaN included), kAccumulate is beta 1.
enum class Output { kOverwrite, kAccumulate };

// c [m, n] (=|+=) op(a) [m, k] * op(b) [k, n], all row-major, sums in fp32. Views may have a row
// stride. One thread; the sum over k is never split between threads, so equal shapes give equal
// bits. m, n or k may be 0 (k = 0 with kOverwrite writes zeros). 2mnk FLOPs.
struct GemmArgs {
  TensorView a;
  Transpose transpose_a = Transpose::kNo;
  TensorView b;
  Transpose transpose_b = Transpose::kNo;
  TensorView c;
  Output output = Output::kOverwrite;
};
void Gemm(Stream& stream, const GemmArgs& args);

// Threads that BLAS may use in this process; a trainer sets 1 before its first Gemm.
void SetBlasThreads(int threads);

}  // namespace ravel::kernels
