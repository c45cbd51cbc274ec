#pragma once

// RMSNorm, RMSNorm per head, LayerNorm; one row at a time, each a few passes over a row that stays
// in cache. Memory-bound.

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

template <typename V>
inline typename V::F SumOfSquares(const float* x, int64_t n) {
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

template <typename V>
inline void ScaleRow(const float* x, const float* w, float rstd, float* y, int64_t n) {
  const auto scale = V::Set1(rstd);
  ForEachVector(n, [&](int64_t j, auto lanes) {
    const auto normal = V::Mul(V::Load(x + j, lanes), scale);
    V::Store(y + j, V::Mul(normal, V::Load(w + j, lanes)), lanes);
  });
}

template <typename V>
void RmsNormForwardRows(const RmsNormForwardArgs& args) {
  const int64_t hidden = args.x.columns();
  const float* w = args.w.As<float>();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const float* x = args.x.Row<float>(row);
    auto squares = V::Zero();
    if (args.residual.present()) {
      const float* residual = args.residual.Row<float>(row);
      float* sum = args.sum.Row<float>(row);
      ForEachVector(hidden, [&](int64_t j, auto lanes) {
        const auto s = V::Add(V::Load(x + j, lanes), V::Load(residual + j, lanes));
        V::Store(sum + j, s, lanes);
        squares = V::Fma(s, s, squares);
      });
      x = sum;
    } else {
      squares = SumOfSquares<V>(x, hidden);
      if (args.sum.present() && args.sum.Row<float>(row) != x) {
        std::memmove(args.sum.Row<float>(row), x, sizeof(float) * static_cast<size_t>(hidden));
      }
    }
    const float rstd = RootMeanSquareInverse<V>(squares, hidden, args.epsilon);
    args.rstd.As<float>()[row] = rstd;
    ScaleRow<V>(x, w, rstd, args.y.Row<float>(row), hidden);
  }
}

struct RmsNormGradientRow {
  const float* dy;
  const float* x;
  const float* w;
  float rstd;
  const float* dresidual;  // or nullptr
  float* dx;
  float* dw;  // or nullptr
};

template <typename V>
inline void RmsNormBackwardRow(const RmsNormGradientRow& row, int64_t n) {
  // Stores of vectors may alias anything: what lies behind a reference would be read again for
  // each.
  const float* const dy = row.dy;
  const float* const x = row.x;
  const float* const w = row.w;
  const float* const dresidual = row.dresidual;
  float* const dx = row.dx;
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

template <typename V>
void RmsNormBackwardRows(const RmsNormBackwardArgs& args) {
  const int64_t hidden = args.dy.columns();
  float* dw = StartSums(args.dw, hidden, args.dw_output);
  for (int64_t row = 0; row < args.dy.rows(); ++row) {
    RmsNormBackwardRow<V>(
        {.dy = args.dy.Row<float>(row),
         .x = args.sum.Row<float>(row),
         .w = args.w.As<float>(),
         .rstd = args.rstd.As<float>()[row],
         .dresidual = args.dresidual.present() ? args.dresidual.Row<float>(row) : nullptr,
         .dx = args.dx.Row<float>(row),
         .dw = dw},
        hidden);
  }
}

template <typename V>
void HeadNormForwardRows(const HeadNormForwardArgs& args) {
  const int64_t size = args.w.elements();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    for (int64_t column = 0; column < args.x.columns(); column += size) {
      const float* x = args.x.Row<float>(row) + column;
      const float rstd = RootMeanSquareInverse<V>(SumOfSquares<V>(x, size), size, args.epsilon);
      ScaleRow<V>(x, args.w.As<float>(), rstd, args.y.Row<float>(row) + column, size);
    }
  }
}

template <typename V>
void HeadNormBackwardRows(const HeadNormBackwardArgs& args) {
  const int64_t size = args.w.elements();
  float* dw = StartSums(args.dw, size, args.dw_output);
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    for (int64_t column = 0; column < args.x.columns(); column += size) {
      const float* x = args.x.Row<float>(row) + column;
      const float rstd = RootMeanSquareInverse<V>(SumOfSquares<V>(x, size), size, args.epsilon);
      RmsNormBackwardRow<V>({.dy = args.dy.Row<float>(row) + column,
                             .x = x,
                             .w = args.w.As<float>(),
                             .rstd = rstd,
                             .dresidual = nullptr,
                             .dx = args.dx.Row<float>(row) + column,
                             .dw = dw},
                            size);
    }
  }
}

template <typename V>
inline float MeanOfRow(const float* x, int64_t n) {
  auto sum = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) { sum = V::Add(sum, V::Load(x + j, lanes)); });
  return V::ReduceAdd(sum) / static_cast<float>(n);
}

template <typename V>
inline float VarianceOfRow(const float* x, float mean, int64_t n) {
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

template <typename V>
void LayerNormForwardRows(const LayerNormForwardArgs& args) {
  const int64_t hidden = args.x.columns();
  const float* w = args.w.As<float>();
  const float* b = args.b.As<float>();
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const float* x = args.x.Row<float>(row);
    if (args.copy.present() && args.copy.Row<float>(row) != x) {
      std::memmove(args.copy.Row<float>(row), x, sizeof(float) * static_cast<size_t>(hidden));
    }
    const float mean = MeanOfRow<V>(x, hidden);
    const float rstd = 1.0f / std::sqrt(VarianceOfRow<V>(x, mean, hidden) + args.epsilon);
    args.mean.As<float>()[row] = mean;
    args.rstd.As<float>()[row] = rstd;
    float* y = args.y.Row<float>(row);
    const auto shift = V::Set1(mean);
    const auto scale = V::Set1(rstd);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto normal = V::Mul(V::Sub(V::Load(x + j, lanes), shift), scale);
      V::Store(y + j, V::Fma(normal, V::Load(w + j, lanes), V::Load(b + j, lanes)), lanes);
    });
  }
}

template <typename V>
void LayerNormBackwardRows(const LayerNormBackwardArgs& args) {
  const int64_t hidden = args.dy.columns();
  const float* w = args.w.As<float>();
  float* dw = StartSums(args.dw, hidden, args.output);
  float* db = StartSums(args.db, hidden, args.output);
  const auto count = static_cast<float>(hidden);
  for (int64_t row = 0; row < args.dy.rows(); ++row) {
    const float* dy = args.dy.Row<float>(row);
    const float* x = args.x.Row<float>(row);
    const float* dresidual = args.dresidual.present() ? args.dresidual.Row<float>(row) : nullptr;
    float* dx = args.dx.Row<float>(row);
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
