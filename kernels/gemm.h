#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

enum class Transpose { kNo, kYes };
// kOverwrite is BLAS beta 0 (c may hold garbage, NaN included), kAccumulate is beta 1.
enum class Output { kOverwrite, kAccumulate };

// c [m, n] (=|+=) op(a) [m, k] * op(b) [k, n], all row-major, sums in fp32. Views may have a row
// stride. One thread. The bits of an element depend on its row, its column and k alone: not on m,
// n, the processor or the number of threads (cpu/gemm_blocks.h). m, n or k may be 0 (k = 0 with
// kOverwrite writes zeros). 2mnk FLOPs.
//
// Where scale_a or scale_b is present (fp32 [1], both optional), c (=|+=) s * (op(a) op(b)) with
// s = mul(*scale_a, *scale_b): the complete sum of an element is multiplied in fp32, then added to
// c, then rounded if c is bf16. On CUDA such a gemm runs in our own kernel, without tensor cores:
// cuBLASLt would take a scale from device memory only together with the factor of c.
//
// On CUDA a and b may be codes (kF8E4M3, kF8E5M2, not both the latter) that lie along k:
// transpose_a kNo, transpose_b kYes. Both scales are present, sizes, strides and addresses are
// multiples of 16. cuBLASLt alone computes these. Where sums may be fast, they lose low bits on
// some devices.
struct GemmArgs {
  TensorView a;
  Transpose transpose_a = Transpose::kNo;
  TensorView b;
  Transpose transpose_b = Transpose::kNo;
  TensorView c;
  Output output = Output::kOverwrite;
  TensorView scale_a = {};
  TensorView scale_b = {};
  bool fast_accumulation = false;
};
inline bool HasScale(const GemmArgs& args) {
  return args.scale_a.present() || args.scale_b.present();
}
void Gemm(Stream& stream, const GemmArgs& args);

}  // namespace ravel::kernels
