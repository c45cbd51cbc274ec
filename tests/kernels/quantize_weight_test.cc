// Weights against an oracle (quantize_oracle.h): amaxes, codes and decoded values.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/quantize.h"
#include "tests/kernels/quantize_oracle.h"

namespace ravel::kernels {
namespace {

using namespace oracle;

struct Weight {
  Recipe recipe = Recipe::kNone;
  Matrix values;
  std::vector<uint32_t> amax = {};
  uint32_t domain = 0;
  float encode = 2.5f;

  int64_t edge() const { return plan::BlockEdge(recipe); }
  int64_t grid_rows() const { return edge() == 0 ? 1 : (values.rows + edge() - 1) / edge(); }
  int64_t grid_columns() const { return edge() == 0 ? 1 : (values.columns + edge() - 1) / edge(); }
  TensorView grid() { return Grid(amax, grid_rows(), grid_columns(), DType::kU32); }
  TensorView Rows(int64_t first, int64_t rows) {
    return MatrixView(&values.at(first, 0), rows, values.columns);
  }
  WeightScales scales() {
    return {.recipe = recipe,
            .amax = grid(),
            .encode = Word(encode, DType::kF32),
            .domain_amax = Word(domain, DType::kU32)};
  }
};

Weight MakeWeight(Recipe recipe, int64_t rows, int64_t columns, uint32_t seed) {
  Weight weight = {.recipe = recipe, .values = RandomMatrix(rows, columns, seed)};
  std::mt19937 random(seed);
  for (float& value : weight.values.values) {
    value *= 1.0f + static_cast<float>(random() % 4096) * 0x1p-13f;  // more bits than bf16 has
  }
  weight.amax.assign(Size(weight.grid_rows() * weight.grid_columns()), 0);
  weight.domain = std::bit_cast<uint32_t>(2 * AmaxOf(weight.values));
  return weight;
}

// Codes of a weight whose rows come in parts of `rows`.
std::vector<uint8_t> CodesOf(Weight& weight, int64_t rows) {
  CpuStream stream;
  const int64_t bytes = weight.values.columns / plan::CodesPerByte(weight.recipe);
  std::vector<uint8_t> codes(Size(weight.values.rows * bytes), 0xEE);
  for (int64_t first = 0; first < weight.values.rows; first += rows) {
    const int64_t count = std::min(rows, weight.values.rows - first);
    BlockAmax(stream,
              {.from = weight.Rows(first, count),
               .first_row = first,
               .edge = weight.edge(),
               .amax = weight.grid()});
  }
  for (int64_t first = 0; first < weight.values.rows; first += rows) {
    const int64_t count = std::min(rows, weight.values.rows - first);
    TensorView to = Grid(codes, weight.values.rows, bytes, DType::kU8);
    QuantizeWeight(stream,
                   {.from = weight.Rows(first, count),
                    .first_row = first,
                    .scales = weight.scales(),
                    .codes = RowsOf(to, first, count)});
  }
  return codes;
}

// The largest magnitude of every square block.
std::map<std::pair<int64_t, int64_t>, float> BlocksOf(const Matrix& w, int64_t block_edge) {
  const int64_t edge = std::max<int64_t>(1, block_edge);
  std::map<std::pair<int64_t, int64_t>, float> blocks;
  for (int64_t row = 0; row < w.rows; ++row) {
    for (int64_t column = 0; column < w.columns; ++column) {
      float& amax = blocks[{row / edge, column / edge}];
      amax = std::max(amax, std::fabs(w.at(row, column)));
    }
  }
  return blocks;
}

class WeightTest : public ::testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Recipes, WeightTest, ::testing::ValuesIn(oracle::kRecipes));

TEST_P(WeightTest, CodesAndDecodedValuesAreTheOracle) {
  constexpr int64_t kShapes[][2] = {{1, 2}, {130, 258}, {33, 64}, {256, 40}, {17, 514}};
  for (const auto& [rows, columns] : kShapes) {
    Weight weight = MakeWeight(GetParam(), rows, columns, 41);
    const bool fp4 = GetParam() == Recipe::kNvFp4;
    const std::vector<uint8_t> codes = CodesOf(weight, rows);
    const Matrix& w = weight.values;
    float tensor = 1;
    float scale = 1;
    if (fp4) {
      tensor = NvFp4Tensor(std::bit_cast<float>(weight.domain));
      scale = std::bit_cast<float>(weight.domain) * std::bit_cast<float>(0x39C30C31u);
    } else if (weight.edge() == 0) {
      tensor = GetParam() == Recipe::kDelayed ? weight.encode
                                              : Rounded(448.0 / static_cast<double>(AmaxOf(w)));
      scale = Rounded(1.0 / static_cast<double>(tensor));
    }
    std::vector<uint8_t> copy = codes;
    Operand decoded(w);
    float decoded_scale = -1;
    CpuStream stream;
    DecodeWeight(stream,
                 {.codes = Grid(copy, rows, columns / plan::CodesPerByte(GetParam()), DType::kU8),
                  .scales = weight.scales(),
                  .to = decoded.view(),
                  .scale = Word(decoded_scale, DType::kF32)});
    EXPECT_EQ(decoded_scale, scale);
    const std::vector<double>& table = fp4 ? E2M1Table() : E4M3Table();
    const Matrix values = decoded.values();
    const std::map<std::pair<int64_t, int64_t>, float> blocks = BlocksOf(w, weight.edge());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t edge = std::max<int64_t>(1, weight.edge());
        const float block = blocks.at({row / edge, column / edge});
        const OracleScales scales = BlockOf(GetParam(), block, tensor);
        const float scaled = w.at(row, column) * scales.encode;
        const size_t magnitude = NearestCode(table, static_cast<double>(scaled));
        const size_t sign = std::signbit(scaled) ? 1 : 0;
        const size_t index = Size(row * columns + column);
        const size_t code = fp4 ? (codes[index / 2] >> (4 * (index % 2))) & 0xFu : codes[index];
        ASSERT_EQ(code, magnitude | (sign << (fp4 ? 3 : 7))) << row << " " << column;
        ASSERT_EQ(values.at(row, column),
                  Rounded(std::copysign(table[magnitude], scaled) * scales.decode));
      }
    }
  }
}

