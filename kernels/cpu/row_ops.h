#pragma once

// Ops that walk rows once: activation, bias, rotary embedding, embedding gradient, softmax of
// logits. Memory-bound. E: of activations, float, uint16_t (bf16) or Fp16, which are rounded once
// as they are stored; gradients of weights and all between are fp32.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

// 1 / (1 + e^-x).
template <typename V>
inline typename V::F Sigmoid(typename V::F x) {
  const auto one = V::Set1(1.0f);
  return V::Div(one, V::Add(one, Exp<V>(V::Sub(V::Zero(), x))));
}

template <typename V, typename E>
void SwiGluForwardRows(const SwiGluForwardArgs& args) {
  for (int64_t row = 0; row < args.gate.rows(); ++row) {
    const E* gate = args.gate.Row<E>(row);
    const E* up = args.up.Row<E>(row);
    E* y = args.y.Row<E>(row);
    ForEachVector(args.gate.columns(), [&](int64_t j, auto lanes) {
      const auto g = V::Load(gate + j, lanes);
      const auto silu = V::Mul(g, Sigmoid<V>(g));
      V::Store(y + j, V::Mul(silu, V::Load(up + j, lanes)), lanes);
    });
  }
}

template <typename V, typename E>
void SwiGluBackwardRows(const SwiGluBackwardArgs& args) {
  for (int64_t row = 0; row < args.gate.rows(); ++row) {
    const E* gate = args.gate.Row<E>(row);
    const E* up = args.up.Row<E>(row);
    const E* dy = args.dy.Row<E>(row);
    E* dgate = args.dgate.Row<E>(row);
    E* dup = args.dup.Row<E>(row);
    E* y = args.y.present() ? args.y.Row<E>(row) : nullptr;
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

// The tanh form of GELU as x * sigmoid(t(x)), t = x * (a + b x^2). Beyond +-9 the sigmoid is 0 or 1
// to the last bit that matters.
template <typename V>
struct GeluTerms {
  typename V::F x;
  typename V::F sigmoid;
  typename V::F rest;   // 1 - sigmoid, without cancellation
  typename V::F slope;  // of t
};

template <typename V>
inline GeluTerms<V> GeluTermsOf(typename V::F x) {
  const auto a = V::Set1(1.5957691216f);     // 2 sqrt(2 / pi)
  const auto b = V::Set1(0.0713548162726f);  // times 0.044715
  const auto b3 = V::Set1(0.214064448818f);  // times 3
  const auto near = V::Max(V::Set1(-9.0f), V::Min(V::Set1(9.0f), x));
  const auto square = V::Mul(near, near);
  const auto t = V::Mul(near, V::Fma(b, square, a));
  const auto power = Exp<V>(V::Sub(V::Zero(), t));
  const auto one = V::Set1(1.0f);
  const auto sigmoid = V::Div(one, V::Add(one, power));
  return {x, sigmoid, V::Mul(power, sigmoid), V::Fma(b3, square, a)};
}

template <typename V, typename E>
void GeluForwardRows(const GeluForwardArgs& args) {
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const E* x = args.x.Row<E>(row);
    E* y = args.y.Row<E>(row);
    ForEachVector(args.x.columns(), [&](int64_t j, auto lanes) {
      const auto terms = GeluTermsOf<V>(V::Load(x + j, lanes));
      V::Store(y + j, V::Mul(terms.x, terms.sigmoid), lanes);
    });
  }
}

template <typename V, typename E>
void GeluBackwardRows(const GeluBackwardArgs& args) {
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const E* x = args.x.Row<E>(row);
    const E* dy = args.dy.Row<E>(row);
    E* dx = args.dx.Row<E>(row);
    E* y = args.y.present() ? args.y.Row<E>(row) : nullptr;
    ForEachVector(args.x.columns(), [&](int64_t j, auto lanes) {
      const auto terms = GeluTermsOf<V>(V::Load(x + j, lanes));
      const auto d = V::Load(dy + j, lanes);
      const auto value = V::Mul(terms.x, terms.sigmoid);
      // y' = s + x s (1 - s) t'
      const auto slope = V::Fma(V::Mul(value, terms.rest), terms.slope, terms.sigmoid);
      if (y != nullptr) {
        V::Store(y + j, value, lanes);
      }
      V::Store(dx + j, V::Mul(d, slope), lanes);
    });
  }
}

