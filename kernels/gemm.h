#pragma once

#include "common/gemm_scales.h"
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
//
// Codes may have a scale for each block (form_a, form_b: of E4M3 alone): scale_a and scale_b are
// then u8 [ScaleBytes] in that form, at a multiple of 16 bytes, and each product of codes is
// multiplied by those of its blocks. Squares of both operands are not computed by cuBLASLt, nor are
// blocks of 32 beside others.
//
// With kBlocks16, of both operands, a and b are E2M1 codes, two to a byte: u8 [m, k / 2] and
// [n, k / 2], element 2k in the low nibble, k a multiple of 32. Each has a scale of the whole
// beside those of its blocks (whole_a, whole_b: fp32 [1]): c (=|+=) mul(*whole_a, *whole_b) * (a
// b). That product and the factor of c are made at `factors` (fp32 [2]), memory of the device that
// is this gemm's until it is done, because cuBLASLt takes either both from the device or neither.
//
// Where ranks of a tensor axis may cut c, `part` has the size of c on a rank that has one part of
// it. On CUDA the algorithm is then the one for that size, whatever this rank has, and where the
// bits of its elements depend on the size nevertheless, c is computed part by part
// (worker/trainer/gemm_choices.h). On a CPU nothing follows from it: bits do not depend on m and n.
struct GemmPart {
  int64_t rows = 0;  // 0: c is not of parts
  int64_t columns = 0;
  bool present() const { return rows > 0; }
};
struct GemmArgs {
  TensorView a;
  Transpose transpose_a = Transpose::kNo;
  TensorView b;
  Transpose transpose_b = Transpose::kNo;
  TensorView c;
  Output output = Output::kOverwrite;
  TensorView scale_a = {};
  TensorView scale_b = {};
  ScaleForm form_a = ScaleForm::kTensor;
  ScaleForm form_b = ScaleForm::kTensor;
  TensorView whole_a = {};  // of kBlocks16, like the next two
  TensorView whole_b = {};
  TensorView factors = {};
  bool fast_accumulation = false;
  GemmPart part = {};
};
inline bool HasScale(const GemmArgs& args) {
  return args.scale_a.present() || args.scale_b.present();
}
void Gemm(Stream& stream, const GemmArgs& args);

}  // namespace ravel::kernels
