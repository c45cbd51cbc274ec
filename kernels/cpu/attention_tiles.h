#pragma once

// Causal attention over tiles of 48 queries x 96 keys, one kv head at a time: keys and values (in
// the backward pass also queries and output gradients) of one sequence are packed once, then every
// gemm is a tile gemm. Strips and panels wholly above the diagonal are skipped. Scores exist
// for one tile only. Operands of bf16 or fp16 are widened as they are packed, and results rounded
// as they leave: all between is fp32.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cpu/tile_gemm.h"

namespace ravel::kernels::cpu {

inline constexpr int64_t kQueryTile = 48;
inline constexpr int64_t kKeyTile = 96;

// Sizes that both passes use, and where things lie in the workspace.
struct AttentionSizes {
  int64_t tokens;  // of one sequence
  int64_t head;
  int64_t padded_tokens;
  int64_t padded_head;
  int64_t plane;  // elements of one packed operand

  explicit AttentionSizes(const AttentionShape& shape)
      : tokens(shape.sequence_tokens),
        head(shape.head_size),
        padded_tokens(RoundUp(shape.sequence_tokens, kPanelColumns)),
        padded_head(RoundUp(shape.head_size, kPanelColumns)),
        plane(padded_tokens * padded_head) {}

  // Ten planes (seven packed, three gradients), delta per token, two score tiles, two tiles of
  // rows, row statistics; and room to start on a cache line.
  int64_t WorkspaceElements() const {
    return 10 * plane + padded_tokens + 2 * kQueryTile * kKeyTile + 2 * kQueryTile * padded_head +
           2 * kQueryTile + kCacheLineElements;
  }
};

// A tile of scores: queries [q, q + rows) and keys [k, k + keys) of a sequence, cut at the diagonal
// of the last query.
struct ScoreTile {
  int64_t q;
  int64_t rows;
  int64_t k;
  int64_t keys;

