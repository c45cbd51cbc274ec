#pragma once

// The variants that kernels of a type have, and entries of the table for each type: fp32, bf16 and
// fp16 are one template.

#include <cstdint>
#include <vector>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {

template <typename T>
struct VariantsOf;
template <>
struct VariantsOf<float> {
  static constexpr int32_t kScalar = kF32Scalar;
  static constexpr int32_t kVector = kF32Vector;
};
template <>
struct VariantsOf<Bf16> {
  static constexpr int32_t kScalar = kBf16Scalar;
  static constexpr int32_t kVector = kBf16Vector;
  static constexpr int32_t kWideScalar = kMixedScalar;
  static constexpr int32_t kWideVector = kMixedVector;
};
template <>
struct VariantsOf<Fp16> {
  static constexpr int32_t kScalar = kFp16Scalar;
  static constexpr int32_t kVector = kFp16Vector;
  static constexpr int32_t kWideScalar = kFp16MixedScalar;
  static constexpr int32_t kWideVector = kFp16MixedVector;
};

// add(T{}) for each type of activations.
template <typename Add>
void ForEachFloat(Add add) {
  add(float{});
  add(Bf16{});
  add(Fp16{});
}

// A kernel of T with one element at a time, and with accesses of 16 bytes.
template <typename T, typename Params>
void AddPair(Kernel kernel,
             void (*scalar)(Params),
             void (*vector)(Params),
             std::vector<KernelEntry>& entries) {
  entries.push_back(EntryOf(kernel, VariantsOf<T>::kScalar, scalar));
  entries.push_back(EntryOf(kernel, VariantsOf<T>::kVector, vector));
}

// The same that reads T and writes fp32.
template <typename T, typename Params>
void AddWidePair(Kernel kernel,
                 void (*scalar)(Params),
                 void (*vector)(Params),
                 std::vector<KernelEntry>& entries) {
  entries.push_back(EntryOf(kernel, VariantsOf<T>::kWideScalar, scalar));
  entries.push_back(EntryOf(kernel, VariantsOf<T>::kWideVector, vector));
}

}  // namespace ravel::kernels::cuda
