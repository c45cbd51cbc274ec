#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Sum modulo 2^64, over the elements i of a contiguous range, of mix(((first_index + i + 1) *
// 0x9E3779B97F4A7C15) ^ bits_i): a part of digest64 (common/ckpt/digest.h) of a tensor. Parts of
// any partition add up to the whole.
uint64_t DigestRange(Stream& stream, const TensorView& range, uint64_t first_index);

// *sum += that, without waiting for a device; memory of the stream's backend.
struct AddDigestArgs {
  TensorView range;
  uint64_t first_index = 0;
  uint64_t* sum = nullptr;
};
void AddDigest(Stream& stream, const AddDigestArgs& args);

}  // namespace ravel::kernels
