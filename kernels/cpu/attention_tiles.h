#pragma once

// Causal attention over tiles of 48 queries x 96 keys, one kv head at a time: keys and values (in
// the backward pass also queries and output gradients) of one sequence are packed once, then every
// product is a tile product. Strips and panels wholly above the diagonal are skipped. Scores exist
// for one tile only.

#include <algorithm>
#include <cmath>

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

  // Eight planes (five packed, three gradients), delta per token, two score tiles, one output tile,
  // row statistics.
  int64_t WorkspaceElements() const {
    return 8 * plane + padded_tokens + 2 * kQueryTile * kKeyTile + kQueryTile * padded_head +
           3 * kQueryTile;
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

// c [rows, keys] = a [rows, head] * transposed panels of the keys; only what some row of a strip
// may see.
template <typename V>
inline void TileScores(const ScoreTile& tile,
                       const AttentionSizes& sizes,
                       LeftOperand a,
                       const float* transposed,
                       float* c) {
  const float* panel = transposed + tile.k * sizes.head;
  for (int64_t key = 0; key < tile.keys; key += kPanelColumns) {
    for (int64_t i = 0; i < tile.rows; i += kStripRows) {
      const int64_t rows = std::min(kStripRows, tile.rows - i);
      if (tile.Visible(i + rows - 1) > key) {
        const LeftOperand strip = {a.data + i * a.row_step, a.row_step, a.inner_step};
        StripTimesPanel<V, Output::kOverwrite>(
            rows, sizes.head, strip, panel, {c + i * kKeyTile + key, kKeyTile});
      }
    }
    panel += kPanelColumns * sizes.head;
  }
}

// out [rows, padded_head] += probabilities [rows, keys] * panels of the keys' rows.
template <typename V>
inline void TileTimesRows(const ScoreTile& tile,
                          const AttentionSizes& sizes,
                          const float* probabilities,
                          const float* panels,
                          float* out) {
  for (int64_t column = 0; column < sizes.padded_head; column += kPanelColumns) {
    const float* panel = panels + column * sizes.padded_tokens + tile.k * kPanelColumns;
    for (int64_t i = 0; i < tile.rows; i += kStripRows) {
      const int64_t rows = std::min(kStripRows, tile.rows - i);
      const int64_t visible = tile.Visible(i + rows - 1);
      if (visible > 0) {
        StripTimesPanel<V, Output::kAccumulate>(
            rows,
            visible,
            {probabilities + i * kKeyTile, kKeyTile, 1},
            panel,
            {out + i * sizes.padded_head + column, sizes.padded_head});
      }
    }
  }
}

// out [keys, padded_head] += transposed tile [keys, rows] * panels of the queries' rows.
template <typename V>
inline void TransposedTileTimesRows(const ScoreTile& tile,
                                    const AttentionSizes& sizes,
                                    const float* scores,
                                    const float* panels,
                                    float* out) {
  for (int64_t column = 0; column < sizes.padded_head; column += kPanelColumns) {
    const float* panel = panels + column * sizes.padded_tokens + tile.q * kPanelColumns;
    for (int64_t key = 0; key < tile.keys; key += kStripRows) {
      // Queries before the strip's first key do not see it.
      const int64_t first = std::max<int64_t>(0, tile.k + key - tile.q);
      if (first < tile.rows) {
        StripTimesPanel<V, Output::kAccumulate>(
            std::min(kStripRows, tile.keys - key),
            tile.rows - first,
            {scores + first * kKeyTile + key, 1, kKeyTile},
            panel + first * kPanelColumns,
            {out + key * sizes.padded_head + column, sizes.padded_head});
      }
    }
  }
}

// Running maximum and sum of one tile of queries.
struct OnlineSoftmax {
  float* max;  // of scaled scores
  float* sum;
};

// Row of scores -> exponentials against the new running maximum; zero where masked. Returns by what
// the row's earlier sums shrink.
template <typename V>
inline float SoftmaxRow(
    float* row, int64_t visible, int64_t keys, float scale, float& max, float& sum) {
  auto max_lanes = V::Set1(max);
  const auto factor = V::Set1(scale);
  const int64_t padded = RoundUp(keys, 8);
  for (int64_t j = 0; j < visible; j += 8) {
    auto value = V::Mul(V::Load(row + j), factor);
    if (visible - j < 8) {
      value = V::KeepFirst(value, static_cast<int>(visible - j), V::Set1(-INFINITY));
    }
    V::Store(row + j, value);
    max_lanes = V::Max(max_lanes, value);
  }
  const float new_max = V::ReduceMax(max_lanes);
  const auto shift = V::Set1(new_max);
  auto sum_lanes = V::Zero();
  int64_t j = 0;
  for (; j < visible; j += 8) {
    const auto e = Exp<V>(V::Sub(V::Load(row + j), shift), kSoftmaxFloor);
    V::Store(row + j, e);
    sum_lanes = V::Add(sum_lanes, e);
  }
  for (; j < padded; j += 8) {
    V::Store(row + j, V::Zero());
  }
  float shrink = 1.0f;
  if (new_max != max) {
    alignas(32) float lane[8];
    V::Store(lane, Exp<V>(V::Set1(max - new_max)));
    shrink = lane[0];
  }
  sum = sum * shrink + V::ReduceAdd(sum_lanes);
  max = new_max;
  return shrink;
}

template <typename V>
inline void SoftmaxTile(const ScoreTile& tile,
                        const AttentionSizes& sizes,
                        float scale,
                        float* scores,
                        OnlineSoftmax softmax,
                        float* out) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    float* row = scores + i * kKeyTile;
    const int64_t visible = tile.Visible(i);
    if (visible <= 0) {
      std::fill_n(row, RoundUp(tile.keys, 8), 0.0f);
      continue;
    }
    const float shrink =
        SoftmaxRow<V>(row, visible, tile.keys, scale, softmax.max[i], softmax.sum[i]);
    if (shrink != 1.0f) {
      const auto factor = V::Set1(shrink);
      for (int64_t j = 0; j < sizes.padded_head; j += 8) {
        float* o = out + i * sizes.padded_head + j;
        V::Store(o, V::Mul(V::Load(o), factor));
      }
    }
  }
}

