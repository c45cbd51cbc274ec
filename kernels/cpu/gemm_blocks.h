#pragma once

// c (=|+=) op(a) * op(b) on one thread, over blocks that are packed once and then stay in the
// caches [Goto and van de Geijn 2008; Van Zee and van de Geijn 2015]: a block of a, in strips of
// V::kStripRows rows, and a block of b, in tiles of V::kStripPanels times 16 columns, both in the
// second level, tile after tile in the first.
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

// Rows of a that are packed at a time and serve all columns, and rows and columns that are
// multiplied at a time: multiples of every strip and tile. A block of b and kGemmRows of a and c
// stay in a second level of 2 MiB, because a shared third level may be far away.
inline constexpr int64_t kGemmPackedRows = 1536;
inline constexpr int64_t kGemmRows = 96;
inline constexpr int64_t kGemmColumns = 768;
inline constexpr int64_t kGemmSection = 384;  // the longest: a tile of 16 columns is 24 KiB

inline int64_t GemmSection(int64_t k) {
  return RoundUp(DivCeil(k, DivCeil(k, kGemmSection)), int64_t{8});
}

inline int64_t GemmColumns(const GemmArgs& args) {
  const int64_t n = args.c.columns();
  return RoundUp(DivCeil(n, DivCeil(n, kGemmColumns)), int64_t{32});
}

// What a product needs beside its operands, none of which is empty.
inline int64_t GemmWorkspaceElements(const GemmArgs& args) {
  const bool flip = args.transpose_a == Transpose::kYes;
  const int64_t section = GemmSection(flip ? args.a.rows() : args.a.columns());
  const int64_t rows = std::min(kGemmPackedRows, RoundUp(args.c.rows(), int64_t{12}));
  // The narrowest strips have the most gaps.
  return rows / 6 * StripStep<6>(section) + GemmColumns(args) / 16 * StripStep<16>(section) +
         4 * kCacheLineElements;
}

enum class TileStore { kOverwrite, kAdd };

// One packed strip times one tile: V::kStripRows x (V::kStripPanels * 16) elements of c.
template <typename V, TileStore kStore, size_t... kRow>
inline void MultiplyTile(
    int64_t depth, const float* a, const float* b, TileOutput c, std::index_sequence<kRow...>) {
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
#pragma GCC unroll 4
  for (int64_t p = 0; p < depth; ++p, a += kRows, b += kTile) {
    const auto first = V::LoadPanel(b);
    const auto second = V::LoadPanel(b + (kTwo ? kPanelColumns : 0));
    const auto step = [&](auto index) {
      constexpr size_t kIndex = index;
      sum[kIndex] = V::FmaPanel(a[kIndex], first, sum[kIndex]);
      if constexpr (kTwo) {
        more[kIndex] = V::FmaPanel(a[kIndex], second, more[kIndex]);
      }
    };
    (step(std::integral_constant<size_t, kRow>()), ...);
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
template <typename V, TileStore kStore>
inline void MultiplyPartOfTile(
    int64_t depth, const float* a, const float* b, TileOutput c, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  alignas(64) float whole[V::kStripRows * kTile];
  MultiplyTile<V, TileStore::kOverwrite>(
      depth, a, b, {whole, kTile}, std::make_index_sequence<V::kStripRows>());
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t x = 0; x < columns; ++x) {
      float& to = c.data[y * c.row_step + x];
      const float product = whole[y * kTile + x];
      to = kStore == TileStore::kAdd ? to + product : product;
    }
  }
}

// rows x columns elements of c, for one section: a packed block of a times one of b.
template <typename V, TileStore kStore>
inline void MultiplyBlock(
    int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, TileOutput c) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  for (int64_t j = 0; j < columns; j += kTile) {
    const int64_t width = std::min(kTile, columns - j);
    const float* tile = b + j / kTile * StripStep<kTile>(depth);
    for (int64_t i = 0; i < rows; i += V::kStripRows) {
      const int64_t height = std::min(V::kStripRows, rows - i);
      const float* strip = a + i / V::kStripRows * StripStep<V::kStripRows>(depth);
      const TileOutput out = {c.data + i * c.row_step + j, c.row_step};
      if (height == V::kStripRows && width == kTile) {
        MultiplyTile<V, kStore>(depth, strip, tile, out, std::make_index_sequence<V::kStripRows>());
      } else {
        MultiplyPartOfTile<V, kStore>(depth, strip, tile, out, height, width);
      }
    }
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
  for (int64_t top = 0; top < m; top += kGemmPackedRows) {
    const int64_t bottom = std::min(m, top + kGemmPackedRows);
    for (int64_t p = 0; p < k; p += section) {
      const int64_t depth = std::min(section, k - p);
      const bool first = p == 0 && args.output == Output::kOverwrite;
      PackStrips<V, V::kStripRows>(a.From(top, p), bottom - top, depth, packed_a);
      for (int64_t j = 0; j < n; j += block) {
        const int64_t columns = std::min(block, n - j);
        PackStrips<V, V::kStripPanels * kPanelColumns>(b.From(j, p), columns, depth, packed_b);
        for (int64_t i = top; i < bottom; i += kGemmRows) {
          const int64_t rows = std::min(kGemmRows, bottom - i);
          const float* strips =
              packed_a + (i - top) / V::kStripRows * StripStep<V::kStripRows>(depth);
          const TileOutput c = {args.c.Row<float>(i) + j, args.c.row_stride};
          if (first) {
            MultiplyBlock<V, TileStore::kOverwrite>(rows, columns, depth, strips, packed_b, c);
          } else {
            MultiplyBlock<V, TileStore::kAdd>(rows, columns, depth, strips, packed_b, c);
          }
        }
      }
    }
  }
}

}  // namespace ravel::kernels::cpu