// What is decoded is off by at most the rounding that the format has: 2^-4 of the value where E4M3
// is normal, half a step of E2M1. Power-of-two scales clip nothing; scales of NVFP4, themselves
// rounded, clip by a sixteenth at most.
TEST_P(WeightTest, DecodedValuesAreAsNearAsTheFormatSays) {
  constexpr int64_t rows = 256;
  constexpr int64_t columns = 384;
  Weight weight = MakeWeight(GetParam(), rows, columns, 53);
  const bool fp4 = GetParam() == Recipe::kNvFp4;
  const bool delayed = GetParam() == Recipe::kDelayed;  // its scale may be too large
  std::vector<uint8_t> codes = CodesOf(weight, rows);
  Operand decoded(weight.values);
  float scale = 0;
  CpuStream stream;
  DecodeWeight(stream,
               {.codes = Grid(codes, rows, columns / plan::CodesPerByte(GetParam()), DType::kU8),
                .scales = weight.scales(),
                .to = decoded.view(),
                .scale = Word(scale, DType::kF32)});
  const Matrix values = decoded.values();
  const float tensor = fp4 ? NvFp4Tensor(std::bit_cast<float>(weight.domain)) : 1 / scale;
  const int64_t edge = std::max<int64_t>(1, weight.edge());
  const std::map<std::pair<int64_t, int64_t>, float> blocks = BlocksOf(weight.values, edge);
  int64_t normal = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float block = blocks.at({row / edge, column / edge});
      const double unit =
          BlockOf(GetParam(), block, tensor).decode * static_cast<double>(fp4 ? scale : 1.0f);
      const double one_scale = weight.edge() == 0 ? static_cast<double>(scale) : unit;
      const double value = static_cast<double>(values.at(row, column)) * static_cast<double>(scale);
      const double size = std::fabs(static_cast<double>(weight.values.at(row, column)));
      const double error = std::fabs(std::fabs(value) - size);
      if (fp4) {
        const double x = unit == 0 ? 0 : size / unit;
        const bool whole = BlockOf(GetParam(), block, tensor).decode >= 0x1p-6;
        const double half = x < 2 ? 0.25 : x < 4 ? 0.5 : 1.0;
        ASSERT_TRUE(!whole || x <= 6 * (1 + 0x1p-4) * (1 + 1e-6)) << x;
        ASSERT_LE(error, (x > 6 ? x - 6 : half) * unit * (1 + 1e-6)) << row << " " << column;
        normal += whole ? 1 : 0;
      } else if (size >= 0x1p-6 * one_scale && !(delayed && size > 448 * one_scale)) {
        ASSERT_LE(size, 448 * one_scale * (1 + 1e-6)) << row << " " << column;
        ASSERT_LE(error, 0x1p-4 * size * (1 + 1e-6)) << row << " " << column;
        ++normal;
      }
    }
  }
  EXPECT_GT(normal, rows * columns / 2);
}

