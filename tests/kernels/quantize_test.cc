// Activations against an oracle (quantize_oracle.h), element by element.

#include "kernels/quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/scalar/philox.h"
#include "tests/kernels/quantize_oracle.h"

namespace ravel::kernels {
namespace {

using namespace oracle;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint32_t DrawOf(const QuantizeActivationArgs& args, int64_t columns, int64_t row, int64_t column) {
  const ActivationDraws& draws = args.draws;
  const auto index = static_cast<uint64_t>(row % draws.sequence_tokens * columns + column);
  const auto sample = draws.first_sample + static_cast<uint32_t>(row / draws.sequence_tokens);
  const uint32_t purpose = args.along == BlocksAlong::kColumns ? 3 : 4;
  const scalar::PhiloxWords words = scalar::Philox4x32(draws.seed,
                                                       {static_cast<uint32_t>(index / 16),
                                                        draws.piece << 1 | sample << 12,
                                                        draws.step,
                                                        draws.site | (purpose << 24)});
  return (words[index % 16 / 4] >> (index % 4 * 8)) & 0xFFu;
}

struct Decoded {
  Matrix values;
  float scale = 1;
};

// The result of QuantizeActivation; edge along the rows or the columns.
Decoded Expected(const QuantizeActivationArgs& args, const Matrix& source) {
  const bool gradient = args.role == ActivationRole::kGradient;
  const bool along_rows = args.along == BlocksAlong::kRows;
  const bool fp4 = args.recipe == Recipe::kNvFp4;
  const Matrix x = fp4 && along_rows ? HadamardOf(source) : source;
  const int64_t edge = plan::BlockEdge(args.recipe);
  const float amax = AmaxOf(x);
  Decoded result = {x, 1};
  const std::vector<double>& table = fp4                     ? E2M1Table()
                                     : edge == 0 && gradient ? E5M2Table()
                                                             : E4M3Table();
  float tensor = 1;
  if (fp4) {
    tensor = NvFp4Tensor(amax);
    result.scale = amax * std::bit_cast<float>(0x39C30C31u);
  } else if (edge == 0) {
    tensor = amax == 0 ? 1.0f : Rounded(LargestOf(table) / static_cast<double>(amax));
    if (args.recipe == Recipe::kDelayed && args.encode.present() && *args.encode.As<float>() != 0) {
      tensor = *args.encode.As<float>();
    }
    result.scale = Rounded(1.0 / static_cast<double>(tensor));
  }
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t column = 0; column < x.columns; ++column) {
      float block = 0;
      for (int64_t i = 0; i < edge; ++i) {
        const int64_t y = along_rows ? row / edge * edge + i : row;
        const int64_t z = along_rows ? column : column / edge * edge + i;
        block = y < x.rows && z < x.columns ? std::max(block, std::fabs(x.at(y, z))) : block;
      }
      const OracleScales scales = BlockOf(args.recipe, block, tensor);
      const auto scaled = static_cast<double>(x.at(row, column) * scales.encode);
      const double code = fp4 && gradient ? Stochastic(scaled, DrawOf(args, x.columns, row, column))
                                          : Nearest(table, scaled);
      result.values.at(row, column) = Rounded(code * scales.decode);
    }
  }
  return result;
}

struct ActivationRun {
  Matrix values;
  float scale = -1;
  uint32_t non_finite = 0;
  uint32_t staged = 0;
};
ActivationRun Quantized(QuantizeActivationArgs args, const Matrix& x, bool in_place) {
  CpuStream stream;
  ActivationRun run;
  const Operand from(x, 3);
  const Operand other({x.rows, x.columns, std::vector<float>(x.values.size(), NAN)}, 5);
  const Operand& to = in_place ? from : other;
  args.from = from.view();
  args.to = to.view();
  args.scale = Word(run.scale, DType::kF32);
  args.non_finite = Word(run.non_finite, DType::kU32);
  args.staged = Word(run.staged, DType::kU32);
  QuantizeActivation(stream, args);
  run.values = to.values();
  for (int64_t row = 0; row + 1 < x.rows; ++row) {
    EXPECT_EQ(to.view().Row<uint16_t>(row)[x.columns], 0xFFFF) << "the gap after row " << row;
  }
  return run;
}

