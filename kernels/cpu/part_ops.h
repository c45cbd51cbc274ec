#pragma once

// Ends of computations in parts: sums of partial products, and the loss over blocks of a
// vocabulary. Memory-bound. E: float, uint16_t (bf16) or Fp16.

#include <cmath>
#include <type_traits>

#include "kernels/cpu/row_ops.h"
#include "kernels/part_sum.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::kernels::cpu {

// load(i) for i = first ... first + count - 1, a power of two of them, as a tree of adjacent pairs.
template <typename V, typename Load>
inline typename V::F TreeOf(size_t first, size_t count, const Load& load) {
  if (count == 1) {
    return load(first);
  }
  const auto left = TreeOf<V>(first, count / 2, load);
  return V::Add(left, TreeOf<V>(first + count / 2, count / 2, load));
}

// kPieces: 1 or 2, without calls; 0: any number.
template <typename V, typename E, size_t kPieces>
void SumSomeParts(const SumPartsArgs& args) {
  const E* bias = args.bias.present() ? args.bias.As<E>() : nullptr;
  const float* pieces[kMostPieces];
  for (int64_t row = 0; row < args.out.rows(); ++row) {
    for (size_t i = 0; i < args.pieces.size(); ++i) {
      pieces[i] = args.pieces[i].Row<float>(row);
    }
    const E* residual = args.residual.present() ? args.residual.Row<E>(row) : nullptr;
    E* out = args.out.Row<E>(row);
    ForEachVector(args.out.columns(), [&](int64_t j, auto lanes) {
      auto sum = V::Load(pieces[0] + j, lanes);
      if constexpr (kPieces == 2) {
        sum = V::Add(sum, V::Load(pieces[1] + j, lanes));
      } else if constexpr (kPieces == 0) {
        sum = TreeOf<V>(
            0, args.pieces.size(), [&](size_t i) { return V::Load(pieces[i] + j, lanes); });
      }
      if (residual != nullptr) {
        auto base = V::Load(residual + j, lanes);
        if (bias != nullptr) {
          base = V::Add(base, V::Load(bias + j, lanes));
        }
        sum = V::Add(base, sum);
      } else if (bias != nullptr) {
        sum = V::Add(V::Load(bias + j, lanes), sum);
      }
      V::Store(out + j, sum, lanes);
    });
  }
}

template <typename V, typename E>
void SumPartsRows(const SumPartsArgs& args) {
  if (args.pieces.size() == 1) {
    SumSomeParts<V, E, 1>(args);
  } else if (args.pieces.size() == 2) {
    SumSomeParts<V, E, 2>(args);
  } else {
    SumSomeParts<V, E, 0>(args);
  }
}

// The column of a target in a block, or -1.
inline int64_t ColumnOfTarget(int32_t target, int64_t first_id, int64_t columns) {
  const int64_t column = int64_t{target} - first_id;
  return target >= 0 && column >= 0 && column < columns ? column : -1;
}

template <typename V, typename E>
void VocabularyStatisticsRows(const VocabularyStatisticsArgs& args) {
  const int64_t columns = args.logits.columns();
  for (int64_t token = 0; token < args.logits.rows(); ++token) {
    const int32_t target = args.targets.As<int32_t>()[token];
    E* row = args.logits.Row<E>(token);
    const int64_t hit = ColumnOfTarget(target, args.first_id, columns);
    args.statistics.Row<float>(2)[token] = hit < 0 ? -0.0f : ValueOf(row[hit]);
    RowSoftmax softmax = {-INFINITY, 0.0f};
    if (target >= 0) {
      if constexpr (std::is_same_v<E, float>) {
        softmax = ExponentialsOf<V>(row, row, columns);
      } else {  // a narrow row could not keep them
        softmax = ExponentialsOf<V, E>(row, nullptr, columns);
      }
    }
    args.statistics.Row<float>(0)[token] = softmax.max;
    args.statistics.Row<float>(1)[token] = softmax.sum;
  }
}

template <typename V>
void VocabularyLossRows(const VocabularyLossArgs& args) {
  const size_t blocks = static_cast<size_t>(args.statistics.rows()) / 3;
  const SomeLanes one = {1};
  for (int64_t token = 0; token < args.loss.elements(); ++token) {
    const auto at = [&](size_t block, int64_t which) {
      return args.statistics.Row<float>(3 * static_cast<int64_t>(block) + which) + token;
    };
    if (args.targets.As<int32_t>()[token] < 0) {
      args.loss.As<float>()[token] = 0.0f;
      continue;
    }
    float max = -INFINITY;
    for (size_t block = 0; block < blocks; ++block) {
      max = std::max(max, *at(block, 0));
    }
    const auto share = [&](size_t block) {
      const auto shifted = V::Sub(V::Load(at(block, 0), one), V::Set1(max));
      return Exp<V>(shifted, kSoftmaxFloor);
    };
    // The sum of a block without rows is 0, and so is its share.
    const auto sum_of = [&](size_t block) {
      return V::Mul(V::Load(at(block, 1), one), share(block));
    };
    float sum = 0;
    float target = 0;
    V::Store(&sum, TreeOf<V>(0, blocks, sum_of), one);
    V::Store(&target,
             TreeOf<V>(0, blocks, [&](size_t block) { return V::Load(at(block, 2), one); }),
             one);
    args.loss.As<float>()[token] = LogSumExp({.max = max, .sum = sum}) - target;
    for (size_t block = 0; block < blocks; ++block) {
      V::Store(at(block, 1), V::Mul(share(block), V::Set1(1.0f / sum)), one);
    }
  }
}

template <typename V, typename E>
void VocabularyGradientRows(const VocabularyGradientArgs& args) {
  const int64_t columns = args.logits.columns();
  const auto widen = V::Set1(args.loss_scale);
  for (int64_t token = 0; token < args.logits.rows(); ++token) {
    const int32_t target = args.targets.As<int32_t>()[token];
    E* row = args.logits.Row<E>(token);
    if (target < 0) {
      std::fill_n(row, columns, E{});
      continue;
    }
    const int64_t hit = ColumnOfTarget(target, args.first_id, columns);
    const auto shift = V::Set1(args.statistics.Row<float>(0)[token]);
    const auto factor = V::Set1(args.statistics.Row<float>(1)[token]);
    const auto probability = [&](typename V::F x) {
      if constexpr (std::is_same_v<E, float>) {
        return V::Mul(x, factor);
      } else {
        return V::Mul(Exp<V>(V::Sub(x, shift), kSoftmaxFloor), factor);
      }
    };
    const SomeLanes one = {1};
    const auto at_hit = probability(hit < 0 ? V::Zero() : V::Load(row + hit, one));
    ForEachVector(columns, [&](int64_t j, auto lanes) {
      V::Store(row + j, V::Mul(probability(V::Load(row + j, lanes)), widen), lanes);
    });
    if (hit >= 0) {
      V::Store(row + hit, V::Mul(V::Sub(at_hit, V::Set1(1.0f)), widen), one);
    }
  }
}

}  // namespace ravel::kernels::cpu
