#pragma once

// c (=|+=) op(a) * op(b) on one thread, over blocks that are packed once and then stay in the
// caches [Goto and van de Geijn 2008; Van Zee and van de Geijn 2015]: a block of b, in tiles of
// V::kStripPanels times 16 columns, in the second level, and a strip of V::kStripRows rows of a in
// the first, while all tiles of the block stream past it. The other order, a tile in the first
// level and strips that stream, was measured to be slower: it reads and writes c down its columns.
// Whole strips of an a that is not transposed are read where they lie: its rows serve as well as
// packed ones.
//
// The inner index is cut into near-equal sections, by its length alone. An element of c is the sum
// of its sections in ascending order, each one chain of fma from zero; kAccumulate adds them to
// what c holds. So its bits depend neither on the vector type, nor on the other sizes, nor on where
// operands lie.
//
// Operands of bf16 or fp16 are widened as they are packed, so that the products and sums are those
// of fp32. A narrow c is summed in a block of fp32, over all sections, and then rounded once. So is
// a c whose sums are scaled, whatever the types: the block starts from zero, and is scaled, added
// to c and rounded at the end.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cpu/gemm_packing.h"
#include "kernels/gemm.h"

namespace ravel::kernels::cpu {

// Columns of b that are multiplied at a time, a multiple of every tile: at most 1 MiB of a second
// level of 2 MiB, which a neighbour of the core may share.
inline constexpr int64_t kGemmColumns = 512;
// Rows of a transposed a that are packed at a time: few, which stay in the second level, too, where
// one block of b has all columns; else more, because each time all of b is packed for them.
inline constexpr int64_t kGemmPackedRowsOfOneBlock = 192;
inline constexpr int64_t kGemmPackedRows = 1536;
// Rows of c of a gemm of bf16 or fp16 that are computed at a time: both operands are packed for
// them, and c may be a block of fp32.
inline constexpr int64_t kGemmNarrowRows = 384;
// The longest section of an inner index, and the longest inner index that is one: each section
// reads and writes all of c once more.
inline constexpr int64_t kGemmSection = 384;
inline constexpr int64_t kGemmOneSection = 512;

inline int64_t GemmSection(int64_t k) {
  const int64_t sections = k <= kGemmOneSection ? 1 : DivCeil(k, kGemmSection);
  return RoundUp(DivCeil(k, sections), int64_t{8});
}

inline int64_t GemmColumns(const GemmArgs& args) {
  const int64_t n = args.c.columns();
  return RoundUp(DivCeil(n, DivCeil(n, kGemmColumns)), int64_t{32});
}

// Whether a gemm goes through packed blocks of both operands and, maybe, a block of sums.
inline bool UsesPackedBlocks(const GemmArgs& args) {
  return args.a.dtype != DType::kF32 || HasScale(args);
}
inline bool UsesBlockOfSums(const GemmArgs& args) {
  return args.c.dtype != DType::kF32 || HasScale(args);
}

// Returns the elements of workspace that a gemm needs; no operand is empty.
inline int64_t GemmWorkspaceElements(const GemmArgs& args) {
  const bool flip = args.transpose_a == Transpose::kYes;
  const int64_t section = GemmSection(flip ? args.a.rows() : args.a.columns());
  const bool one_block = args.c.columns() <= GemmColumns(args);
  const int64_t most_rows = UsesPackedBlocks(args) ? kGemmNarrowRows
                            : !flip                ? int64_t{12}
                            : one_block            ? kGemmPackedRowsOfOneBlock
                                                   : kGemmPackedRows;
  const int64_t rows = std::min(most_rows, RoundUp(args.c.rows(), int64_t{12}));
  const int64_t sums = UsesBlockOfSums(args) ? rows * GemmColumns(args) : 0;
  // The narrowest strips have the most gaps.
  return sums + rows / 6 * StripStep<6>(section) + GemmColumns(args) / 16 * StripStep<16>(section) +
         4 * kCacheLineElements;
}

enum class TileStore { kOverwrite, kAdd };

// The places of a's rows: in packed strips, or a.row_stride apart.
enum class Strips { kPacked, kInPlace };

struct StripSource {
  const float* data;
  int64_t row_step;  // of kInPlace
};

// One strip times one tile: V::kStripRows x (V::kStripPanels * 16) elements of c.
template <typename V, Strips kStrips, TileStore kStore, size_t... kRow>
inline void MultiplyTile(
    int64_t depth, StripSource a, const float* b, TileOutput c, std::index_sequence<kRow...>) {
  constexpr size_t kRows = sizeof...(kRow);
  constexpr bool kTwo = V::kStripPanels == 2;
  constexpr bool kPacked = kStrips == Strips::kPacked;
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
  // A pointer for every three rows: with one for all, the offsets do not fit into the registers.
  const int64_t row_step = kPacked ? 1 : a.row_step;
  const float* rows0 = a.data;
  const float* rows3 = a.data + 3 * row_step;
  const float* rows6 = a.data + 6 * row_step;
  const float* rows9 = a.data + 9 * row_step;
#pragma GCC unroll 4
  for (int64_t p = 0; p < depth; ++p, b += kTile) {
    const auto first = V::LoadPanel(b);
    const auto second = V::LoadPanel(b + (kTwo ? kPanelColumns : 0));
    const auto step = [&](auto index) {
      constexpr size_t kIndex = index;
      const float* rows = kIndex < 3 ? rows0 : kIndex < 6 ? rows3 : kIndex < 9 ? rows6 : rows9;
      const float x = kPacked ? rows0[kIndex] : rows[static_cast<int64_t>(kIndex % 3) * row_step];
      sum[kIndex] = V::FmaPanel(x, first, sum[kIndex]);
      if constexpr (kTwo) {
        more[kIndex] = V::FmaPanel(x, second, more[kIndex]);
      }
    };
    (step(std::integral_constant<size_t, kRow>()), ...);
    constexpr int64_t kNext = kPacked ? static_cast<int64_t>(kRows) : 1;
    rows0 += kNext;
    rows3 += kNext;
    rows6 += kNext;
    rows9 += kNext;
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
template <typename V, Strips kStrips, TileStore kStore>
inline void MultiplyPartOfTile(
    int64_t depth, StripSource a, const float* b, TileOutput c, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  alignas(64) float whole[V::kStripRows * kTile];
  MultiplyTile<V, kStrips, TileStore::kOverwrite>(
      depth, a, b, {whole, kTile}, std::make_index_sequence<V::kStripRows>());
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t x = 0; x < columns; ++x) {
      float& to = c.data[y * c.row_step + x];
      const float product = whole[y * kTile + x];
      to = kStore == TileStore::kAdd ? to + product : product;
    }
  }
}

// Rows of a for one section.
struct LeftBlock {
  int64_t rows;
  StripSource strips;
  const float* rest;  // of kInPlace: the rows that are no whole strip, packed
};

// a.rows x columns elements of c, for one section; b is a packed block.
template <typename V, Strips kStrips, TileStore kStore>
inline void MultiplyBlock(
    const LeftBlock& a, int64_t columns, int64_t depth, const float* b, TileOutput c) {
  constexpr int64_t kTile = V::kStripPanels * kPanelColumns;
  const int64_t step = kStrips == Strips::kPacked ? StripStep<V::kStripRows>(depth)
                                                  : V::kStripRows * a.strips.row_step;
  StripSource strip = a.strips;
  for (int64_t i = 0; i < a.rows; i += V::kStripRows, strip.data += step) {
    const int64_t height = std::min(V::kStripRows, a.rows - i);
    for (int64_t j = 0; j < columns; j += kTile) {
      const int64_t width = std::min(kTile, columns - j);
      const float* tile = b + j / kTile * StripStep<kTile>(depth);
      const TileOutput out = {c.data + i * c.row_step + j, c.row_step};
      if (kStrips == Strips::kInPlace && height < V::kStripRows) {
        MultiplyPartOfTile<V, Strips::kPacked, kStore>(
            depth, {a.rest, 0}, tile, out, height, width);
      } else if (height < V::kStripRows || width < kTile) {
        MultiplyPartOfTile<V, kStrips, kStore>(depth, strip, tile, out, height, width);
      } else {
        MultiplyTile<V, kStrips, kStore>(
            depth, strip, tile, out, std::make_index_sequence<V::kStripRows>());
      }
    }
  }
}

template <typename V, Strips kStrips>
void GemmSections(const GemmArgs& args, float* workspace) {
  constexpr bool kInPlace = kStrips == Strips::kInPlace;
  const int64_t m = args.c.rows();
  const int64_t n = args.c.columns();
  const int64_t k = kInPlace ? args.a.columns() : args.a.rows();
  const PackSource<float> a = {args.a.As<float>(), args.a.row_stride, !kInPlace, m};
  const PackSource<float> b = {
      args.b.As<float>(), args.b.row_stride, args.transpose_b == Transpose::kNo, n};
  const int64_t section = GemmSection(k);
  const int64_t block = GemmColumns(args);
  float* packed_b = CacheLineStart(workspace);
  float* packed_a = packed_b + block / kPanelColumns * StripStep<kPanelColumns>(section);
  const bool one_block = n <= block;
  const int64_t at_a_time = kInPlace ? m : one_block ? kGemmPackedRowsOfOneBlock : kGemmPackedRows;
  for (int64_t p = 0; p < k; p += section) {
    const int64_t depth = std::min(section, k - p);
    const bool first = p == 0 && args.output == Output::kOverwrite;
    for (int64_t top = 0; top < m; top += at_a_time) {
      const int64_t bottom = std::min(m, top + at_a_time);
      const int64_t packed = kInPlace ? bottom / V::kStripRows * V::kStripRows : top;
      PackStrips<V, V::kStripRows>(a.From(packed, p), bottom - packed, depth, packed_a);
      for (int64_t j = 0; j < n; j += block) {
        const int64_t columns = std::min(block, n - j);
        if (top == 0 || !one_block) {
          PackStrips<V, V::kStripPanels * kPanelColumns>(b.From(j, p), columns, depth, packed_b);
        }
        const float* strips = kInPlace ? a.From(top, p).data : packed_a;
        const LeftBlock left = {bottom - top, {strips, args.a.row_stride}, packed_a};
        const TileOutput c = {args.c.Row<float>(top) + j, args.c.row_stride};
        if (first) {
          MultiplyBlock<V, kStrips, TileStore::kOverwrite>(left, columns, depth, packed_b, c);
        } else {
          MultiplyBlock<V, kStrips, TileStore::kAdd>(left, columns, depth, packed_b, c);
        }
      }
    }
  }
}

// Packed blocks of one section, and what they are multiplied into.
struct PackedBlock {
  int64_t rows;
  int64_t columns;
  float* packed_a;
  float* packed_b;
  TileOutput sums;  // fp32: c itself, or a block that is rounded to it
};

// The block of c whose corner is (top, left): all sections of the inner index, packed and added in
// ascending order. `output`: what the first of them does.
template <typename V, typename E>
inline void MultiplyPackedBlock(const PackedBlock& block,
                                const PackSource<E>& a,
                                const PackSource<E>& b,
                                int64_t k,
                                Output output) {
  const int64_t section = GemmSection(k);
  for (int64_t p = 0; p < k; p += section) {
    const int64_t depth = std::min(section, k - p);
    PackStrips<V, V::kStripRows>(a.From(0, p), block.rows, depth, block.packed_a);
    PackStrips<V, V::kStripPanels * kPanelColumns>(
        b.From(0, p), block.columns, depth, block.packed_b);
    const LeftBlock left = {block.rows, {block.packed_a, 0}, nullptr};
    if (p == 0 && output == Output::kOverwrite) {
      MultiplyBlock<V, Strips::kPacked, TileStore::kOverwrite>(
          left, block.columns, depth, block.packed_b, block.sums);
    } else {
      MultiplyBlock<V, Strips::kPacked, TileStore::kAdd>(
          left, block.columns, depth, block.packed_b, block.sums);
    }
  }
}

// Rows of `from` to rows of `to`, `columns` of each, widened or rounded on the way.
template <typename V, typename From, typename To>
inline void CopyRows(
    int64_t rows, int64_t columns, const From* from, int64_t from_step, To* to, int64_t to_step) {
  for (int64_t row = 0; row < rows; ++row) {
    ForEachVector(columns, [&](int64_t j, auto lanes) {
      V::Store(to + row * to_step + j, V::Load(from + row * from_step + j, lanes), lanes);
    });
  }
}

// c (=|+=) scale * sums, for a block of c at `to`.
template <typename V, typename To>
inline void StoreScaled(
    const PackedBlock& block, float scale, Output output, To* to, int64_t step) {
  const auto factor = V::Set1(scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    const float* sums = block.sums.data + row * block.sums.row_step;
    ForEachVector(block.columns, [&](int64_t j, auto lanes) {
      const auto scaled = V::Mul(V::Load(sums + j, lanes), factor);
      To* at = to + row * step + j;
      V::Store(
          at, output == Output::kAccumulate ? V::Add(V::Load(at, lanes), scaled) : scaled, lanes);
    });
  }
}

inline float GemmScale(const GemmArgs& args) {
  const auto value = [](const TensorView& scale) {
    return scale.present() ? *scale.As<float>() : 1.0f;
  };
  return value(args.scale_a) * value(args.scale_b);
}

// One block of c, of type C, at `to`. Its sums are c itself, or a block of fp32 that is rounded or
// scaled.
template <typename V, typename C, typename E>
inline void MultiplyIntoBlock(const GemmArgs& args,
                              const PackedBlock& block,
                              const PackSource<E>& a,
                              const PackSource<E>& b,
                              C* to) {
  const int64_t step = args.c.row_stride;
  const int64_t k = args.transpose_a == Transpose::kYes ? args.a.rows() : args.a.columns();
  if (HasScale(args)) {
    MultiplyPackedBlock<V>(block, a, b, k, Output::kOverwrite);
    StoreScaled<V>(block, GemmScale(args), args.output, to, step);
    return;
  }
  if constexpr (std::is_same_v<C, float>) {
    MultiplyPackedBlock<V>(block, a, b, k, args.output);
  } else {
    const TileOutput& sums = block.sums;
    if (args.output == Output::kAccumulate) {
      CopyRows<V>(block.rows, block.columns, to, step, sums.data, sums.row_step);
    }
    MultiplyPackedBlock<V>(block, a, b, k, args.output);
    CopyRows<V>(block.rows, block.columns, sums.data, sums.row_step, to, step);
  }
}

// a and b of type E, c of type C.
template <typename V, typename E, typename C>
void GemmPacked(const GemmArgs& args, float* workspace) {
  const int64_t m = args.c.rows();
  const int64_t n = args.c.columns();
  const bool flip_a = args.transpose_a == Transpose::kYes;
  const int64_t k = flip_a ? args.a.rows() : args.a.columns();
  const PackSource<E> a = {args.a.As<E>(), args.a.row_stride, flip_a, m};
  const PackSource<E> b = {
      args.b.As<E>(), args.b.row_stride, args.transpose_b == Transpose::kNo, n};
  const bool apart = UsesBlockOfSums(args);
  const int64_t columns = GemmColumns(args);
  const int64_t rows = std::min(kGemmNarrowRows, RoundUp(m, int64_t{12}));
  float* sums = CacheLineStart(workspace);
  float* packed_b = sums + (apart ? rows * columns : 0);
  float* packed_a = packed_b + columns / kPanelColumns * StripStep<kPanelColumns>(GemmSection(k));
  for (int64_t top = 0; top < m; top += rows) {
    for (int64_t left = 0; left < n; left += columns) {
      C* to = args.c.Row<C>(top) + left;
      PackedBlock block = {.rows = std::min(rows, m - top),
                           .columns = std::min(columns, n - left),
                           .packed_a = packed_a,
                           .packed_b = packed_b,
                           .sums = {sums, columns}};
      if constexpr (std::is_same_v<C, float>) {
        block.sums = apart ? block.sums : TileOutput{to, args.c.row_stride};
      }
      MultiplyIntoBlock<V>(args, block, a.From(top, 0), b.From(left, 0), to);
    }
  }
}

// a and b are E, bf16 or fp16; c is E or fp32.
template <typename V, typename E>
void GemmOfNarrow(const GemmArgs& args, float* workspace) {
  if (args.c.dtype == DType::kF32) {
    GemmPacked<V, E, float>(args, workspace);
  } else {
    GemmPacked<V, E, E>(args, workspace);
  }
}

// No operand is empty; `workspace` holds GemmWorkspaceElements.
template <typename V>
void GemmBlocks(const GemmArgs& args, float* workspace) {
  if (args.a.dtype == DType::kBF16) {
    GemmOfNarrow<V, uint16_t>(args, workspace);
  } else if (args.a.dtype == DType::kF16) {
    GemmOfNarrow<V, Fp16>(args, workspace);
  } else if (HasScale(args)) {
    GemmPacked<V, float, float>(args, workspace);
  } else if (args.transpose_a == Transpose::kYes) {
    GemmSections<V, Strips::kPacked>(args, workspace);
  } else {
    GemmSections<V, Strips::kInPlace>(args, workspace);
  }
}

}  // namespace ravel::kernels::cpu