void ExpectSame(const Matrix& a, const Matrix& b, const char* what) {
  ASSERT_EQ(a.values.size(), b.values.size());
  for (size_t i = 0; i < a.values.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a.values[i]), std::bit_cast<uint32_t>(b.values[i]))
        << what << " at " << i << ": " << a.values[i] << ", " << b.values[i];
  }
}

QuantizeActivationArgs ArgsOf(Recipe recipe, ActivationRole role, BlocksAlong along) {
  QuantizeActivationArgs args;
  args.recipe = recipe;
  args.role = role;
  args.along = along;
  args.draws = {.seed = 0x1234567890ABCDEFu,
                .step = 7,
                .site = 0x00ABCDEF,
                .piece = 0x5A3,
                .first_sample = 5,
                .sequence_tokens = 48};
  return args;
}
template <typename Visit>
void ForEachCase(const Visit& visit) {
  for (const Recipe recipe : oracle::kRecipes) {
    for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
      for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
        visit(ArgsOf(recipe, role, along));
      }
    }
  }
}

TEST(QuantizeActivation, IsTheOracleForRaggedShapes) {
  constexpr int64_t kShapes[][2] = {{1, 32}, {96, 288}, {130, 7}, {3, 301}, {32, 1}, {160, 96}};
  uint32_t seed = 1;
  for (const auto& [rows, columns] : kShapes) {
    ForEachCase([&, height = rows, width = columns](const QuantizeActivationArgs& args) {
      const bool whole = args.recipe == Recipe::kMxFp8 || args.recipe == Recipe::kNvFp4;
      const int64_t extent = args.along == BlocksAlong::kColumns ? width : height;
      if (whole && extent % plan::BlockEdge(args.recipe) != 0) {
        return;
      }
      const Matrix x = RandomMatrix(height, width, seed++);
      const Decoded expected = Expected(args, x);
      for (const bool in_place : {false, true}) {
        const ActivationRun run = Quantized(args, x, in_place);
        SCOPED_TRACE(::testing::Message()
                     << "recipe " << static_cast<int>(args.recipe) << " role "
                     << static_cast<int>(args.role) << " along " << static_cast<int>(args.along)
                     << " " << height << " x " << width << " in place " << in_place);
        ExpectSame(run.values, expected.values, "decoded");
        EXPECT_EQ(run.scale, expected.scale);
        EXPECT_EQ(run.non_finite, 0u);
      }
    });
  }
}

TEST(QuantizeActivation, DelayedTakesTheGivenScaleAndStagesTheAmax) {
  const Matrix x = RandomMatrix(20, 40, 9);
  for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
    QuantizeActivationArgs args = ArgsOf(Recipe::kDelayed, role, BlocksAlong::kColumns);
    for (float encode : {3.7f, 0.0f, 1e-3f}) {
      args.encode = Word(encode, DType::kF32);
      const ActivationRun run = Quantized(args, x, false);
      const Decoded expected = Expected(args, x);
      ExpectSame(run.values, expected.values, "decoded");
      EXPECT_EQ(run.scale, expected.scale);
      EXPECT_EQ(std::bit_cast<float>(run.staged), AmaxOf(x));
    }
  }
}

TEST(QuantizeActivation, EveryInstructionSetGivesTheSameBits) {
  const Matrix x = RandomMatrix(160, 544, 17);
  ForEachCase([&](const QuantizeActivationArgs& args) {
    cpu::UseSimdPath(cpu::SimdPath::kPortable);
    const ActivationRun portable = Quantized(args, x, false);
    for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
      if (cpu::RunsHere(path)) {
        cpu::UseSimdPath(path);
        const ActivationRun run = Quantized(args, x, false);
        ExpectSame(run.values, portable.values, "path");
        EXPECT_EQ(run.scale, portable.scale);
      }
    }
    cpu::UseBestSimdPath();
  });
}

