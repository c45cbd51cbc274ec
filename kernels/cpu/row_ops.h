#pragma once

// Ops that walk rows once: norm, activation, rotary embedding, embedding gradient, softmax of
// logits. Memory-bound.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

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
      ForEachVector(hidden, [&](int64_t j, auto lanes) {
        const auto s = V::Load(x + j, lanes);
        squares = V::Fma(s, s, squares);
      });
      if (args.sum.present() && args.sum.Row<float>(row) != x) {
        std::memmove(args.sum.Row<float>(row), x, sizeof(float) * static_cast<size_t>(hidden));
      }
    }
    const float mean = V::ReduceAdd(squares) / static_cast<float>(hidden);
    const float rstd = 1.0f / std::sqrt(mean + args.epsilon);
    args.rstd.As<float>()[row] = rstd;
    float* y = args.y.Row<float>(row);
    const auto scale = V::Set1(rstd);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto normal = V::Mul(V::Load(x + j, lanes), scale);
      V::Store(y + j, V::Mul(normal, V::Load(w + j, lanes)), lanes);
    });
  }
}

template <typename V>
void RmsNormBackwardRows(const RmsNormBackwardArgs& args) {
  const int64_t hidden = args.dy.columns();
  const float* w = args.w.As<float>();
  float* dw = args.dw.As<float>();
  if (args.dw_output == Output::kOverwrite) {
    std::fill_n(dw, hidden, 0.0f);
  }
  for (int64_t row = 0; row < args.dy.rows(); ++row) {
    const float* dy = args.dy.Row<float>(row);
    const float* x = args.sum.Row<float>(row);
    const float* dresidual = args.dresidual.present() ? args.dresidual.Row<float>(row) : nullptr;
    float* dx = args.dx.Row<float>(row);
    const float rstd = args.rstd.As<float>()[row];
    auto dot = V::Zero();
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto wdy = V::Mul(V::Load(w + j, lanes), V::Load(dy + j, lanes));
      dot = V::Fma(wdy, V::Load(x + j, lanes), dot);
    });
    const float mean = V::ReduceAdd(dot) / static_cast<float>(hidden);
    const auto scale = V::Set1(rstd);
    const auto pull = V::Set1(rstd * rstd * mean);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      const auto dyj = V::Load(dy + j, lanes);
      const auto xj = V::Load(x + j, lanes);
      V::Store(dw + j, V::Fma(dyj, V::Mul(xj, scale), V::Load(dw + j, lanes)), lanes);
      const auto inner = V::Fnma(xj, pull, V::Mul(V::Load(w + j, lanes), dyj));
      const auto rest = dresidual != nullptr ? V::Load(dresidual + j, lanes) : V::Zero();
      V::Store(dx + j, V::Fma(inner, scale, rest), lanes);
    });
  }
}

// 1 / (1 + e^-x).
template <typename V>
inline typename V::F Sigmoid(typename V::F x) {
  const auto one = V::Set1(1.0f);
  return V::Div(one, V::Add(one, Exp<V>(V::Sub(V::Zero(), x))));
}

template <typename V>
void SwiGluForwardRows(const SwiGluForwardArgs& args) {
  for (int64_t row = 0; row < args.gate.rows(); ++row) {
    const float* gate = args.gate.Row<float>(row);
    const float* up = args.up.Row<float>(row);
    float* y = args.y.Row<float>(row);
    ForEachVector(args.gate.columns(), [&](int64_t j, auto lanes) {
      const auto g = V::Load(gate + j, lanes);
      const auto silu = V::Mul(g, Sigmoid<V>(g));
      V::Store(y + j, V::Mul(silu, V::Load(up + j, lanes)), lanes);
    });
  }
}

template <typename V>
void SwiGluBackwardRows(const SwiGluBackwardArgs& args) {
  for (int64_t row = 0; row < args.gate.rows(); ++row) {
    const float* gate = args.gate.Row<float>(row);
    const float* up = args.up.Row<float>(row);
    const float* dy = args.dy.Row<float>(row);
    float* dgate = args.dgate.Row<float>(row);
    float* dup = args.dup.Row<float>(row);
    float* y = args.y.present() ? args.y.Row<float>(row) : nullptr;
    ForEachVector(args.gate.columns(), [&](int64_t j, auto lanes) {
      const auto g = V::Load(gate + j, lanes);
      const auto u = V::Load(up + j, lanes);
      const auto d = V::Load(dy + j, lanes);
      const auto sigmoid = Sigmoid<V>(g);
      const auto silu = V::Mul(g, sigmoid);
      // silu' = sigmoid + silu * (1 - sigmoid)
      const auto slope = V::Fma(silu, V::Sub(V::Set1(1.0f), sigmoid), sigmoid);
      if (y != nullptr) {
        V::Store(y + j, V::Mul(silu, u), lanes);
      }
      V::Store(dup + j, V::Mul(d, silu), lanes);
      V::Store(dgate + j, V::Mul(V::Mul(d, u), slope), lanes);
    });
  }
}

template <typename V>
void AddInPlaceRows(const AddArgs& args) {
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const float* x = args.x.Row<float>(row);
    float* y = args.y.Row<float>(row);
    ForEachVector(args.x.columns(), [&](int64_t j, auto lanes) {
      V::Store(y + j, V::Add(V::Load(x + j, lanes), V::Load(y + j, lanes)), lanes);
    });
  }
}

