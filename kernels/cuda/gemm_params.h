#pragma once

// Arguments of the kernels of gemms; a part of kernel_params.h, whose rules hold here.

#include <cstdint>

namespace ravel::kernels::cuda {

struct GemmParams {
  const void* a;
  const void* b;
  void* c;
  const float* scale_a;  // of the sums; null is absent
  const float* scale_b;
  int64_t a_row;  // elements from a[i, p] to a[i + 1, p], after the transposition
  int64_t a_column;
  int64_t b_row;
  int64_t b_column;
  int64_t c_stride;
  int64_t m;
  int64_t n;
  int64_t k;
  int32_t accumulate;
  int32_t unused = 0;
};

// One thread: to = {*a * *b, beta}, as a gemm reads its factors from memory of the device.
struct GemmFactorsParams {
  const float* a;
  const float* b;
  float* to;  // [2]
  float beta;
  int32_t unused = 0;
};

}  // namespace ravel::kernels::cuda
