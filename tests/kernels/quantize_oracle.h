#pragma once

// An oracle for quantization: neighbours in tables of the formats' values, scales in fp64; and
// matrices of the tests of it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "common/recipe.h"
#include "common/signed_size.h"
#include "common/tensor_view.h"

namespace ravel::kernels::oracle {

using plan::Recipe;

inline constexpr Recipe kRecipes[] = {
    Recipe::kDelayed, Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4};

inline double LargestOf(const std::vector<double>& table) {
  return table.back();
}
inline std::vector<double> Table(int mantissa_bits, int bias, int codes) {
  std::vector<double> values;
  const int ones = 1 << mantissa_bits;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code / ones;
    const int mantissa = code % ones;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                   : std::ldexp(ones + mantissa, exponent - bias - mantissa_bits));
  }
  return values;
}
inline const std::vector<double>& E4M3Table() {
  static const auto& table = *new std::vector<double>(Table(3, 7, 0x7F));
  return table;
}
inline const std::vector<double>& E5M2Table() {
  static const auto& table = *new std::vector<double>(Table(2, 15, 0x7C));
  return table;
}
inline const std::vector<double>& E2M1Table() {
  static const auto& table = *new std::vector<double>(Table(1, 1, 8));
  return table;
}

// The code, without sign, of the magnitude next to |x|.
inline size_t NearestCode(const std::vector<double>& table, double x) {
  const double a = std::fabs(x);
  if (a >= LargestOf(table)) {
    return table.size() - 1;
  }
  const auto above =
      static_cast<size_t>(std::upper_bound(table.begin(), table.end(), a) - table.begin());
  const size_t low = above - 1;
  const double middle = (table[low] + table[above]) / 2;
  return a < middle || (a == middle && low % 2 == 0) ? low : above;
}
inline double Nearest(const std::vector<double>& table, double x) {
  return std::copysign(table[NearestCode(table, x)], x);
}
// The largest magnitude that is at most |x| + draw / 256 of a step.
inline double Stochastic(double x, uint32_t draw) {
  const double a = std::fabs(x);
  const double step = a < 2 ? 0.5 : a < 4 ? 1.0 : 2.0;
  const auto sum = static_cast<double>(static_cast<float>(a + draw / 256.0 * step));
  double result = 0;
  for (const double value : E2M1Table()) {
    result = value <= sum ? value : result;
  }
  return std::copysign(result, x);
}
inline float Rounded(double x) {
  return static_cast<float>(x);
}
inline double Power(double x) {
  return std::ldexp(1.0, static_cast<int>(std::floor(std::log2(x))));
}

// The scales of ordinary amaxes.
struct OracleScales {
  float encode = 1;
  double decode = 1;
};
inline float NvFp4Tensor(float amax) {
  return amax == 0 ? 1.0f : Rounded(2688.0 / static_cast<double>(amax));
}
inline OracleScales BlockOf(Recipe recipe, float amax, float tensor) {
  const auto a = static_cast<double>(amax);
  if (recipe == Recipe::kFloat8Block) {
    const double scale = amax == 0 ? 1.0 : Power(static_cast<double>(Rounded(448.0 / a)));
    return {Rounded(scale), 1.0 / scale};
  }
  if (recipe == Recipe::kMxFp8) {
    int e = -127;
    const float scaled = amax * std::bit_cast<float>(0x3B124925u);
    while (static_cast<double>(scaled) > std::ldexp(1.0, e)) {
      ++e;
    }
    return {std::ldexp(1.0f, -e), std::ldexp(1.0, e)};
  }
  if (recipe == Recipe::kNvFp4) {
    const float sixth = Rounded(static_cast<double>(tensor) *
                                static_cast<double>(std::bit_cast<float>(0x3E2AAAABu)));
    const double b = Nearest(E4M3Table(), static_cast<double>(amax * sixth));
    const float inverse = Rounded(1.0 / static_cast<double>(tensor));
    const float product = Rounded(b * static_cast<double>(inverse));
    return {
        b == 0 ? std::numeric_limits<float>::max() : Rounded(1.0 / static_cast<double>(product)),
        b};
  }
  return {tensor, 1.0};
}

// A matrix of bf16 values as fp32.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;

  float& at(int64_t row, int64_t column) { return values[Size(row * columns + column)]; }
  float at(int64_t row, int64_t column) const { return values[Size(row * columns + column)]; }
};
inline float ToBf16(float x) {
  return Bf16ToFloat(FloatToBf16(x));
}
inline Matrix RandomMatrix(int64_t rows, int64_t columns, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Matrix matrix = {rows, columns, std::vector<float>(Size(rows * columns))};
  for (float& value : matrix.values) {
    // Sizes over many powers of two, and some zeros.
    const float power = std::exp2(3.0f * normal(random));
    value = random() % 17 == 0 ? 0.0f : ToBf16(normal(random) * power);
  }
  return matrix;
}
inline float AmaxOf(const Matrix& matrix) {
  float amax = 0;
  for (const float value : matrix.values) {
    amax = std::max(amax, std::fabs(value));
  }
  return amax;
}

inline Matrix HadamardOf(const Matrix& from) {
  constexpr const char* kSigns = "+++-+------+-+--";
  Matrix to = from;
  for (int64_t row = 0; row < from.rows; ++row) {
    for (int64_t column = 0; column < from.columns; ++column) {
      // The order of the sums is part of the specification.
      float x[16];
      for (int64_t i = 0; i < 16; ++i) {
        x[i] = from.at(row / 16 * 16 + i, column) * (kSigns[i] == '+' ? 1.0f : -1.0f);
      }
      for (size_t half = 1; half < 16; half *= 2) {
        float next[16];
        for (size_t i = 0; i < 16; ++i) {
          next[i] = (i & half) == 0 ? x[i] + x[i ^ half] : x[i ^ half] - x[i];
        }
        std::copy(next, next + 16, x);
      }
      to.at(row, column) = ToBf16(x[row % 16] * 0.25f);
    }
  }
  return to;
}

// A matrix of bf16 on memory with gaps between rows.

class Operand {
 public:
  explicit Operand(const Matrix& from, int64_t gap = 0)
      : bits_(Size(from.rows * (from.columns + gap)), 0xFFFF) {
    view_ = MatrixView(nullptr, from.rows, from.columns);
    view_.dtype = DType::kBF16;
    view_.row_stride = from.columns + gap;
    view_.data = bits_.data();
    for (int64_t row = 0; row < from.rows; ++row) {
      for (int64_t column = 0; column < from.columns; ++column) {
        view_.Row<uint16_t>(row)[column] = FloatToBf16(from.at(row, column));
      }
    }
  }
  const TensorView& view() const { return view_; }
  Matrix values() const {
    Matrix to = {view_.size[0], view_.size[1], {}};
    for (int64_t row = 0; row < to.rows; ++row) {
      for (int64_t column = 0; column < to.columns; ++column) {
        to.values.push_back(Bf16ToFloat(view_.Row<uint16_t>(row)[column]));
      }
    }
    return to;
  }
  const std::vector<uint16_t>& bits() const { return bits_; }

 private:
  std::vector<uint16_t> bits_;
  TensorView view_;
};

template <typename T>
TensorView Word(T& word, DType dtype) {
  TensorView view = VectorView(nullptr, 1);
  view.dtype = dtype;
  view.data = &word;
  return view;
}
template <typename T>
TensorView Grid(std::vector<T>& values, int64_t rows, int64_t columns, DType dtype) {
  TensorView view = MatrixView(nullptr, rows, columns);
  view.dtype = dtype;
  view.data = values.data();
  return view;
}

}  // namespace ravel::kernels::oracle