template <typename V, typename E>
void AddBiasRows(const AddBiasArgs& args) {
  const E* bias = args.bias.As<E>();
  const int64_t columns = args.y.columns();
  for (int64_t row = 0; row < args.y.rows(); ++row) {
    E* y = args.y.Row<E>(row);
    if (args.output == Output::kOverwrite) {
      std::copy_n(bias, columns, y);
      continue;
    }
    ForEachVector(columns, [&](int64_t j, auto lanes) {
      V::Store(y + j, V::Add(V::Load(y + j, lanes), V::Load(bias + j, lanes)), lanes);
    });
  }
}

// to[row % period] += rows of `from`, in order.
template <typename V, typename E>
inline void AddRows(const TensorView& from, const TensorView& to, int64_t period) {
  for (int64_t row = 0; row < from.rows(); ++row) {
    const E* x = from.Row<E>(row);
    float* y = to.Row<float>(row % period);
    ForEachVector(from.columns(), [&](int64_t j, auto lanes) {
      V::Store(y + j, V::Add(V::Load(y + j, lanes), V::Load(x + j, lanes)), lanes);
    });
  }
}

inline void ZeroRows(const TensorView& matrix) {
  for (int64_t row = 0; row < matrix.rows(); ++row) {
    std::fill_n(matrix.Row<float>(row), matrix.columns(), 0.0f);
  }
}

template <typename V, typename E>
void BiasGradientRows(const BiasGradientArgs& args) {
  const TensorView sums = MatrixView(args.db.As<float>(), 1, args.dy.columns());
  if (args.output == Output::kOverwrite) {
    ZeroRows(sums);
  }
  AddRows<V, E>(args.dy, sums, 1);
}

template <typename V, typename E>
void AddPositionsRows(const AddPositionsArgs& args) {
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    E* x = args.x.Row<E>(row);
    const E* position = args.table.Row<E>(row % args.sequence_tokens);
    ForEachVector(args.x.columns(), [&](int64_t j, auto lanes) {
      V::Store(x + j, V::Add(V::Load(x + j, lanes), V::Load(position + j, lanes)), lanes);
    });
  }
}

template <typename V, typename E>
void PositionGradientRows(const PositionGradientArgs& args) {
  if (args.output == Output::kOverwrite) {
    ZeroRows(args.dtable);
  }
  AddRows<V, E>(args.dx, args.dtable, args.sequence_tokens);
}

template <typename V, typename E>
void AddInPlaceRows(const AddArgs& args) {
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const E* x = args.x.Row<E>(row);
    E* y = args.y.Row<E>(row);
    ForEachVector(args.x.columns(), [&](int64_t j, auto lanes) {
      V::Store(y + j, V::Add(V::Load(x + j, lanes), V::Load(y + j, lanes)), lanes);
    });
  }
}

