#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda::testing {

// One sequence of 8B's heads in its fused qkv rows.
inline RavelCudaAttention Described(int64_t sequences, bool backward) {
  RavelCudaAttention a = {};
  a.sequences = sequences;
  a.sequence_tokens = 8192;
  a.query_heads = 32;
  a.kv_heads = 8;
  a.head_size = 128;
  a.q_stride = a.k_stride = a.v_stride = 48 * 128;
  a.out_stride = 32 * 128;
  a.scale = 0.125f;
  a.type = static_cast<int32_t>(DType::kBF16);
  if (backward) {
    a.dout_stride = 32 * 128;
    a.dq_stride = a.dk_stride = a.dv_stride = 48 * 128;
    a.backward = 1;
  }
  return a;
}

}  // namespace ravel::kernels::cuda::testing
