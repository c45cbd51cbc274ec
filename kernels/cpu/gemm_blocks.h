#pragma once

// c (=|+=) op(a) * op(b) on one thread, over blocks that are packed once and then stay in the
// caches [Goto and van de Geijn 2008; Van Zee and van de Geijn 2015]: a block of a, in strips of
// V::kStripRows rows, in the second level; a block of b, in tiles of V::kStripPanels times 16
// columns, in the third, tile after tile in the first.
//
// The inner index is cut into near-equal sections, by its length alone. An element of c is the sum
// of its sections in ascending order, each one chain of fma from zero; kAccumulate adds them to
// what c holds. So its bits depend neither on the vector type, nor on the other sizes, nor on where
// operands lie.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cpu/gemm_packing.h"
#include "kernels/gemm.h"

namespace ravel::kernels::cpu {

// Rows of a and columns of b at a time: multiples of every strip and tile. Few columns, so that the
// block of c stays in the caches from section to section; more where each block of them would pack
// a again.
inline constexpr int64_t kGemmRows = 384;
inline constexpr int64_t kGemmColumns = 512;
inline constexpr int64_t kGemmColumnsOfPacked = 1536;
inline constexpr int64_t kGemmSection = 512;  // the longest

inline int64_t GemmSection(int64_t k) {
  return RoundUp(DivCeil(k, DivCeil(k, kGemmSection)), int64_t{8});
}

inline int64_t GemmColumns(const GemmArgs& args) {
  const int64_t most = args.transpose_a == Transpose::kYes ? kGemmColumnsOfPacked : kGemmColumns;
  return std::min(most, RoundUp(args.c.columns(), int64_t{32}));
}

// What a product needs beside its operands, none of which is empty.
inline int64_t GemmWorkspaceElements(const GemmArgs& args) {
  const bool flip = args.transpose_a == Transpose::kYes;
  const int64_t section = GemmSection(flip ? args.a.rows() : args.a.columns());
  const int64_t rows = std::min(kGemmRows, RoundUp(args.c.rows(), int64_t{12}));
  // The narrowest strips have the most gaps.
  return rows / 6 * StripStep<6>(section) + GemmColumns(args) / 16 * StripStep<16>(section) +
         4 * kCacheLineElements;
}

enum class TileStore { kOverwrite, kAdd };

// A strip of a: packed, [depth][V::kStripRows]; or V::kStripRows rows where they lie, row_step
// apart.
enum class Left { kPacked, kRows };
struct LeftStrip {
  const float* data;
  int64_t row_step;
};

// One strip times one tile: V::kStripRows x (V::kStripPanels * 16) elements of c.
template <typename V, Left kLeft, TileStore kStore, size_t... kRow>
inline void MultiplyTile(
    int64_t depth, LeftStrip a, const float* b, TileOutput c, std::index_sequence<kRow...>) {
  constexpr size_t kRows = sizeof...(kRow);
  constexpr bool kTwo = V::kStripPanels == 2;
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  typename V::P sum[kRows];
  typename V::P more[kTwo ? kRows : 1];
  const auto row = [&](size_t i) { return c.data + static_cast<int64_t>(i) * c.row_step; };
  (__builtin_prefetch(row(kRow), 1), ...);
  (__builtin_prefetch(row(kRow) + kTile - 1, 1), ...);
  ((sum[kRow] = V::ZeroPanel()), ...);
  if constexpr (kTwo) {
    ((more[kRow] = V::ZeroPanel()), ...);
  }
  // A pointer for every three rows, as in cpu/tile_gemm.h.
  const int64_t row_step = kLeft == Left::kPacked ? 1 : a.row_step;
  const float* rows0 = a.data;
  const float* rows3 = a.data + 3 * row_step;
  const float* rows6 = a.data + 6 * row_step;
  const float* rows9 = a.data + 9 * row_step;
  for (int64_t p = 0; p < depth; ++p, b += kTile) {
    const auto first = V::LoadPanel(b);
    const auto second = V::LoadPanel(b + (kTwo ? kPanelColumns : 0));
    const auto step = [&](auto index) {
      constexpr size_t kIndex = index;
      const float* rows = kIndex < 3 ? rows0 : kIndex < 6 ? rows3 : kIndex < 9 ? rows6 : rows9;
      const float x = rows[static_cast<int64_t>(kIndex % 3) * row_step];
      sum[kIndex] = V::FmaPanel(x, first, sum[kIndex]);
      if constexpr (kTwo) {
        more[kIndex] = V::FmaPanel(x, second, more[kIndex]);
      }
    };
    (step(std::integral_constant<size_t, kRow>()), ...);
    constexpr int64_t kInner = kLeft == Left::kPacked ? static_cast<int64_t>(kRows) : 1;
    rows0 += kInner;
    rows3 += kInner;
    rows6 += kInner;
    rows9 += kInner;
  }
  const auto store = [](float* to, const typename V::P& x) {
    V::StorePanel(to, kStore == TileStore::kAdd ? V::AddPanel(V::LoadPanel(to), x) : x);
  };
  (store(row(kRow), sum[kRow]), ...);
  if constexpr (kTwo) {
    (store(row(kRow) + kPanelColumns, more[kRow]), ...);
  }
}

// The same into part of a tile.
template <typename V, Left kLeft, TileStore kStore>
inline void MultiplyPartOfTile(
    int64_t depth, LeftStrip a, const float* b, TileOutput c, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  alignas(64) float whole[V::kStripRows * kTile];
  MultiplyTile<V, kLeft, TileStore::kOverwrite>(
      depth, a, b, {whole, kTile}, std::make_index_sequence<V::kStripRows>());
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t x = 0; x < columns; ++x) {
      float& to = c.data[y * c.row_step + x];
      const float product = whole[y * kTile + x];
      to = kStore == TileStore::kAdd ? to + product : product;
    }
  }
}