template <typename V>
void RopeRows(const RopeArgs& args) {
  const int64_t half = args.head_size / 2;
  const int64_t heads = args.x.columns() / args.head_size;
  const auto sign = V::Set1(args.direction == RopeDirection::kForward ? 1.0f : -1.0f);
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const int64_t position = row % args.sequence_tokens;
    const float* cosine = args.cosine.Row<float>(position);
    const float* sine = args.sine.Row<float>(position);
    for (int64_t head = 0; head < heads; ++head) {
      float* low = args.x.Row<float>(row) + head * args.head_size;
      float* high = low + half;
      ForEachVector(half, [&](int64_t j, auto lanes) {
        const auto c = V::Load(cosine + j, lanes);
        const auto s = V::Mul(V::Load(sine + j, lanes), sign);
        const auto a = V::Load(low + j, lanes);
        const auto b = V::Load(high + j, lanes);
        V::Store(low + j, V::Fnma(b, s, V::Mul(a, c)), lanes);
        V::Store(high + j, V::Fma(a, s, V::Mul(b, c)), lanes);
      });
    }
  }
}

template <typename V>
void EmbeddingBackwardRows(const EmbeddingBackwardArgs& args) {
  const int64_t hidden = args.dtable.columns();
  if (args.output == Output::kOverwrite) {
    for (int64_t row = 0; row < args.dtable.rows(); ++row) {
      std::fill_n(args.dtable.Row<float>(row), hidden, 0.0f);
    }
  }
  const int32_t* ids = args.ids.As<int32_t>();
  for (int64_t token = 0; token < args.dout.rows(); ++token) {
    const float* dout = args.dout.Row<float>(token);
    float* dtable = args.dtable.Row<float>(ids[token]);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      V::Store(dtable + j, V::Add(V::Load(dtable + j, lanes), V::Load(dout + j, lanes)), lanes);
    });
  }
}

struct RowSoftmax {
  float max;
  float sum;  // of e^(x - max)
};

template <typename V>
inline float LargestOf(const float* x, int64_t n) {
  const auto lowest = V::Set1(-INFINITY);
  auto max = lowest;
  ForEachVector(n, [&](int64_t j, auto lanes) {
    auto value = V::Load(x + j, lanes);
    if constexpr (std::is_same_v<decltype(lanes), SomeLanes>) {
      value = V::KeepFirst(value, lanes.count, lowest);
    }
    max = V::Max(max, value);
  });
  return V::ReduceMax(max);
}

// x -> y = e^(x - max), which may be the same memory or null; sum of y.
template <typename V>
inline RowSoftmax ExponentialsOf(const float* x, float* y, int64_t n) {
  const float max = LargestOf<V>(x, n);
  const auto shift = V::Set1(max);
  auto sum = V::Zero();
  ForEachVector(n, [&](int64_t j, auto lanes) {
    auto e = Exp<V>(V::Sub(V::Load(x + j, lanes), shift), kSoftmaxFloor);
    if constexpr (std::is_same_v<decltype(lanes), SomeLanes>) {
      e = V::KeepFirst(e, lanes.count, V::Zero());
    }
    if (y != nullptr) {
      V::Store(y + j, e, lanes);
    }
    sum = V::Add(sum, e);
  });
  return {max, V::ReduceAdd(sum)};
}

// log of a sum of exponentials, in double and rounded once.
inline float LogSumExp(const RowSoftmax& softmax) {
  return static_cast<float>(static_cast<double>(softmax.max) +
                            std::log(static_cast<double>(softmax.sum)));
}

template <typename V>
void CrossEntropyLossRows(const CrossEntropyRowsArgs& args) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    const int32_t target = args.targets[token];
    const float* row = args.logits + token * args.vocabulary;
    args.loss[token] =
        target < 0 ? 0.0f
                   : LogSumExp(ExponentialsOf<V>(row, nullptr, args.vocabulary)) - row[target];
  }
}

template <typename V>
void CrossEntropyGradientRows(const CrossEntropyRowsArgs& args) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    const int32_t target = args.targets[token];
    float* row = args.logits + token * args.vocabulary;
    if (target < 0) {
      args.loss[token] = 0.0f;
      std::fill_n(row, args.vocabulary, 0.0f);
      continue;
    }
    const float target_logit = row[target];
    const RowSoftmax softmax = ExponentialsOf<V>(row, row, args.vocabulary);
    args.loss[token] = LogSumExp(softmax) - target_logit;
    const auto scale = V::Set1(1.0f / softmax.sum);
    ForEachVector(args.vocabulary, [&](int64_t j, auto lanes) {
      V::Store(row + j, V::Mul(V::Load(row + j, lanes), scale), lanes);
    });
    row[target] -= 1.0f;
  }
}

template <typename V>
void ExpRows(const float* x, float* y, int64_t count) {
  ForEachVector(
      count, [&](int64_t j, auto lanes) { V::Store(y + j, Exp<V>(V::Load(x + j, lanes)), lanes); });
}

}  // namespace ravel::kernels::cpu
