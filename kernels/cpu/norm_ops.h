#pragma once

// RMSNorm, RMSNorm per head, LayerNorm; one row at a time, each a few passes over a row that stays
// in cache. Memory-bound. E: of activations and weights, float, uint16_t (bf16) or Fp16; statistics
// and gradients of weights are fp32.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/simd_math.h"
#include "kernels/norm.h"

namespace ravel::kernels::cpu {

// The sums that a row's gradient starts from: zero or what is there already. No gradient: nullptr.
inline float* StartSums(const TensorView& gradient, int64_t n, Output output) {
  if (!gradient.present()) {
    return nullptr;
  }
  if (output == Output::kOverwrite) {
    std::fill_n(gradient.As<float>(), n, 0.0f);
  }
  return gradient.As<float>();
}

template <typename V, typename E>
inline typename V::F SumOfSquares(const E* x, int64_t n) {
  auto squares = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) {
    const auto s = V::Load(x + j, lanes);
    squares = V::Fma(s, s, squares);
  });
  return squares;
}

template <typename V>
inline float RootMeanSquareInverse(typename V::F squares, int64_t n, float epsilon) {
  const float mean = V::ReduceAdd(squares) / static_cast<float>(n);
  return 1.0f / std::sqrt(mean + epsilon);
}

template <typename V, typename E>
inline void ScaleRow(const E* x, const E* w, float rstd, E* y, int64_t n) {
  const auto scale = V::Set1(rstd);
  ForEachVector(n, [&](int64_t j, auto lanes) {
    const auto normal = V::Mul(V::Load(x + j, lanes), scale);
    V::Store(y + j, V::Mul(normal, V::Load(w + j, lanes)), lanes);
  });
}

template <typename V, typename E>
void RmsNormForwardRows(const RmsNormForwardArgs& args) {
  const int64_t hidden = args.x.columns();
  const E* w = args.w.As<E>();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const E* x = args.x.Row<E>(row);
    auto squares = V::Zero();
    if (args.residual.present()) {
      const E* residual = args.residual.Row<E>(row);
      E* sum = args.sum.Row<E>(row);
      ForEachVector(hidden, [&](int64_t j, auto lanes) {
        const auto added = V::Add(V::Load(x + j, lanes), V::Load(residual + j, lanes));
        const auto s = StoreRounded<V>(sum + j, added, lanes);
        squares = V::Fma(s, s, squares);
      });
      x = sum;
    } else {
      squares = SumOfSquares<V>(x, hidden);
      if (args.sum.present() && args.sum.Row<E>(row) != x) {
        std::memmove(args.sum.Row<E>(row), x, sizeof(E) * static_cast<size_t>(hidden));
      }
    }
    const float rstd = RootMeanSquareInverse<V>(squares, hidden, args.epsilon);
    args.rstd.As<float>()[row] = rstd;
    ScaleRow<V>(x, w, rstd, args.y.Row<E>(row), hidden);
  }
}

template <typename E>
struct RmsNormGradientRow {
  const E* dy;
  const E* x;
  const E* w;
  float rstd;
  const E* dresidual;  // or nullptr
  E* dx;
  float* dw;  // or nullptr
};

template <typename V, typename E>
inline void RmsNormBackwardRow(const RmsNormGradientRow<E>& row, int64_t n) {
  // Stores of vectors may alias anything: what lies behind a reference would be read again for
  // each.
  const E* const dy = row.dy;
  const E* const x = row.x;
  const E* const w = row.w;
  const E* const dresidual = row.dresidual;
  E* const dx = row.dx;
  float* const dw = row.dw;
  auto dot = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) {
    const auto wdy = V::Mul(V::Load(w + j, lanes), V::Load(dy + j, lanes));
    dot = V::Fma(wdy, V::Load(x + j, lanes), dot);
  });
  const float mean = V::ReduceAdd(dot) / static_cast<float>(n);
  const auto scale = V::Set1(row.rstd);
  const auto pull = V::Set1(row.rstd * row.rstd * mean);
  ForEachVector(n, [&](int64_t j, auto lanes) {
    const auto dyj = V::Load(dy + j, lanes);
    const auto xj = V::Load(x + j, lanes);
    if (dw != nullptr) {
      V::Store(dw + j, V::Fma(dyj, V::Mul(xj, scale), V::Load(dw + j, lanes)), lanes);
    }
    const auto inner = V::Fnma(xj, pull, V::Mul(V::Load(w + j, lanes), dyj));
    const auto rest = dresidual != nullptr ? V::Load(dresidual + j, lanes) : V::Zero();
    V::Store(dx + j, V::Fma(inner, scale, rest), lanes);
  });
}

template <typename V, typename E>
void RmsNormBackwardRows(const RmsNormBackwardArgs& args) {
  const int64_t hidden = args.dy.columns();
  float* dw = StartSums(args.dw, hidden, args.dw_output);
  for (int64_t row = 0; row < args.dy.rows(); ++row) {
    RmsNormBackwardRow<V, E>(
        {.dy = args.dy.Row<E>(row),
         .x = args.sum.Row<E>(row),
         .w = args.w.As<E>(),
         .rstd = args.rstd.As<float>()[row],
         .dresidual = args.dresidual.present() ? args.dresidual.Row<E>(row) : nullptr,
         .dx = args.dx.Row<E>(row),
         .dw = dw},
        hidden);
  }
}