TEST_P(WeightTest, PartsOfRowsGiveTheWholesAmaxesAndCodes) {
  Weight whole = MakeWeight(GetParam(), 300, 130, 43);
  const std::vector<uint8_t> expected = CodesOf(whole, 300);
  for (const int64_t rows : {1, 7, 128, 200}) {
    Weight parts = MakeWeight(GetParam(), 300, 130, 43);
    EXPECT_EQ(CodesOf(parts, rows), expected) << rows;
    EXPECT_EQ(parts.amax, whole.amax) << rows;
  }
}

TEST_P(WeightTest, EveryInstructionSetGivesTheSameBits) {
  cpu::UseSimdPath(cpu::SimdPath::kPortable);
  Weight weight = MakeWeight(GetParam(), 300, 546, 47);
  const std::vector<uint8_t> portable = CodesOf(weight, 300);
  for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (cpu::RunsHere(path)) {
      cpu::UseSimdPath(path);
      Weight again = MakeWeight(GetParam(), 300, 546, 47);
      EXPECT_EQ(CodesOf(again, 300), portable);
      EXPECT_EQ(again.amax, weight.amax);
    }
  }
  cpu::UseBestSimdPath();
}

// A rank that has columns of a matrix has the columns of its grid.
TEST(QuantizeWeight, PartsOfColumnsHaveTheCodesOfTheWhole) {
  for (const Recipe recipe : {Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4}) {
    Weight whole = MakeWeight(recipe, 256, 512, 11);
    const std::vector<uint8_t> expected = CodesOf(whole, 256);
    Weight cut = MakeWeight(recipe, 256, 512, 11);
    constexpr int64_t kFirst = 128;
    constexpr int64_t kWide = 256;
    Matrix part = RandomMatrix(256, kWide, 1);
    for (int64_t row = 0; row < part.rows; ++row) {
      std::copy_n(&cut.values.at(row, kFirst), kWide, &part.at(row, 0));
    }
    const TensorView from = MatrixView(&part.at(0, 0), part.rows, kWide);
    WeightScales scales = cut.scales();
    scales.amax = ColumnsOf(scales.amax, kFirst / cut.edge(), kWide / cut.edge());
    CpuStream stream;
    BlockAmax(stream, {.from = from, .edge = cut.edge(), .amax = scales.amax, .epsilon = 1e-30f});
    const int64_t bytes = kWide / plan::CodesPerByte(recipe);
    std::vector<uint8_t> codes(Size(part.rows * bytes));
    QuantizeWeight(
        stream,
        {.from = from, .scales = scales, .codes = Grid(codes, part.rows, bytes, DType::kU8)});
    const int64_t row_bytes = 512 / plan::CodesPerByte(recipe);
    const int64_t first_byte = kFirst / plan::CodesPerByte(recipe);
    for (int64_t row = 0; row < part.rows; ++row) {
      ASSERT_TRUE(std::equal(codes.begin() + row * bytes,
                             codes.begin() + (row + 1) * bytes,
                             expected.begin() + row * row_bytes + first_byte))
          << static_cast<int>(recipe) << " row " << row;
    }
    // Words of other columns are another rank's.
    for (int64_t row = 0; row < cut.grid_rows(); ++row) {
      for (int64_t column = 0; column < cut.grid_columns(); ++column) {
        const bool mine = column >= kFirst / cut.edge() && column < (kFirst + kWide) / cut.edge();
        const uint32_t amax = cut.amax[Size(row * cut.grid_columns() + column)];
        ASSERT_EQ(amax, mine ? whole.amax[Size(row * cut.grid_columns() + column)] : 0);
      }
    }
  }
}

// Threads that have rows of the same blocks raise the same words.
TEST(QuantizeWeight, ThreadsMayRaiseTheSameAmaxes) {
  constexpr int64_t kThreads = 4;
  constexpr int64_t kHeight = 64;
  for (const Recipe recipe : {Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kNvFp4}) {
    for (uint32_t round = 0; round < 200; ++round) {
      Weight weight = MakeWeight(recipe, kHeight, 128, round);
      CodesOf(weight, kHeight);
      const std::vector<uint32_t> expected = weight.amax;
      std::fill(weight.amax.begin(), weight.amax.end(), 0);
      std::atomic<int64_t> ready = 0;
      std::vector<std::thread> threads;
      for (int64_t thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
          CpuStream stream;
          for (++ready; ready < kThreads;) {
          }
          for (int64_t row = thread; row < kHeight; row += kThreads) {
            BlockAmax(stream,
                      {.from = weight.Rows(row, 1),
                       .first_row = row,
                       .edge = weight.edge(),
                       .amax = weight.grid()});
          }
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      ASSERT_EQ(weight.amax, expected) << static_cast<int>(recipe);
    }
  }
}

}  // namespace
}  // namespace ravel::kernels
