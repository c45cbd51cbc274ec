#pragma once

// Blocks of the operands of a gemm, copied as fp32 into the order in which cpu/gemm_blocks.h reads
// them.

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/tile_gemm.h"

namespace ravel::kernels::cpu {

// Elements from one packed strip of kWidth to the next: what is written side by side must not lie
// a power of two apart, or it shares cache sets.
template <int64_t kWidth>
inline constexpr int64_t StripStep(int64_t depth) {
  return depth * kWidth + 8 * kCacheLineElements;
}

// Element (i, p) of an operand is data[i * step + p], or data[p * step + i] if `transposed`: i
// counts the outer index, p the inner one. `available` outer indices from the first one on may be
// read.
template <typename E>
struct PackSource {
  const E* data;
  int64_t step;
  bool transposed;
  int64_t available;

  float At(int64_t i, int64_t p) const {
    return ValueOf(transposed ? data[p * step + i] : data[i * step + p]);
  }
  // From outer index i and inner index p on.
  PackSource From(int64_t i, int64_t p) const {
    const E* at = transposed ? data + p * step + i : data + i * step + p;
    return {at, step, transposed, available - i};
  }
};

// out[p * kWidth + i] for p < depth and i < kWidth, zero where i is not available; one at a time.
template <int64_t kWidth, typename E>
inline void PackOneByOne(const PackSource<E>& source, int64_t begin, int64_t depth, float* out) {
  for (int64_t p = begin; p < depth; ++p) {
    for (int64_t i = 0; i < kWidth; ++i) {
      out[p * kWidth + i] = i < source.available ? source.At(i, p) : 0.0f;
    }
  }
}

// The same by whole vectors. Where eight does not divide kWidth they reach into what follows a row
// of `out`: up to seven elements are written there, and must be packed later.
template <int64_t kWidth>
inline constexpr int64_t kPackVectors = DivCeil(kWidth, int64_t{8});

template <typename V, int64_t kWidth, typename E>
inline void PackRowsOfStrip(const PackSource<E>& source, int64_t depth, float* out) {
  int64_t p = 0;
  for (; p + 8 <= depth; p += 8) {
    if (p % kCacheLineElements == 0) {
      // The rows of the next strip: too short for the processor to see them coming.
      for (int64_t i = kWidth; i < 2 * kWidth; ++i) {
        __builtin_prefetch(source.data + i * source.step + p);
      }
    }
    // The last vectors first: what they write beyond a row belongs to the first of the next one.
    for (int64_t i = kPackVectors<kWidth> - 1; i >= 0; --i) {
      V::Transpose8x8(
          source.data + i * 8 * source.step + p, source.step, out + p * kWidth + i * 8, kWidth);
    }
  }
  PackOneByOne<kWidth>(source, p, depth, out);
}

// Inner indices [begin, end) of a strip of a transposed source. The last row of all is written
// exactly: the strip behind may be packed already.
template <typename V, int64_t kWidth, typename E>
inline void PackColumnsOfStrip(
    const PackSource<E>& source, int64_t begin, int64_t end, int64_t depth, float* out) {
  constexpr int64_t kLast = (kPackVectors<kWidth> - 1) * 8;
  for (int64_t p = begin; p < end; ++p) {
    const E* from = source.data + p * source.step;
    float* to = out + p * kWidth;
    __builtin_prefetch(from + (end - begin) * source.step);
    for (int64_t i = 0; i < kLast; i += 8) {
      V::Store(to + i, V::Load(from + i));
    }
    if (kWidth % 8 != 0 && p + 1 == depth) {
      V::Store(to + kLast, V::Load(from + kLast), SomeLanes{static_cast<int>(kWidth - kLast)});
    } else {
      V::Store(to + kLast, V::Load(from + kLast));
    }
  }
}

// `count` outer indices in strips of kWidth, each [depth][kWidth]. A transposed source is read a
// few whole rows at a time, as the processor's prefetchers like it.
template <typename V, int64_t kWidth, typename E>
inline void PackStrips(const PackSource<E>& source, int64_t count, int64_t depth, float* out) {
  constexpr int64_t kRowsAtATime = 8;
  const int64_t by_vectors =
      std::min(count, std::max<int64_t>(0, source.available - 8 * kPackVectors<kWidth> + 1));
  int64_t i = 0;
  if (source.transposed) {
    for (int64_t p = 0; p < depth; p += kRowsAtATime) {
      for (i = 0; i < by_vectors; i += kWidth) {
        PackColumnsOfStrip<V, kWidth>(source.From(i, 0),
                                      p,
                                      std::min(depth, p + kRowsAtATime),
                                      depth,
                                      out + i / kWidth * StripStep<kWidth>(depth));
      }
    }
  }
  for (; i < by_vectors; i += kWidth) {
    PackRowsOfStrip<V, kWidth>(
        source.From(i, 0), depth, out + i / kWidth * StripStep<kWidth>(depth));
  }
  for (; i < count; i += kWidth) {
    PackOneByOne<kWidth>(source.From(i, 0), 0, depth, out + i / kWidth * StripStep<kWidth>(depth));
  }
}

}  // namespace ravel::kernels::cpu
