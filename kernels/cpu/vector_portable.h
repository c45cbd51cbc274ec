#pragma once

// Eight fp32 lanes as plain loops: the same operations, in the same order, as vector_avx2.h, so
// that an op written over either type gives the same bits. Both types have the members below.
// Memory holds fp32 (float), bf16 (uint16_t) or fp16 (Fp16): loads of these widen, exactly, and
// stores round to nearest, ties to even.

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"

namespace ravel::kernels::cpu {

// Number of lanes that an access touches: all eight, or the first `count` (the others read as +0
// and are not written).
struct AllLanes {};
struct SomeLanes {
  int count;
};

// An fp16 in memory; a type of its own, where a bf16 is its bits.
struct Fp16 {
  uint16_t bits;
};

// An element of memory as fp32.
inline float ValueOf(float value) {
  return value;
}
inline float ValueOf(uint16_t bf16) {
  return scalar::Bf16Value(bf16);
}
inline float ValueOf(Fp16 fp16) {
  return scalar::Fp16Value(fp16.bits);
}
// An fp32 as an element, rounded.
inline void RoundTo(float value, uint16_t& bf16) {
  bf16 = scalar::Bf16Nearest(value);
}
inline void RoundTo(float value, Fp16& fp16) {
  fp16.bits = scalar::Fp16Nearest(value);
}

struct PortableVector {
  using F = std::array<float, 8>;
  // Sixteen lanes, one row of a packed panel; and how many of them the registers can accumulate
  // (cpu/tile_gemm.h).
  using P = std::array<float, 16>;
  static constexpr int64_t kStripRows = 6;
  static constexpr int64_t kStripPanels = 1;

  static P ZeroPanel() { return {}; }
  static P LoadPanel(const float* p) {
    P r;
    std::memcpy(r.data(), p, sizeof(r));
    return r;
  }
  template <typename E>
  static P LoadPanel(const E* p) {
    P r;
    for (size_t i = 0; i < 16; ++i) {
      r[i] = ValueOf(p[i]);
    }
    return r;
  }
  static void StorePanel(float* p, const P& x) { std::memcpy(p, x.data(), sizeof(x)); }
  // a * b + c.
  static P FmaPanel(float a, const P& b, const P& c) {
    P r;
    for (size_t i = 0; i < 16; ++i) {
      r[i] = std::fma(a, b[i], c[i]);
    }
    return r;
  }

  static P AddPanel(const P& a, const P& b) {
    P r;
    for (size_t i = 0; i < 16; ++i) {
      r[i] = a[i] + b[i];
    }
    return r;
  }

  static F Set1(float x) { return {x, x, x, x, x, x, x, x}; }
  static F Zero() { return Set1(0.0f); }
  static F Load(const float* p, AllLanes = {}) {
    F r;
    std::memcpy(r.data(), p, sizeof(r));
    return r;
  }
  static F Load(const float* p, SomeLanes lanes) {
    F r = Zero();
    std::memcpy(r.data(), p, sizeof(float) * static_cast<size_t>(lanes.count));
    return r;
  }
  static void Store(float* p, const F& x, AllLanes = {}) { std::memcpy(p, x.data(), sizeof(x)); }
  static void Store(float* p, const F& x, SomeLanes lanes) {
    std::memcpy(p, x.data(), sizeof(float) * static_cast<size_t>(lanes.count));
  }
  template <typename E>
  static F Load(const E* p, AllLanes = {}) {
    return Load(p, SomeLanes{8});
  }
  template <typename E>
  static F Load(const E* p, SomeLanes lanes) {
    F r = Zero();
    for (size_t i = 0; i < static_cast<size_t>(lanes.count); ++i) {
      r[i] = ValueOf(p[i]);
    }
    return r;
  }
  template <typename E>
  static void Store(E* p, const F& x, AllLanes = {}) {
    Store(p, x, SomeLanes{8});
  }
  template <typename E>
  static void Store(E* p, const F& x, SomeLanes lanes) {
    for (size_t i = 0; i < static_cast<size_t>(lanes.count); ++i) {
      RoundTo(x[i], p[i]);
    }
  }
  // Past the caches where the processor can; p is a multiple of 32 bytes. FinishStoresAround must
  // follow before another thread is told of them.
  static void StoreAround(float* p, const F& x) { Store(p, x); }
  static void FinishStoresAround() {}

