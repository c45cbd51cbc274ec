#pragma once

// Small gemms for attention tiles: c [m, n] (=|+=) a [m, k] * b, with b packed in panels of 16
// columns. Every element of c is one chain of fma over k in ascending order, so its bits do not
// depend on how the rows are cut into strips.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cpu/simd_math.h"
#include "kernels/gemm.h"

namespace ravel::kernels::cpu {

inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kCacheLineElements = 16;

// The first cache line from `data` on. Speed depends on it, results do not.
inline float* CacheLineStart(float* data) {
  constexpr uintptr_t kLineBytes = kCacheLineElements * sizeof(float);
  return data + -reinterpret_cast<uintptr_t>(data) % kLineBytes / sizeof(float);
}

// Element (i, p) of a left operand is data[i * row_step + p * inner_step].
struct LeftOperand {
  const float* data;
  int64_t row_step;
  int64_t inner_step;
};

struct TileOutput {
  float* data;
  int64_t row_step;
};

// One or two panels, `step` elements apart, that a strip is multiplied with.
struct Panels {
  const float* data;
  int64_t step;
  int64_t count;
};

template <typename V, Output kOutput, int kPanels, size_t... kRow>
inline void StripOfRows(
    int64_t k, LeftOperand a, const Panels& panels, TileOutput c, std::index_sequence<kRow...>) {
  constexpr size_t kRows = sizeof...(kRow);
  typename V::P sum[kRows];
  typename V::P more[kPanels == 2 ? kRows : 1];
  const auto row = [](int64_t step, size_t i) { return static_cast<int64_t>(i) * step; };
  if constexpr (kOutput == Output::kAccumulate) {
    ((sum[kRow] = V::LoadPanel(c.data + row(c.row_step, kRow))), ...);
  } else {
    ((sum[kRow] = V::ZeroPanel()), ...);
  }
  if constexpr (kPanels == 2 && kOutput == Output::kAccumulate) {
    ((more[kRow] = V::LoadPanel(c.data + row(c.row_step, kRow) + kPanelColumns)), ...);
  } else if constexpr (kPanels == 2) {
    ((more[kRow] = V::ZeroPanel()), ...);
  }
  // A pointer for every three rows: with one for all, the offsets do not fit into the registers.
  const float* rows0 = a.data;
  const float* rows3 = a.data + row(a.row_step, 3);
  const float* rows6 = a.data + row(a.row_step, 6);
  const float* rows9 = a.data + row(a.row_step, 9);
  const float* panel = panels.data;
#pragma GCC unroll 4
  for (int64_t p = 0; p < k; ++p) {
    // Row by row, so that few registers besides the sums are alive.
    const auto b = V::LoadPanel(panel);
    const auto next = V::LoadPanel(panel + (kPanels == 2 ? panels.step : 0));
    const auto step = [&](auto index) {
      constexpr size_t kIndex = index;
      const float* rows = kIndex < 3 ? rows0 : kIndex < 6 ? rows3 : kIndex < 9 ? rows6 : rows9;
      const float x = rows[row(a.row_step, kIndex % 3)];
      sum[kIndex] = V::FmaPanel(x, b, sum[kIndex]);
      if constexpr (kPanels == 2) {
        more[kIndex] = V::FmaPanel(x, next, more[kIndex]);
      }
    };
    (step(std::integral_constant<size_t, kRow>()), ...);
    panel += kPanelColumns;
    rows0 += a.inner_step;
    rows3 += a.inner_step;
    rows6 += a.inner_step;
    rows9 += a.inner_step;
  }
  (V::StorePanel(c.data + row(c.row_step, kRow), sum[kRow]), ...);
  if constexpr (kPanels == 2) {
    (V::StorePanel(c.data + row(c.row_step, kRow) + kPanelColumns, more[kRow]), ...);
  }
}

template <typename V, Output kOutput, size_t kRows>
inline void StripOf(int64_t k, LeftOperand a, const Panels& panels, TileOutput c) {
  if constexpr (V::kStripPanels == 2) {
    if (panels.count == 2) {
      StripOfRows<V, kOutput, 2>(k, a, panels, c, std::make_index_sequence<kRows>());
      return;
    }
  }
  StripOfRows<V, kOutput, 1>(k, a, panels, c, std::make_index_sequence<kRows>());
}

// A strip of 1 to V::kStripRows rows times 1 to V::kStripPanels panels.
template <typename V, Output kOutput>
inline void StripTimesPanels(
    int64_t rows, int64_t k, LeftOperand a, const Panels& panels, TileOutput c) {
  if (rows == V::kStripRows) {
    StripOf<V, kOutput, V::kStripRows>(k, a, panels, c);
    return;
  }
  for (; rows >= 4; rows -= 4) {
    StripOf<V, kOutput, 4>(k, a, panels, c);
    a.data += 4 * a.row_step;
    c.data += 4 * c.row_step;
  }
  for (; rows > 0; --rows) {
    StripOf<V, kOutput, 1>(k, a, panels, c);
    a.data += a.row_step;
    c.data += c.row_step;
  }
}

// Rows [n, columns] of a matrix of fp32 or bf16 whose rows are `step` apart.
template <typename E>
struct StridedRows {
  const E* data;
  int64_t step;
  int64_t n;
  int64_t columns;
};

// -> rows of `padded_columns`, close together: rows a large power of two apart share cache sets.
// Leaves elements beyond `columns` alone.
template <typename V, typename E>
inline void PackRows(const StridedRows<E>& x, int64_t padded_columns, float* out) {
  for (int64_t row = 0; row < x.n; ++row) {
    const E* from = x.data + row * x.step;
    float* to = out + row * padded_columns;
    ForEachVector(x.columns, [&](int64_t j, auto lanes) {
      V::Store(to + j, V::Load(from + j, lanes), lanes);
    });
  }
}

// -> panels [ceil(columns / 16)][padded_rows][16], zero beyond. For gemms whose inner index is
// n.
template <typename V, typename E>
inline void PackPanels(const StridedRows<E>& x, int64_t padded_rows, float* out) {
  const int64_t panel = padded_rows * kPanelColumns;
  const int64_t whole = x.columns / kPanelColumns;
  const int64_t rest = x.columns % kPanelColumns;
  for (int64_t row = 0; row < x.n; ++row) {
    const E* from = x.data + row * x.step;
    float* to = out + row * kPanelColumns;
    for (int64_t i = 0; i < whole; ++i) {
      V::StorePanel(to + i * panel, V::LoadPanel(from + i * kPanelColumns));
    }
    if (rest > 0) {
      float* last = to + whole * panel;
      std::transform(
          from + whole * kPanelColumns, from + whole * kPanelColumns + rest, last, [](E element) {
            return ValueOf(element);
          });
      std::fill(last + rest, last + kPanelColumns, 0.0f);
    }
  }
  for (int64_t i = 0; i < whole + (rest > 0 ? 1 : 0); ++i) {
    std::fill(out + i * panel + x.n * kPanelColumns, out + (i + 1) * panel, 0.0f);
  }
}

// -> panels [ceil(n / 16)][columns][16]: the transpose, 16 rows to a panel, zero beyond.
template <typename V, typename E>
inline void PackTransposedPanels(const StridedRows<E>& x, float* out) {
  for (int64_t begin = 0; begin < x.n; begin += 8) {
    float* panel = out + begin / kPanelColumns * x.columns * kPanelColumns + begin % kPanelColumns;
    const E* rows = x.data + begin * x.step;
    const int64_t count = std::min<int64_t>(8, x.n - begin);
    int64_t column = 0;
    for (; count == 8 && column + 8 <= x.columns; column += 8) {
      V::Transpose8x8(rows + column, x.step, panel + column * kPanelColumns, kPanelColumns);
    }
    for (; column < x.columns; ++column) {
      for (int64_t lane = 0; lane < 8; ++lane) {
        panel[column * kPanelColumns + lane] =
            lane < count ? ValueOf(rows[lane * x.step + column]) : 0.0f;
      }
    }
  }
  // The second half of the last panel, if no row reaches it.
  if (x.n % kPanelColumns != 0 && x.n % kPanelColumns <= 8) {
    float* panel = out + x.n / kPanelColumns * x.columns * kPanelColumns + 8;
    for (int64_t column = 0; column < x.columns; ++column) {
      std::fill_n(panel + column * kPanelColumns, 8, 0.0f);
    }
  }
}

}  // namespace ravel::kernels::cpu