// Samples quantized one by one, with blocks that do not cross them, are those of the whole batch.
TEST(QuantizeActivation, DrawsIndependentOfGridAndShard) {
  const Matrix x = RandomMatrix(3 * 48, 80, 23);
  for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
    QuantizeActivationArgs args = ArgsOf(Recipe::kNvFp4, ActivationRole::kGradient, along);
    // Every sample has the tensor's amax, before and after the transform.
    Matrix batch = x;
    for (int64_t sample = 1; sample < 3; ++sample) {
      std::copy_n(batch.values.begin(), 48 * 80, batch.values.begin() + sample * 48 * 80);
    }
    const Matrix whole = Quantized(args, batch, false).values;
    for (int64_t sample = 0; sample < 3; ++sample) {
      const auto begin = batch.values.begin() + sample * 48 * 80;
      args.draws.first_sample = 5 + static_cast<uint32_t>(sample);
      const Matrix part = {48, 80, {begin, begin + 48 * 80}};
      const Matrix cut = Quantized(args, part, false).values;
      const auto expected = whole.values.begin() + sample * 48 * 80;
      EXPECT_TRUE(std::equal(cut.values.begin(), cut.values.end(), expected)) << sample;
    }
    // Equal samples are rounded by different draws.
    EXPECT_FALSE(std::equal(
        whole.values.begin(), whole.values.begin() + 48 * 80, whole.values.begin() + 48 * 80));
  }
}

TEST(QuantizeActivation, NothingThatIsNotFiniteHides) {
  ForEachCase([&](const QuantizeActivationArgs& args) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
      Matrix x = RandomMatrix(64, 96, 31);
      x.at(33, 70) = bad;
      const ActivationRun run = Quantized(args, x, false);
      EXPECT_EQ(run.non_finite, 1u) << static_cast<int>(args.recipe);
      if (std::isnan(bad)) {
        const bool nan = std::any_of(run.values.values.begin(),
                                     run.values.values.end(),
                                     [](float value) { return std::isnan(value); });
        EXPECT_TRUE(nan || std::isnan(run.scale)) << static_cast<int>(args.recipe);
      }
    }
  });
}

TEST(QuantizeActivation, ZerosStayZerosAndTinyValuesAreFinite) {
  ForEachCase([&](const QuantizeActivationArgs& args) {
    for (const float value : {0.0f, 0x1p-133f, 0x1p-126f, 1e-38f}) {
      const Matrix x = {32, 32, std::vector<float>(1024, value)};
      const ActivationRun run = Quantized(args, x, false);
      EXPECT_EQ(run.non_finite, 0u);
      EXPECT_TRUE(std::isfinite(run.scale));
      for (const float decoded : run.values.values) {
        EXPECT_TRUE(std::isfinite(decoded));
        EXPECT_TRUE(value != 0 || decoded == 0);
      }
    }
  });
}

// One domain, and what is known of its slots.
struct DelayedSlots {
  std::array<uint32_t, 3> amax = {};  // weight, then input and gradient
  std::array<float, 9> scales = {};
  std::vector<float> histories = std::vector<float>(9, 0.0f);
  int32_t apply = 1;
  bool newest = false;
  bool ones = false;

