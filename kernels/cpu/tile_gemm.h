#pragma once

// Small products for attention tiles: c [m, n] (=|+=) a [m, k] * b, with b packed in panels of 16
// columns. Every element of c is one chain of fma over k in ascending order, so its bits do not
// depend on how the rows are cut into strips.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/cpu/simd_math.h"
#include "kernels/gemm.h"

namespace ravel::kernels::cpu {

inline constexpr int64_t kStripRows = 6;
inline constexpr int64_t kPanelColumns = 16;

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

template <typename V, Output kOutput, size_t... kRow>
inline void StripOfRows(
    int64_t k, LeftOperand a, const float* panel, TileOutput c, std::index_sequence<kRow...>) {
  constexpr size_t kRows = sizeof...(kRow);
  typename V::F low[kRows];
  typename V::F high[kRows];
  if constexpr (kOutput == Output::kAccumulate) {
    ((low[kRow] = V::Load(c.data + static_cast<int64_t>(kRow) * c.row_step)), ...);
    ((high[kRow] = V::Load(c.data + static_cast<int64_t>(kRow) * c.row_step + 8)), ...);
  } else {
    ((low[kRow] = V::Zero()), ...);
    ((high[kRow] = V::Zero()), ...);
  }
  const auto step = [&](typename V::F x, size_t row, typename V::F b0, typename V::F b1) {
    low[row] = V::Fma(x, b0, low[row]);
    high[row] = V::Fma(x, b1, high[row]);
  };
  const float* column = a.data;
  for (int64_t p = 0; p < k; ++p) {
    const auto b0 = V::Load(panel);
    const auto b1 = V::Load(panel + 8);
    (step(V::Set1(column[static_cast<int64_t>(kRow) * a.row_step]), kRow, b0, b1), ...);
    panel += kPanelColumns;
    column += a.inner_step;
  }
  (V::Store(c.data + static_cast<int64_t>(kRow) * c.row_step, low[kRow]), ...);
  (V::Store(c.data + static_cast<int64_t>(kRow) * c.row_step + 8, high[kRow]), ...);
}

// One strip of `rows` (1..6) rows times one panel.
template <typename V, Output kOutput>
inline void StripTimesPanel(
    int64_t rows, int64_t k, LeftOperand a, const float* panel, TileOutput c) {
  switch (rows) {
    case 6:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<6>());
    case 5:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<5>());
    case 4:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<4>());
    case 3:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<3>());
    case 2:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<2>());
    default:
      return StripOfRows<V, kOutput>(k, a, panel, c, std::make_index_sequence<1>());
  }
}

// rows [n, columns] -> panels [ceil(columns / 16)][padded_rows][16], zero beyond. For products
// whose inner index is n.
inline void PackPanels(
    const float* x, int64_t row_step, int64_t n, int64_t padded_rows, int64_t columns, float* out) {
  for (int64_t begin = 0; begin < columns; begin += kPanelColumns) {
    const int64_t width = std::min(kPanelColumns, columns - begin);
    for (int64_t row = 0; row < padded_rows; ++row, out += kPanelColumns) {
      const int64_t copied = row < n ? width : 0;
      if (copied > 0) {
        std::memcpy(out, x + row * row_step + begin, sizeof(float) * static_cast<size_t>(copied));
      }
      std::fill(out + copied, out + kPanelColumns, 0.0f);
    }
  }
}

// rows [n, columns] -> panels [ceil(n / 16)][columns][16]: the transpose, 16 rows to a panel, zero
// beyond.
inline void PackTransposedPanels(
    const float* x, int64_t row_step, int64_t n, int64_t columns, float* out) {
  for (int64_t begin = 0; begin < n; begin += kPanelColumns) {
    const int64_t width = std::min(kPanelColumns, n - begin);
    for (int64_t lane = 0; lane < kPanelColumns; ++lane) {
      const float* row = x + (begin + lane) * row_step;
      for (int64_t column = 0; column < columns; ++column) {
        out[column * kPanelColumns + lane] = lane < width ? row[column] : 0.0f;
      }
    }
    out += columns * kPanelColumns;
  }
}

}  // namespace ravel::kernels::cpu
