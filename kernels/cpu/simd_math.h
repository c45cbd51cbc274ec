#pragma once

// Loops and functions over a vector type (PortableVector or Avx2Vector). An op's arithmetic depends
// on shapes and values alone: loops are cut by index, never by address.

#include <cstdint>
#include <type_traits>

#include "kernels/cpu/vector_portable.h"

namespace ravel::kernels::cpu {

// body(j, lanes) for j = 0, 8, ... < n; the last call may get SomeLanes.
template <typename Body>
inline void ForEachVector(int64_t n, Body body) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    body(j, AllLanes{});
  }
  if (j < n) {
    body(j, SomeLanes{static_cast<int>(n - j)});
  }
}

// Stores x, and returns what was stored: of bf16 the rounded values.
template <typename V, typename E, typename Lanes>
inline typename V::F StoreRounded(E* to, typename V::F x, Lanes lanes) {
  V::Store(to, x, lanes);
  if constexpr (std::is_same_v<E, float>) {
    return x;
  } else {
    return V::Load(to, lanes);
  }
}

// e^x within 1 ulp or so for x in [-87.3, 88.37]; +0 below `floor` (-inf included), e^88.37 above,
// NaN for NaN. Cody and Waite reduction, degree-6 polynomial [Moshier, Cephes]. Below kSoftmaxFloor
// a term cannot be seen beside the row's 1, but its products would be subnormal numbers, which some
// processors multiply a hundred times more slowly.
inline constexpr float kExpFloor = -87.3365448f;
inline constexpr float kSoftmaxFloor = -69.0f;
template <typename V>
inline typename V::F Exp(typename V::F x, float floor = kExpFloor) {
  const auto clamped = V::Max(V::Set1(kExpFloor), V::Min(V::Set1(88.3762589f), x));
  const auto n = V::Round(V::Mul(clamped, V::Set1(1.44269504f)));
  auto r = V::Fnma(n, V::Set1(0.693359375f), clamped);
  r = V::Fnma(n, V::Set1(-2.12194440e-4f), r);
  auto p = V::Fma(V::Set1(1.9875691500e-4f), r, V::Set1(1.3981999507e-3f));
  p = V::Fma(p, r, V::Set1(8.3334519073e-3f));
  p = V::Fma(p, r, V::Set1(4.1665795894e-2f));
  p = V::Fma(p, r, V::Set1(1.6666665459e-1f));
  p = V::Fma(p, r, V::Set1(5.0000001201e-1f));
  p = V::Add(V::Fma(p, V::Mul(r, r), r), V::Set1(1.0f));
  return V::ZeroWhereBelow(V::ScaleByPower(p, n), x, floor);
}

}  // namespace ravel::kernels::cpu
