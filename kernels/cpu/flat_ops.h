#pragma once

// Ops over flat ranges: optimizer, sums in a fixed order, digest. Their bits are promised by
// formula, on every device.

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

enum class WeightDecay { kOff, kOn };

template <typename V, WeightDecay kDecay>
void AdamWRange(const AdamWArgs& args) {
  float* p = args.p.As<float>();
  const float* g = args.g.As<float>();
  float* m = args.m.As<float>();
  float* v = args.v.As<float>();
  const UpdateScalars& s = args.scalars;
  const auto scale = V::Set1(s.gradient_scale);
  const auto beta1 = V::Set1(s.beta1);
  const auto beta2 = V::Set1(s.beta2);
  const auto rest1 = V::Set1(s.one_minus_beta1);
  const auto rest2 = V::Set1(s.one_minus_beta2);
  const auto correction1 = V::Set1(s.inverse_correction1);
  const auto correction2 = V::Set1(s.inverse_correction2);
  const auto epsilon = V::Set1(s.epsilon);
  const auto decay = V::Set1(s.weight_decay);
  const auto minus_rate = V::Set1(-s.learning_rate);
  ForEachVector(args.p.elements(), [&](int64_t j, auto lanes) {
    const auto gj = V::Mul(V::Load(g + j, lanes), scale);
    const auto pj = V::Load(p + j, lanes);
    const auto mj = V::Fma(rest1, gj, V::Mul(beta1, V::Load(m + j, lanes)));
    const auto vj = V::Fma(V::Mul(rest2, gj), gj, V::Mul(beta2, V::Load(v + j, lanes)));
    const auto root = V::Add(V::Sqrt(V::Mul(vj, correction2)), epsilon);
    auto u = V::Div(V::Mul(mj, correction1), root);
    if constexpr (kDecay == WeightDecay::kOn) {
      u = V::Fma(decay, pj, u);
    }
    V::Store(m + j, mj, lanes);
    V::Store(v + j, vj, lanes);
    V::Store(p + j, V::Fma(minus_rate, u, pj), lanes);
  });
}

template <typename V>
void AdamWUpdateRange(const AdamWArgs& args) {
  if (args.scalars.weight_decay == 0.0f) {
    AdamWRange<V, WeightDecay::kOff>(args);
  } else {
    AdamWRange<V, WeightDecay::kOn>(args);
  }
}

template <typename V>
void TreeAddRange(const TreeAddArgs& args) {
  const float* a = args.a.As<float>();
  const float* b = args.b.As<float>();
  float* out = args.out.As<float>();
  ForEachVector(args.out.elements(), [&](int64_t j, auto lanes) {
    V::Store(out + j, V::Add(V::Load(a + j, lanes), V::Load(b + j, lanes)), lanes);
  });
}

// A binary counter of partial sums: piece i closes one level per trailing one bit of i, older +
// newer.
template <typename V>
void TreeSumRange(const TreeSumArgs& args) {
  const size_t count = args.pieces.size();
  float* out = args.out.As<float>();
  ForEachVector(args.out.elements(), [&](int64_t j, auto lanes) {
    typename V::F open[32];
    size_t depth = 0;
    for (size_t i = 0; i < count; ++i) {
      auto sum = V::Load(args.pieces[i] + j, lanes);
      for (size_t bits = i; (bits & 1) != 0; bits >>= 1) {
        sum = V::Add(open[--depth], sum);
      }
      open[depth++] = sum;
    }
    V::Store(out + j, open[0], lanes);
  });
}

template <typename V>
void AddPair(const float* a, const float* b, float* out, int64_t n) {
  ForEachVector(n, [&](int64_t j, auto lanes) {
    V::Store(out + j, V::Add(V::Load(a + j, lanes), V::Load(b + j, lanes)), lanes);
  });
}

// From this many elements on a sum is not expected to stay in the cache; it is written around it,
// with kPages pages of each array under way at once (cpu/streaming_copy.h).
inline constexpr int64_t kStreamedElements = int64_t{64} << 10;
inline constexpr int64_t kPageElements = 1024;