struct PackedKeys {
  const float* transposed_keys;
  const float* values;
};

// One tile of queries of one head against all keys they see.
template <typename V>
void AttentionForwardTile(const AttentionForwardArgs& args,
                          const AttentionSizes& sizes,
                          PackedKeys packed,
                          int64_t first_token,
                          int64_t head,
                          int64_t q,
                          float* scratch) {
  const int64_t rows = std::min(kQueryTile, sizes.tokens - q);
  float* scores = scratch;
  float* out = scores + kQueryTile * kKeyTile;
  const OnlineSoftmax softmax = {out + kQueryTile * sizes.padded_head,
                                 out + kQueryTile * sizes.padded_head + kQueryTile};
  std::fill_n(out, rows * sizes.padded_head, 0.0f);
  std::fill_n(softmax.max, rows, -INFINITY);
  std::fill_n(softmax.sum, rows, 0.0f);
  const int64_t token = first_token + q;
  const LeftOperand query = {args.q.Row<float>(token) + head * sizes.head, args.q.row_stride, 1};
  for (int64_t k = 0; k < q + rows; k += kKeyTile) {
    const ScoreTile tile = {q, rows, k, std::min(kKeyTile, q + rows - k)};
    TileScores<V>(tile, sizes, query, packed.transposed_keys, scores);
    SoftmaxTile<V>(tile, sizes, args.shape.scale, scores, softmax, out);
    TileTimesRows<V>(tile, sizes, scores, packed.values, out);
  }
  float* log_sum_exp = args.log_sum_exp.Row<float>(head) + token;
  for (int64_t i = 0; i < rows; ++i) {
    const auto inverse = V::Set1(1.0f / softmax.sum[i]);
    float* target = args.out.Row<float>(token + i) + head * sizes.head;
    ForEachVector(sizes.head, [&](int64_t j, auto lanes) {
      V::Store(target + j, V::Mul(V::Load(out + i * sizes.padded_head + j), inverse), lanes);
    });
    log_sum_exp[i] = static_cast<float>(static_cast<double>(softmax.max[i]) +
                                        std::log(static_cast<double>(softmax.sum[i])));
  }
}

template <typename V>
void AttentionForwardTiles(const AttentionForwardArgs& args) {
  const AttentionSizes sizes(args.shape);
  const int64_t group = args.shape.query_heads / args.shape.kv_heads;
  float* keys = args.workspace.As<float>();
  float* values = keys + sizes.plane;
  for (int64_t token = 0; token < args.q.rows(); token += sizes.tokens) {
    for (int64_t kv = 0; kv < args.shape.kv_heads; ++kv) {
      PackTransposedPanels(args.k.Row<float>(token) + kv * sizes.head,
                           args.k.row_stride,
                           sizes.tokens,
                           sizes.head,
                           keys);
      PackPanels(args.v.Row<float>(token) + kv * sizes.head,
                 args.v.row_stride,
                 sizes.tokens,
                 sizes.padded_tokens,
                 sizes.head,
                 values);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        for (int64_t q = 0; q < sizes.tokens; q += kQueryTile) {
          AttentionForwardTile<V>(
              args, sizes, {keys, values}, token, head, q, values + sizes.plane);
        }
      }
    }
  }
}

}  // namespace ravel::kernels::cpu