  // Keys of this tile that query row i may see; may be <= 0.
  int64_t Visible(int64_t i) const { return std::min(keys, q + i - k + 1); }
};

// c [rows, keys] = a [rows, padded_head] * transposed panels of the keys; only what some row of a
// strip may see.
template <typename V>
inline void TileScores(const ScoreTile& tile,
                       const AttentionSizes& sizes,
                       const float* a,
                       const float* transposed,
                       float* c) {
  const int64_t step = kPanelColumns * sizes.head;
  const int64_t width = kPanelColumns * V::kStripPanels;
  for (int64_t key = 0; key < tile.keys; key += width) {
    const float* panel = transposed + (tile.k + key) * sizes.head;
    for (int64_t i = 0; i < tile.rows; i += V::kStripRows) {
      const int64_t rows = std::min(V::kStripRows, tile.rows - i);
      const int64_t visible = std::min(width, tile.Visible(i + rows - 1) - key);
      if (visible > 0) {
        StripTimesPanels<V, Output::kOverwrite>(rows,
                                                sizes.head,
                                                {a + i * sizes.padded_head, sizes.padded_head, 1},
                                                {panel, step, DivCeil(visible, kPanelColumns)},
                                                {c + i * kKeyTile + key, kKeyTile});
      }
    }
  }
}

// The panels of columns [column, ...) of packed rows, from row `row`.
template <typename V>
inline Panels ColumnPanels(const AttentionSizes& sizes,
                           const float* panels,
                           int64_t row,
                           int64_t column) {
  return {panels + column * sizes.padded_tokens + row * kPanelColumns,
          sizes.padded_tokens * kPanelColumns,
          std::min(V::kStripPanels, (sizes.padded_head - column) / kPanelColumns)};
}

// out [rows, padded_head] (=|+=) probabilities [rows, keys] * panels of the keys' rows. Rows that
// see no key of the tile are left alone.
template <typename V, Output kOutput>
inline void TileTimesRows(const ScoreTile& tile,
                          const AttentionSizes& sizes,
                          const float* probabilities,
                          const float* panels,
                          float* out) {
  for (int64_t column = 0; column < sizes.padded_head; column += kPanelColumns * V::kStripPanels) {
    const Panels panel = ColumnPanels<V>(sizes, panels, tile.k, column);
    for (int64_t i = 0; i < tile.rows; i += V::kStripRows) {
      const int64_t rows = std::min(V::kStripRows, tile.rows - i);
      const int64_t visible = tile.Visible(i + rows - 1);
      if (visible > 0) {
        StripTimesPanels<V, kOutput>(rows,
                                     visible,
                                     {probabilities + i * kKeyTile, kKeyTile, 1},
                                     panel,
                                     {out + i * sizes.padded_head + column, sizes.padded_head});
      }
    }
  }
}

// out [keys, padded_head] += transposed tile [keys, rows] * panels of the queries' rows; of the
// first head that adds to `out`, strips of keys that no tile before saw are overwritten.
template <typename V>
inline void TransposedTileTimesRows(const ScoreTile& tile,
                                    const AttentionSizes& sizes,
                                    bool first_head,
                                    const float* scores,
                                    const float* panels,
                                    float* out) {
  static_assert(kQueryTile % V::kStripRows == 0, "a strip of keys begins in one tile of queries");
  for (int64_t column = 0; column < sizes.padded_head; column += kPanelColumns * V::kStripPanels) {
    for (int64_t key = 0; key < tile.keys; key += V::kStripRows) {
      // Queries before the strip's first key do not see it.
      const int64_t first = std::max<int64_t>(0, tile.k + key - tile.q);
      if (first >= tile.rows) {
        continue;
      }
      const int64_t rows = std::min(V::kStripRows, tile.keys - key);
      const LeftOperand left = {scores + first * kKeyTile + key, 1, kKeyTile};
      const Panels panel = ColumnPanels<V>(sizes, panels, tile.q + first, column);
      const TileOutput to = {out + key * sizes.padded_head + column, sizes.padded_head};
      if (first_head && tile.k + key >= tile.q) {
        StripTimesPanels<V, Output::kOverwrite>(rows, tile.rows - first, left, panel, to);
      } else {
        StripTimesPanels<V, Output::kAccumulate>(rows, tile.rows - first, left, panel, to);
      }
    }
  }
}

// Running maximum and sum of one tile of queries.
struct OnlineSoftmax {
  float* max;  // of scaled scores
  float* sum;
};

template <typename V>
inline float LargestScaled(const float* row, int64_t visible, float scale, float start) {
  auto max = V::Set1(start);
  const auto factor = V::Set1(scale);
  int64_t j = 0;
  for (; j + 8 <= visible; j += 8) {
    max = V::Max(max, V::Mul(V::Load(row + j), factor));
  }
  if (j < visible) {
    const auto value = V::Mul(V::Load(row + j), factor);
    max = V::Max(max, V::KeepFirst(value, static_cast<int>(visible - j), V::Set1(-INFINITY)));
  }
  return V::ReduceMax(max);
}

// Row of scores -> exponentials against `max`, zero where masked; returns their sum.
template <typename V>
inline float ExponentialRow(float* row, int64_t visible, int64_t keys, float scale, float max) {
  const auto factor = V::Set1(scale);
  const auto shift = V::Set1(max);
  auto sum = V::Zero();
  int64_t j = 0;
  for (; j < visible; j += 8) {
    auto e = Exp<V>(V::Sub(V::Mul(V::Load(row + j), factor), shift), kSoftmaxFloor);
    if (visible - j < 8) {
      e = V::KeepFirst(e, static_cast<int>(visible - j), V::Zero());
    }
    V::Store(row + j, e);
    sum = V::Add(sum, e);
  }
  for (; j < keys; j += 8) {
    V::Store(row + j, V::Zero());
  }
  return V::ReduceAdd(sum);
}

// Scores -> exponentials against the new running maxima; sums and rows of `out` shrink to match
// them.
template <typename V>
inline void SoftmaxTile(const ScoreTile& tile,
                        const AttentionSizes& sizes,
                        float scale,
                        float* scores,
                        OnlineSoftmax softmax,
                        float* out) {
  alignas(32) float shrink[kQueryTile] = {};
  for (int64_t i = 0; i < tile.rows; ++i) {
    const float before = softmax.max[i];
    const int64_t visible = tile.Visible(i);
    if (visible > 0) {
      softmax.max[i] = LargestScaled<V>(scores + i * kKeyTile, visible, scale, before);
    }
    // Equal maxima, infinite ones included, differ by nothing.
    shrink[i] = softmax.max[i] == before ? 0.0f : before - softmax.max[i];
  }
  for (int64_t i = 0; i < tile.rows; i += 8) {
    V::Store(shrink + i, Exp<V>(V::Load(shrink + i)));
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    const float sum =
        ExponentialRow<V>(scores + i * kKeyTile, tile.Visible(i), tile.keys, scale, softmax.max[i]);
    softmax.sum[i] = softmax.sum[i] * shrink[i] + sum;
    if (tile.k > 0 && shrink[i] != 1.0f) {
      const auto factor = V::Set1(shrink[i]);
      for (int64_t j = 0; j < sizes.padded_head; j += 8) {
        float* o = out + i * sizes.padded_head + j;
        V::Store(o, V::Mul(V::Load(o), factor));
      }
    }
  }
}

// Columns [column, column + head) of one sequence.
template <typename E>
inline StridedRows<E> SequenceRows(const TensorView& view,
                                   const AttentionSizes& sizes,
                                   int64_t first_token,
                                   int64_t column) {
  return {view.Row<E>(first_token) + column, view.row_stride, sizes.tokens, sizes.head};
}

struct PackedKeys {
  const float* transposed_keys;
  const float* values;
};

// One tile of queries of one head against all keys they see.
template <typename V, typename E>
void AttentionForwardTile(const AttentionForwardArgs& args,
                          const AttentionSizes& sizes,
                          PackedKeys packed,
                          int64_t first_token,
                          int64_t head,
                          int64_t q,
                          float* scratch) {
  const int64_t rows = std::min(kQueryTile, sizes.tokens - q);
  const int64_t token = first_token + q;
  float* scores = scratch;
  float* out = scores + kQueryTile * kKeyTile;
  float* queries = out + kQueryTile * sizes.padded_head;
  const OnlineSoftmax softmax = {queries + kQueryTile * sizes.padded_head,
                                 queries + kQueryTile * sizes.padded_head + kQueryTile};
  std::fill_n(softmax.max, rows, -INFINITY);
  std::fill_n(softmax.sum, rows, 0.0f);
  const StridedRows<E> q_rows = {
      args.q.Row<E>(token) + head * sizes.head, args.q.row_stride, rows, sizes.head};
  PackRows<V>(q_rows, sizes.padded_head, queries);
  for (int64_t k = 0; k < q + rows; k += kKeyTile) {
    const ScoreTile tile = {q, rows, k, std::min(kKeyTile, q + rows - k)};
    TileScores<V>(tile, sizes, queries, packed.transposed_keys, scores);
    SoftmaxTile<V>(tile, sizes, args.shape.scale, scores, softmax, out);
    if (k == 0) {
      TileTimesRows<V, Output::kOverwrite>(tile, sizes, scores, packed.values, out);
    } else {
      TileTimesRows<V, Output::kAccumulate>(tile, sizes, scores, packed.values, out);
    }
  }
  float* log_sum_exp =
      args.log_sum_exp.Row<float>(args.shape.StatisticRows(first_token) + head) + q;
  for (int64_t i = 0; i < rows; ++i) {
    const auto inverse = V::Set1(1.0f / softmax.sum[i]);
    E* target = args.out.Row<E>(token + i) + head * sizes.head;
    ForEachVector(sizes.head, [&](int64_t j, auto lanes) {
      V::Store(target + j, V::Mul(V::Load(out + i * sizes.padded_head + j), inverse), lanes);
    });
    log_sum_exp[i] = static_cast<float>(static_cast<double>(softmax.max[i]) +
                                        std::log(static_cast<double>(softmax.sum[i])));
  }
}

// E: of queries, keys, values and outputs.
template <typename V, typename E>
void AttentionForwardTiles(const AttentionForwardArgs& args) {
  const AttentionSizes sizes(args.shape);
  const int64_t group = args.shape.query_heads / args.shape.kv_heads;
  float* keys = CacheLineStart(args.workspace.As<float>());
  float* values = keys + sizes.plane;
  for (int64_t token = 0; token < args.q.rows(); token += sizes.tokens) {
    for (int64_t kv = 0; kv < args.shape.kv_heads; ++kv) {
      const int64_t column = kv * sizes.head;
      PackTransposedPanels<V>(SequenceRows<E>(args.k, sizes, token, column), keys);
      PackPanels<V>(SequenceRows<E>(args.v, sizes, token, column), sizes.padded_tokens, values);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        for (int64_t q = 0; q < sizes.tokens; q += kQueryTile) {
          AttentionForwardTile<V, E>(
              args, sizes, {keys, values}, token, head, q, values + sizes.plane);
        }
      }
    }
  }
}

}  // namespace ravel::kernels::cpu