  void Update() {
    CpuStream stream;
    TensorView activation = Word(amax[1], DType::kU32);
    activation.rank = 2;
    activation.size = {1, 2};
    activation.row_stride = 2;
    UpdateDelayedScales(stream,
                        {.weight_amax = Word(amax[0], DType::kU32),
                         .activation_amax = activation,
                         .scales = MatrixView(scales.data(), 3, kDelayedWords),
                         .histories = MatrixView(histories.data(), 3, 3),
                         .apply = Word(apply, DType::kI32),
                         .newest = newest,
                         .ones = ones});
  }
  // The next scale of the weight after this amax.
  float After(uint32_t bits) {
    amax[0] = bits;
    Update();
    return scales[1];
  }
  std::vector<float> History(int64_t slot) const {
    return {histories.begin() + 3 * slot, histories.begin() + 3 * slot + 3};
  }
};

TEST(DelayedScales, FollowTheirHistories) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  DelayedSlots slots;
  EXPECT_EQ(slots.After(0), 0.0f);
  EXPECT_EQ(slots.scales[0], 1.0f);
  EXPECT_EQ(slots.After(bits(4.0f)), 112.0f);
  EXPECT_EQ(slots.scales[0], 112.0f) << "the first cast is by the amax itself";
  EXPECT_EQ(slots.History(0), (std::vector<float>{0, 0, 4}));
  EXPECT_EQ(slots.After(bits(2.0f)), 112.0f);
  slots.apply = 0;
  slots.scales[0] = 5;
  EXPECT_EQ(slots.After(bits(8.0f)), 112.0f);
  EXPECT_EQ(slots.scales[0], 5.0f);
  slots.apply = 1;
  EXPECT_EQ(slots.After(0), 112.0f);
  EXPECT_EQ(slots.History(0), (std::vector<float>{0, 4, 2}));
  EXPECT_EQ(slots.After(bits(1.0f)), 112.0f);
  EXPECT_EQ(slots.After(bits(1.0f)), 224.0f);
  EXPECT_EQ(slots.scales[0], 112.0f) << "codes are cast by the scale of the history before";
  EXPECT_EQ(slots.History(0), (std::vector<float>{2, 1, 1}));
  slots.histories.assign(9, 0.0f);
  EXPECT_EQ(slots.After(1), std::numeric_limits<float>::max());
  EXPECT_EQ(slots.After(bits(kInfinity)), 0.0f);
}

// Codes that an update casts by the next scale stay; without one it casts nothing.
TEST(DelayedScales, SayWhetherAnUpdateHasCastByThem) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  DelayedSlots slots;
  slots.After(bits(4.0f));
  EXPECT_EQ(slots.scales[2], 0.0f) << "an update knew no scale";
  slots.After(bits(4.0f));
  EXPECT_EQ(slots.scales[2], 1.0f);
  slots.histories.assign(9, 0.0f);
  slots.scales[1] = 0;
  slots.apply = 0;
  slots.After(bits(4.0f));
  EXPECT_EQ(slots.scales[2], 1.0f) << "nothing has changed";
  slots.apply = 1;
  slots.After(bits(4.0f));
  EXPECT_EQ(slots.scales[2], 0.0f);

  float weights[4] = {1, 2, 3, 4};
  uint8_t codes[4] = {9, 9, 9, 9};
  float encode = 1;
  float unless = 1;
  TensorView bytes = MatrixView(nullptr, 1, 4);
  bytes.dtype = DType::kU8;
  bytes.data = codes;
  CpuStream stream;
  const QuantizeWeightArgs args = {
      .from = MatrixView(weights, 1, 4),
      .scales = {.recipe = Recipe::kDelayed, .encode = Word(encode, DType::kF32)},
      .codes = bytes,
      .unless = Word(unless, DType::kF32)};
  QuantizeWeight(stream, args);
  EXPECT_EQ(codes[0], 9);
  unless = 0;
  QuantizeWeight(stream, args);
  EXPECT_EQ(codes[0], 0x38);
}

TEST(DelayedScales, MayFollowTheNewestAmaxAlone) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  DelayedSlots slots;
  slots.newest = true;
  EXPECT_EQ(slots.After(bits(4.0f)), 112.0f);
  EXPECT_EQ(slots.After(bits(2.0f)), 224.0f);
  EXPECT_EQ(slots.After(0), 224.0f) << "an unused slot keeps its newest";
  EXPECT_EQ(slots.History(0), (std::vector<float>{0, 4, 2}));
}