template <typename V, typename E>
void HeadNormForwardRows(const HeadNormForwardArgs& args) {
  const int64_t size = args.w.elements();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    for (int64_t column = 0; column < args.x.columns(); column += size) {
      const E* x = args.x.Row<E>(row) + column;
      const float rstd = RootMeanSquareInverse<V>(SumOfSquares<V>(x, size), size, args.epsilon);
      ScaleRow<V>(x, args.w.As<E>(), rstd, args.y.Row<E>(row) + column, size);
    }
  }
}

template <typename V, typename E>
void HeadNormBackwardRows(const HeadNormBackwardArgs& args) {
  const int64_t size = args.w.elements();
  float* dw = StartSums(args.dw, size, args.dw_output);
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    for (int64_t column = 0; column < args.x.columns(); column += size) {
      const E* x = args.x.Row<E>(row) + column;
      const float rstd = RootMeanSquareInverse<V>(SumOfSquares<V>(x, size), size, args.epsilon);
      RmsNormBackwardRow<V, E>({.dy = args.dy.Row<E>(row) + column,
                                .x = x,
                                .w = args.w.As<E>(),
                                .rstd = rstd,
                                .dresidual = nullptr,
                                .dx = args.dx.Row<E>(row) + column,
                                .dw = dw},
                               size);
    }
  }
}

template <typename V, typename E>
inline float MeanOfRow(const E* x, int64_t n) {
  auto sum = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) { sum = V::Add(sum, V::Load(x + j, lanes)); });
  return V::ReduceAdd(sum) / static_cast<float>(n);
}

template <typename V, typename E>
inline float VarianceOfRow(const E* x, float mean, int64_t n) {
  const auto shift = V::Set1(mean);
  auto squares = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) {
    auto d = V::Sub(V::Load(x + j, lanes), shift);
    if constexpr (std::is_same_v<decltype(lanes), SomeLanes>) {
      d = V::KeepFirst(d, lanes.count, V::Zero());
    }
    squares = V::Fma(d, d, squares);
  });
  return V::ReduceAdd(squares) / static_cast<float>(n);
}

template <typename V, typename E>
void LayerNormForwardRows(const LayerNormForwardArgs& args) {
  const int64_t hidden = args.x.columns();
  const E* w = args.w.As<E>();
  const E* b = args.b.As<E>();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const E* x = args.x.Row<E>(row);
    if (args.copy.present() && args.copy.Row<E>(row) != x) {
      std::memmove(args.copy.Row<E>(row), x, sizeof(E) * static_cast<size_t>(hidden));
    }
    const float mean = MeanOfRow<V>(x, hidden);
    const float rstd = 1.0f / std::sqrt(VarianceOfRow<V>(x, mean, hidden) + args.epsilon);
    args.mean.As<float>()[row] = mean;
    args.rstd.As<float>()[row] = rstd;
    E* y = args.y.Row<E>(row);
    const auto shift = V::Set1(mean);
    const auto scale = V::Set1(rstd);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto normal = V::Mul(V::Sub(V::Load(x + j, lanes), shift), scale);
      V::Store(y + j, V::Fma(normal, V::Load(w + j, lanes), V::Load(b + j, lanes)), lanes);
    });
  }
}

template <typename V, typename E>
void LayerNormBackwardRows(const LayerNormBackwardArgs& args) {
  const int64_t hidden = args.dy.columns();
  const E* w = args.w.As<E>();
  float* dw = StartSums(args.dw, hidden, args.output);
  float* db = StartSums(args.db, hidden, args.output);
  const auto count = static_cast<float>(hidden);
  for (int64_t row = 0; row < args.dy.rows(); ++row) {
    const E* dy = args.dy.Row<E>(row);
    const E* x = args.x.Row<E>(row);
    const E* dresidual = args.dresidual.present() ? args.dresidual.Row<E>(row) : nullptr;
    E* dx = args.dx.Row<E>(row);
    const auto shift = V::Set1(args.mean.As<float>()[row]);
    const auto scale = V::Set1(args.rstd.As<float>()[row]);
    auto sum = V::Zero();
    auto dot = V::Zero();
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto wdy = V::Mul(V::Load(w + j, lanes), V::Load(dy + j, lanes));
      const auto normal = V::Mul(V::Sub(V::Load(x + j, lanes), shift), scale);
      sum = V::Add(sum, wdy);
      dot = V::Fma(wdy, normal, dot);
    });
    const auto mean = V::Set1(V::ReduceAdd(sum) / count);
    const auto pull = V::Set1(V::ReduceAdd(dot) / count);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto dyj = V::Load(dy + j, lanes);
      const auto normal = V::Mul(V::Sub(V::Load(x + j, lanes), shift), scale);
      if (dw != nullptr) {
        V::Store(dw + j, V::Fma(dyj, normal, V::Load(dw + j, lanes)), lanes);
      }
      if (db != nullptr) {
        V::Store(db + j, V::Add(V::Load(db + j, lanes), dyj), lanes);
      }
      const auto centred = V::Sub(V::Mul(V::Load(w + j, lanes), dyj), mean);
      const auto inner = V::Fnma(normal, pull, centred);
      const auto rest = dresidual != nullptr ? V::Load(dresidual + j, lanes) : V::Zero();
      V::Store(dx + j, V::Fma(inner, scale, rest), lanes);
    });
  }
}

}  // namespace ravel::kernels::cpu