// From element j on, where `out` is aligned to a cache line. -> the first element that is left.
template <typename V, int64_t kPages>
int64_t StreamSums(const float* a, const float* b, float* out, int64_t j, int64_t n) {
  constexpr int64_t kBlock = kPageElements * kPages;
  for (; j + kBlock <= n; j += kBlock) {
    for (int64_t line = j; line < j + kPageElements; line += 16) {
      for (int64_t at = line; at < line + kBlock; at += kPageElements) {
        if constexpr (kPages > 1) {
          // Beyond the end it only asks for what may not be there, which is harmless.
          __builtin_prefetch(a + at + kBlock);
          __builtin_prefetch(b + at + kBlock);
        }
        V::StoreAround(out + at, V::Add(V::Load(a + at), V::Load(b + at)));
        V::StoreAround(out + at + 8, V::Add(V::Load(a + at + 8), V::Load(b + at + 8)));
      }
    }
  }
  V::FinishStoresAround();
  return j;
}

template <typename V>
void TreeSumTwo(const float* a, const float* b, float* out, int64_t n) {
  int64_t j = 0;
  if (n >= kStreamedElements) {
    const auto misaligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) & 63);
    j = misaligned / static_cast<int64_t>(sizeof(float));
    AddPair<V>(a, b, out, j);
    j = ActivePageOrder() == PageOrder::kOneByOne ? StreamSums<V, 1>(a, b, out, j, n)
                                                  : StreamSums<V, 2>(a, b, out, j, n);
  }
  AddPair<V>(a + j, b + j, out + j, n - j);
}

template <typename V>
void TreeSumFour(const TreeSumArgs& args) {
  const float* a = args.pieces[0];
  const float* b = args.pieces[1];
  const float* c = args.pieces[2];
  const float* d = args.pieces[3];
  float* out = args.out.As<float>();
  ForEachVector(args.out.elements(), [&](int64_t j, auto lanes) {
    const auto left = V::Add(V::Load(a + j, lanes), V::Load(b + j, lanes));
    const auto right = V::Add(V::Load(c + j, lanes), V::Load(d + j, lanes));
    V::Store(out + j, V::Add(left, right), lanes);
  });
}

template <typename V>
void TreeSumPieces(const TreeSumArgs& args) {
  const int64_t n = args.out.elements();
  if (args.pieces.size() == 2) {
    TreeSumTwo<V>(args.pieces[0], args.pieces[1], args.out.As<float>(), n);
  } else if (args.pieces.size() == 4) {
    TreeSumFour<V>(args);
  } else {
    TreeSumRange<V>(args);
  }
}

inline constexpr int64_t kStrands = 128;

// strands[i] += the squares of x[8 i, 8 i + 8), for all sixteen.
template <typename V, size_t... kVector>
inline void AddSquares(const float* x,
                       int64_t blocks,
                       typename V::F* strands,
                       std::index_sequence<kVector...>) {
  typename V::F sum[sizeof...(kVector)] = {strands[kVector]...};
  for (int64_t block = 0; block < blocks; ++block, x += kStrands) {
    const auto step = [&](size_t i) {
      const auto value = V::Load(x + i * 8);
      sum[i] = V::Fma(value, value, sum[i]);
    };
    (step(kVector), ...);
  }
  ((strands[kVector] = sum[kVector]), ...);
}

// 128 strands are sixteen vectors; strand j takes elements j, j + 128, ...
template <typename V>
float RowSumOfSquares(const float* x, int64_t n) {
  typename V::F strands[kStrands / 8];
  for (auto& strand : strands) {
    strand = V::Zero();
  }
  const int64_t blocks = n / kStrands;
  AddSquares<V>(x, blocks, strands, std::make_index_sequence<kStrands / 8>());
  ForEachVector(n - blocks * kStrands, [&](int64_t j, auto lanes) {
    const auto value = V::Load(x + blocks * kStrands + j, lanes);
    strands[j / 8] = V::Fma(value, value, strands[j / 8]);
  });
  return V::ReduceStrands(strands);
}

inline int64_t CountNonFinite(const float* x, int64_t n) {
  constexpr uint32_t kExponent = 0x7F800000u;
  return std::count_if(x, x + n, [](float value) {
    return (std::bit_cast<uint32_t>(value) & kExponent) == kExponent;
  });
}

template <typename V>
void RowSumSquaresRows(const RowSumSquaresArgs& args) {
  const int64_t columns = args.x.columns();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const float* x = args.x.Row<float>(row);
    const float sum = RowSumOfSquares<V>(x, columns);
    args.sums.As<float>()[row] = sum;
    // A finite sum has only finite terms.
    if (args.non_finite != nullptr && !std::isfinite(sum)) {
      *args.non_finite += CountNonFinite(x, columns);
    }
  }
}

}  // namespace ravel::kernels::cpu