TEST(DelayedScales, MayBeOneWithoutAHistory) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  DelayedSlots slots;
  slots.ones = true;
  EXPECT_EQ(slots.After(bits(4.0f)), 112.0f);
  EXPECT_EQ(slots.scales, (std::array<float, 9>{1, 112, 0, 0, 1, 0, 0, 1, 0}))
      << "casts of the first step";
  EXPECT_EQ(slots.After(bits(4.0f)), 112.0f);
  EXPECT_EQ(slots.scales[0], 112.0f);
}

TEST(DelayedScales, StagedAmaxesAreTakenOnceAndSkippedStepsDropThem) {
  DelayedSlots slots;
  slots.amax = {0, std::bit_cast<uint32_t>(2.0f), std::bit_cast<uint32_t>(4.0f)};
  slots.Update();
  EXPECT_EQ(slots.amax, (std::array<uint32_t, 3>{}));
  EXPECT_EQ(slots.scales[4], 224.0f);
  EXPECT_EQ(slots.scales[7], 14336.0f) << "gradients are E5M2";
  EXPECT_EQ(slots.History(1), (std::vector<float>{0, 0, 2}));
  EXPECT_EQ(slots.History(2), (std::vector<float>{0, 0, 4}));
  slots.apply = 0;
  slots.amax[1] = std::bit_cast<uint32_t>(8.0f);
  slots.Update();
  EXPECT_EQ(slots.amax[1], 0u);
  EXPECT_EQ(slots.History(1), (std::vector<float>{0, 0, 2}));
}

TEST(DelayedScales, WithoutAmaxesFollowTheHistoriesAlone) {
  DelayedSlots slots;
  slots.histories = {0, 1, 2, 0, 0, 0, 8, 4, 2};
  slots.scales[0] = 3;
  CpuStream stream;
  UpdateDelayedScales(stream,
                      {.scales = MatrixView(slots.scales.data(), 3, kDelayedWords),
                       .histories = MatrixView(slots.histories.data(), 3, 3)});
  EXPECT_EQ(slots.scales, (std::array<float, 9>{3, 224, 1, 0, 0, 0, 0, 7168, 0}));
  EXPECT_EQ(slots.histories, (std::vector<float>{0, 1, 2, 0, 0, 0, 8, 4, 2}));
  UpdateDelayedScales(stream,
                      {.scales = MatrixView(slots.scales.data(), 3, kDelayedWords),
                       .histories = MatrixView(slots.histories.data(), 3, 3),
                       .margin = 2});
  EXPECT_EQ(slots.scales, (std::array<float, 9>{3, 56, 1, 0, 0, 0, 0, 1792, 0}));
}

TEST(LargestWords, OrdersBitsAsIntegers) {
  const std::vector<uint32_t> a = {1, 0x7F800000u, 5, 0};
  const std::vector<uint32_t> b = {2, 0x7FC00000u, 4, 0};
  std::vector<uint32_t> out(4, 77);
  TensorView view = Word(out[0], DType::kU32);
  view.rank = 2;
  view.size = {1, 4};
  view.row_stride = 4;
  CpuStream stream;
  LargestWords(stream, {.pieces = {a.data(), b.data()}, .out = view});
  EXPECT_EQ(out, (std::vector<uint32_t>{2, 0x7FC00000u, 5, 0}));
  out = {3, 7, 0x7F800000u, 1};
  LargestWords(stream, {.pieces = {a.data()}, .out = view, .accumulates = true});
  EXPECT_EQ(out, (std::vector<uint32_t>{3, 0x7F800000u, 0x7F800000u, 1}));
}

}  // namespace
}  // namespace ravel::kernels
