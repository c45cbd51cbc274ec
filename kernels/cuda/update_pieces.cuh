#pragma once

// Device code that the updates of all optimizers share: pieces of a table, and the two forms of a
// main weight.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_params.h"
#include "kernels/scalar/bfloat16.h"

namespace ravel::kernels::cuda {

// The `index`-th piece that a block takes. Without a table: of all elements.
__device__ inline DeviceUpdatePiece PieceAt(const DevicePieces& pieces, int64_t index) {
  if (pieces.table != nullptr) {
    const DeviceUpdatePiece& piece = pieces.table[index];
    return {piece.offset, piece.elements, piece.first_index, piece.site, piece.decays, 0, 0};
  }
  const int64_t begin = index * kBlockElements;
  const int64_t rest = pieces.elements - begin;
  return {begin,
          rest < kBlockElements ? rest : kBlockElements,
          pieces.first_index + begin,
          pieces.site,
          1,
          0,
          0};
}

__device__ inline DeviceUpdateScalars ScalarsFor(const DeviceUpdatePiece& piece,
                                                 DeviceUpdateScalars scalars) {
  if (piece.decays == 0) {
    scalars.weight_decay = 0.0f;
  }
  return scalars;
}

// `Params` has main_weight, weight and remainder: fp32, or a bf16 weight with its remainder. Beside
// fp32 the weight may be fp16, which is the nearest.
template <typename Params>
__device__ inline float MainWeightAt(const Params& p, int64_t i) {
  return p.main_weight != nullptr
             ? p.main_weight[i]
             : scalar::JoinOf({.weight = p.weight[i], .remainder = p.remainder[i]});
}

template <typename Params>
__device__ inline void StoreMainWeight(const Params& p, int64_t i, float x) {
  const scalar::SplitWeight split = scalar::SplitOf(x);
  if (p.main_weight != nullptr) {
    p.main_weight[i] = x;
  } else {
    p.remainder[i] = split.remainder;
  }
  if (p.weight != nullptr) {
    p.weight[i] = p.fp16_weight != 0 ? Fp16NearestBits(x) : split.weight;
  }
}

}  // namespace ravel::kernels::cuda