  template <typename Function>
  static F Map(const F& a, const F& b, Function function) {
    F r;
    for (size_t i = 0; i < 8; ++i) {
      r[i] = function(a[i], b[i]);
    }
    return r;
  }
  static F Add(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x + y; });
  }
  static F Sub(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x - y; });
  }
  static F Mul(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x * y; });
  }
  static F Div(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x / y; });
  }
  // The second operand when either is NaN, as the x86 instruction does.
  static F Max(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x > y ? x : y; });
  }
  static F Min(const F& a, const F& b) {
    return Map(a, b, [](float x, float y) { return x < y ? x : y; });
  }
  static F Sqrt(const F& a) {
    return Map(a, a, [](float x, float) { return std::sqrt(x); });
  }
  // a * b + c and c - a * b, rounded once.
  static F Fma(const F& a, const F& b, const F& c) {
    F r;
    for (size_t i = 0; i < 8; ++i) {
      r[i] = std::fma(a[i], b[i], c[i]);
    }
    return r;
  }
  static F Fnma(const F& a, const F& b, const F& c) {
    F r;
    for (size_t i = 0; i < 8; ++i) {
      r[i] = std::fma(-a[i], b[i], c[i]);
    }
    return r;
  }
  // Nearest integer, ties to even, for |x| < 2^22.
  static F Round(const F& a) {
    return Map(a, a, [](float x, float) { return std::nearbyint(x); });
  }
  // x * 2^n for integral n in [-126, 127], by adding to the exponent field of x in [0.5, 2].
  static F ScaleByPower(const F& a, const F& n) {
    return Map(a, n, [](float x, float e) {
      const int32_t shift = e == e ? static_cast<int32_t>(e) : 0;
      return std::bit_cast<float>(std::bit_cast<uint32_t>(x) +
                                  (static_cast<uint32_t>(shift) << 23));
    });
  }
  // x where x's lane of `test` is >= limit or NaN, else +0.
  static F ZeroWhereBelow(const F& a, const F& test, float limit) {
    return Map(a, test, [limit](float x, float t) { return t < limit ? 0.0f : x; });
  }
  // x in the first `count` lanes, `other` in the rest.
  static F KeepFirst(const F& a, int count, const F& other) {
    F r = other;
    for (int i = 0; i < 8 && i < count; ++i) {
      r[static_cast<size_t>(i)] = a[static_cast<size_t>(i)];
    }
    return r;
  }
  // to [8, 8] = the transpose of from [8, 8]; rows are from_step and to_step apart. Rows of `to`
  // are written in ascending order: they may overlap, the later one stays.
  template <typename E>
  static void Transpose8x8(const E* from, int64_t from_step, float* to, int64_t to_step) {
    for (int64_t j = 0; j < 8; ++j) {
      for (int64_t i = 0; i < 8; ++i) {
        to[j * to_step + i] = ValueOf(from[i * from_step + j]);
      }
    }
  }
  // The sum of 128 numbers as a tree of adjacent pairs: ((x0+x1)+(x2+x3)) + ...
  static float ReduceStrands(const F* strands) {
    std::array<float, 128> sums;
    for (size_t i = 0; i < 128; ++i) {
      sums[i] = strands[i / 8][i % 8];
    }
    for (size_t width = 128; width > 1; width /= 2) {
      for (size_t i = 0; i < width / 2; ++i) {
        sums[i] = sums[2 * i] + sums[2 * i + 1];
      }
    }
    return sums[0];
  }
  // ((x0+x4)+(x2+x6)) + ((x1+x5)+(x3+x7)).
  static float ReduceAdd(const F& a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  }
  static float ReduceMax(const F& a) {
    const auto larger = [](float x, float y) { return x > y ? x : y; };
    return larger(larger(larger(a[0], a[4]), larger(a[2], a[6])),
                  larger(larger(a[1], a[5]), larger(a[3], a[7])));
  }
};

}  // namespace ravel::kernels::cpu