// rows x columns elements of c, for one section: the rows of a from row `begin` on, in one form,
// times a packed block of b.
template <typename V, Left kLeft, TileStore kStore>
inline void MultiplyRows(
    int64_t rows, int64_t columns, int64_t depth, LeftStrip a, const float* b, TileOutput c) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  const int64_t strip =
      kLeft == Left::kPacked ? StripStep<V::kStripRows>(depth) : V::kStripRows * a.row_step;
  for (int64_t j = 0; j < columns; j += kTile) {
    const int64_t width = std::min(kTile, columns - j);
    const float* tile = b + j / kTile * StripStep<kTile>(depth);
    for (int64_t i = 0; i < rows; i += V::kStripRows) {
      const int64_t height = std::min(V::kStripRows, rows - i);
      const LeftStrip left = {a.data + i / V::kStripRows * strip, a.row_step};
      const TileOutput out = {c.data + i * c.row_step + j, c.row_step};
      if (height == V::kStripRows && width == kTile) {
        MultiplyTile<V, kLeft, kStore>(
            depth, left, tile, out, std::make_index_sequence<V::kStripRows>());
      } else {
        MultiplyPartOfTile<V, kLeft, kStore>(depth, left, tile, out, height, width);
      }
    }
  }
}

// A block of a. Rows that lie contiguous in memory are read in place, all but a last short strip.
template <typename V, TileStore kStore>
inline void MultiplyBlock(int64_t rows,
                          int64_t columns,
                          int64_t depth,
                          const PackSource& a,
                          float* packed_a,
                          const float* packed_b,
                          TileOutput c) {
  const int64_t in_place = a.transposed ? 0 : rows / V::kStripRows * V::kStripRows;
  MultiplyRows<V, Left::kRows, kStore>(in_place, columns, depth, {a.data, a.step}, packed_b, c);
  if (in_place < rows) {
    PackStrips<V, V::kStripRows>(a.From(in_place, 0), rows - in_place, depth, packed_a);
    c.data += in_place * c.row_step;
    MultiplyRows<V, Left::kPacked, kStore>(
        rows - in_place, columns, depth, {packed_a, 1}, packed_b, c);
  }
}

// No operand is empty; `workspace` holds GemmWorkspaceElements.
template <typename V>
void GemmBlocks(const GemmArgs& args, float* workspace) {
  const int64_t m = args.c.rows();
  const int64_t n = args.c.columns();
  const bool flip_a = args.transpose_a == Transpose::kYes;
  const int64_t k = flip_a ? args.a.rows() : args.a.columns();
  const PackSource a = {args.a.As<float>(), args.a.row_stride, flip_a, m};
  const PackSource b = {
      args.b.As<float>(), args.b.row_stride, args.transpose_b == Transpose::kNo, n};
  const int64_t section = GemmSection(k);
  const int64_t block = GemmColumns(args);
  float* packed_b = CacheLineStart(workspace);
  float* packed_a = packed_b + block / kPanelColumns * StripStep<kPanelColumns>(section);
  for (int64_t j = 0; j < n; j += block) {
    const int64_t columns = std::min(block, n - j);
    for (int64_t p = 0; p < k; p += section) {
      const int64_t depth = std::min(section, k - p);
      PackStrips<V, V::kStripPanels * kPanelColumns>(b.From(j, p), columns, depth, packed_b);
      for (int64_t i = 0; i < m; i += kGemmRows) {
        const int64_t rows = std::min(kGemmRows, m - i);
        const PackSource left = a.From(i, p);
        const TileOutput c = {args.c.Row<float>(i) + j, args.c.row_stride};
        if (p == 0 && args.output == Output::kOverwrite) {
          MultiplyBlock<V, TileStore::kOverwrite>(
              rows, columns, depth, left, packed_a, packed_b, c);
        } else {
          MultiplyBlock<V, TileStore::kAdd>(rows, columns, depth, left, packed_a, packed_b, c);
        }
      }
    }
  }
}

}  // namespace ravel::kernels::cpu