template <typename V, typename E>
void RopeRows(const RopeArgs& args) {
  const int64_t half = args.head_size / 2;
  const int64_t heads = args.x.columns() / args.head_size;
  const auto sign = V::Set1(args.direction == RopeDirection::kForward ? 1.0f : -1.0f);
  for (int64_t row = 0; row < args.x.rows(); ++row) {
    const int64_t position = row % args.sequence_tokens;
    const float* cosine = args.cosine.Row<float>(position);
    const float* sine = args.sine.Row<float>(position);
    for (int64_t head = 0; head < heads; ++head) {
      E* low = args.x.Row<E>(row) + head * args.head_size;
      E* high = low + half;
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

template <typename V, typename E>
void EmbeddingBackwardRows(const EmbeddingBackwardArgs& args) {
  const int64_t hidden = args.dtable.columns();
  if (args.output == Output::kOverwrite) {
    ZeroRows(args.dtable);
  }
  const int32_t* ids = args.ids.As<int32_t>();
  for (int64_t token = 0; token < args.dout.rows(); ++token) {
    const int64_t row = ids[token] - args.rows.first;
    if (row < 0 || row >= args.dtable.rows()) {
      continue;
    }
    const E* dout = args.dout.Row<E>(token);
    float* dtable = args.dtable.Row<float>(row);
    ForEachVector(hidden, [&](int64_t j, auto lanes) {
      V::Store(dtable + j, V::Add(V::Load(dtable + j, lanes), V::Load(dout + j, lanes)), lanes);
    });
  }
}

struct RowSoftmax {
  float max;
  float sum;  // of e^(x - max)
};

template <typename V, typename E>
inline float LargestOf(const E* x, int64_t n) {
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

// x -> y = e^(x - max), which may be the same memory or null; sum of e^(x - max).
template <typename V, typename E>
inline RowSoftmax ExponentialsOf(const E* x, E* y, int64_t n) {
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

template <typename V, typename E>
void CrossEntropyLossRows(const CrossEntropyRowsArgs& args) {
  const int64_t vocabulary = args.logits.columns();
  for (int64_t token = 0; token < args.logits.rows(); ++token) {
    const int32_t target = args.targets[token];
    const E* row = args.logits.Row<E>(token);
    args.loss[token] = target < 0 ? 0.0f
                                  : LogSumExp(ExponentialsOf<V, E>(row, nullptr, vocabulary)) -
                                        ValueOf(row[target]);
  }
}

// Logits -> softmax - one-hot.
template <typename V>
inline float GradientOfRow(float* row, int64_t vocabulary, int32_t target, float) {
  const float target_logit = row[target];
  const RowSoftmax softmax = ExponentialsOf<V>(row, row, vocabulary);
  const auto scale = V::Set1(1.0f / softmax.sum);
  ForEachVector(vocabulary, [&](int64_t j, auto lanes) {
    V::Store(row + j, V::Mul(V::Load(row + j, lanes), scale), lanes);
  });
  row[target] -= 1.0f;
  return LogSumExp(softmax) - target_logit;
}

// The same, scaled, with exponentials made twice, since a narrow row could not keep them. A scale
// that is a power of two rounds nothing.
template <typename V, typename E>
inline float GradientOfRow(E* row, int64_t vocabulary, int32_t target, float loss_scale) {
  const float target_logit = ValueOf(row[target]);
  const RowSoftmax softmax = ExponentialsOf<V, E>(row, nullptr, vocabulary);
  const auto scale = V::Set1(1.0f / softmax.sum);
  const auto shift = V::Set1(softmax.max);
  const auto widen = V::Set1(loss_scale);
  const auto share = [&](typename V::F x) {
    return V::Mul(Exp<V>(V::Sub(x, shift), kSoftmaxFloor), scale);
  };
  ForEachVector(vocabulary, [&](int64_t j, auto lanes) {
    V::Store(row + j, V::Mul(share(V::Load(row + j, lanes)), widen), lanes);
  });
  const auto hit = V::Sub(share(V::Set1(target_logit)), V::Set1(1.0f));
  V::Store(row + target, V::Mul(hit, widen), SomeLanes{1});
  return LogSumExp(softmax) - target_logit;
}

template <typename V, typename E>
void CrossEntropyGradientRows(const CrossEntropyRowsArgs& args) {
  const int64_t vocabulary = args.logits.columns();
  for (int64_t token = 0; token < args.logits.rows(); ++token) {
    const int32_t target = args.targets[token];
    E* row = args.logits.Row<E>(token);
    if (target < 0) {
      args.loss[token] = 0.0f;
      std::fill_n(row, vocabulary, E{});
    } else {
      args.loss[token] = GradientOfRow<V>(row, vocabulary, target, args.loss_scale);
    }
  }
}

template <typename V>
void ExpRows(const float* x, float* y, int64_t count) {
  ForEachVector(
      count, [&](int64_t j, auto lanes) { V::Store(y + j, Exp<V>(V::Load(x + j, lanes)), lanes); });
}

}  // namespace ravel::kernels::cpu
