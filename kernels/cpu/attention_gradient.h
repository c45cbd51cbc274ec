#pragma once

// Backward pass of causal attention: probabilities are made again from the saved log-sum-exp, tile
// by tile, keys in the outer loop and queries in the inner one [Dao et al. 2022].

#include <algorithm>

#include "kernels/cpu/attention_tiles.h"

namespace ravel::kernels::cpu {

// Parts of the workspace: operands packed for the tile gemms, and gradients of one head in rows
// of padded_head.
struct GradientBuffers {
  float* transposed_keys;
  float* keys;
  float* transposed_values;
  float* queries;
  float* output_gradients;
  float* query_rows;
  float* output_gradient_rows;
  float* dq;
  float* dk;
  float* dv;
  float* delta;  // per token: sum over the head of dout * out
  float* probabilities;
  float* score_gradients;

  GradientBuffers(const AttentionSizes& sizes, float* workspace)
      : transposed_keys(workspace),
        keys(transposed_keys + sizes.plane),
        transposed_values(keys + sizes.plane),
        queries(transposed_values + sizes.plane),
        output_gradients(queries + sizes.plane),
        query_rows(output_gradients + sizes.plane),
        output_gradient_rows(query_rows + sizes.plane),
        dq(output_gradient_rows + sizes.plane),
        dk(dq + sizes.plane),
        dv(dk + sizes.plane),
        delta(dv + sizes.plane),
        probabilities(delta + sizes.padded_tokens),
        score_gradients(probabilities + kQueryTile * kKeyTile) {}
};

// scores and dP -> P (in scores) and dS = P * (dP - delta) * scale (in score_gradients); zero where
// masked.
template <typename V>
inline void GradientTileRow(
    float* p, float* ds, int64_t visible, int64_t keys, float scale, float log_sum, float delta) {
  const auto factor = V::Set1(scale);
  const auto shift = V::Set1(log_sum);
  const auto mean = V::Set1(delta);
  int64_t j = 0;
  for (; j < visible; j += 8) {
    auto e = Exp<V>(V::Sub(V::Mul(V::Load(p + j), factor), shift), kSoftmaxFloor);
    auto d = V::Mul(V::Mul(e, V::Sub(V::Load(ds + j), mean)), factor);
    if (visible - j < 8) {
      e = V::KeepFirst(e, static_cast<int>(visible - j), V::Zero());
      d = V::KeepFirst(d, static_cast<int>(visible - j), V::Zero());
    }
    V::Store(p + j, e);
    V::Store(ds + j, d);
  }
  for (; j < keys; j += 8) {
    V::Store(p + j, V::Zero());
    V::Store(ds + j, V::Zero());
  }
}

template <typename V>
void AttentionBackwardTile(const AttentionBackwardArgs& args,
                           const AttentionSizes& sizes,
                           const GradientBuffers& buffers,
                           const ScoreTile& tile,
                           int64_t first_token,
                           int64_t head) {
  const bool first_head = head % (args.shape.query_heads / args.shape.kv_heads) == 0;
  const int64_t row = tile.q * sizes.padded_head;
  TileScores<V>(
      tile, sizes, buffers.query_rows + row, buffers.transposed_keys, buffers.probabilities);
  TileScores<V>(tile,
                sizes,
                buffers.output_gradient_rows + row,
                buffers.transposed_values,
                buffers.score_gradients);
  const float* log_sum_exp =
      args.log_sum_exp.Row<float>(args.shape.StatisticRows(first_token) + head) + tile.q;
  for (int64_t i = 0; i < tile.rows; ++i) {
    GradientTileRow<V>(buffers.probabilities + i * kKeyTile,
                       buffers.score_gradients + i * kKeyTile,
                       tile.Visible(i),
                       tile.keys,
                       args.shape.scale,
                       log_sum_exp[i],
                       buffers.delta[tile.q + i]);
  }
  float* dv = buffers.dv + tile.k * sizes.padded_head;
  float* dk = buffers.dk + tile.k * sizes.padded_head;
  float* dq = buffers.dq + tile.q * sizes.padded_head;
  TransposedTileTimesRows<V>(
      tile, sizes, first_head, buffers.probabilities, buffers.output_gradients, dv);
  TransposedTileTimesRows<V>(tile, sizes, first_head, buffers.score_gradients, buffers.queries, dk);
  if (tile.k == 0) {
    TileTimesRows<V, Output::kOverwrite>(tile, sizes, buffers.score_gradients, buffers.keys, dq);
  } else {
    TileTimesRows<V, Output::kAccumulate>(tile, sizes, buffers.score_gradients, buffers.keys, dq);
  }
}

template <typename V, typename E>
inline void DeltaRows(const AttentionBackwardArgs& args,
                      const AttentionSizes& sizes,
                      int64_t first_token,
                      int64_t head,
                      float* delta) {
  for (int64_t i = 0; i < sizes.tokens; ++i) {
    const E* out = args.out.Row<E>(first_token + i) + head * sizes.head;
    const E* dout = args.dout.Row<E>(first_token + i) + head * sizes.head;
    auto dot = V::Zero();
    ForEachVector(sizes.head, [&](int64_t j, auto lanes) {
      dot = V::Fma(V::Load(out + j, lanes), V::Load(dout + j, lanes), dot);
    });
    delta[i] = V::ReduceAdd(dot);
  }
}

// Rows of padded_head -> columns [column, column + head) of a view.
template <typename V, typename E>
inline void CopyOut(const AttentionSizes& sizes,
                    const float* rows,
                    const TensorView& view,
                    int64_t first_token,
                    int64_t column) {
  for (int64_t i = 0; i < sizes.tokens; ++i) {
    E* to = view.Row<E>(first_token + i) + column;
    const float* from = rows + i * sizes.padded_head;
    ForEachVector(sizes.head, [&](int64_t j, auto lanes) {
      V::Store(to + j, V::Load(from + j, lanes), lanes);
    });
  }
}

template <typename V, typename E>
void AttentionBackwardHead(const AttentionBackwardArgs& args,
                           const AttentionSizes& sizes,
                           const GradientBuffers& buffers,
                           int64_t first_token,
                           int64_t head) {
  const auto pack = [&](const TensorView& view, float* panels, float* rows) {
    const StridedRows<E> x = SequenceRows<E>(view, sizes, first_token, head * sizes.head);
    PackPanels<V>(x, sizes.padded_tokens, panels);
    PackRows<V>(x, sizes.padded_head, rows);
  };
  pack(args.q, buffers.queries, buffers.query_rows);
  pack(args.dout, buffers.output_gradients, buffers.output_gradient_rows);
  DeltaRows<V, E>(args, sizes, first_token, head, buffers.delta);
  for (int64_t k = 0; k < sizes.tokens; k += kKeyTile) {
    for (int64_t q = k / kQueryTile * kQueryTile; q < sizes.tokens; q += kQueryTile) {
      const int64_t rows = std::min(kQueryTile, sizes.tokens - q);
      const ScoreTile tile = {q, rows, k, std::min(kKeyTile, q + rows - k)};
      AttentionBackwardTile<V>(args, sizes, buffers, tile, first_token, head);
    }
  }
  CopyOut<V, E>(sizes, buffers.dq, args.dq, first_token, head * sizes.head);
}

// E: of operands and their gradients.
template <typename V, typename E>
void AttentionBackwardTiles(const AttentionBackwardArgs& args) {
  const AttentionSizes sizes(args.shape);
  const GradientBuffers buffers(sizes, CacheLineStart(args.workspace.As<float>()));
  const int64_t group = args.shape.query_heads / args.shape.kv_heads;
  for (int64_t token = 0; token < args.q.rows(); token += sizes.tokens) {
    for (int64_t kv = 0; kv < args.shape.kv_heads; ++kv) {
      const int64_t column = kv * sizes.head;
      const StridedRows<E> k = SequenceRows<E>(args.k, sizes, token, column);
      PackTransposedPanels<V>(k, buffers.transposed_keys);
      PackPanels<V>(k, sizes.padded_tokens, buffers.keys);
      PackTransposedPanels<V>(SequenceRows<E>(args.v, sizes, token, column),
                              buffers.transposed_values);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        AttentionBackwardHead<V, E>(args, sizes, buffers, token, head);
      }
      CopyOut<V, E>(sizes, buffers.dk, args.dk, token, column);
      CopyOut<V, E>(sizes, buffers.dv, args.dv, token, column);
    }
  }
}

}  // namespace ravel::kernels::cpu
