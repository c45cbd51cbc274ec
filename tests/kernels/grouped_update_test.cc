// States in groups that share a scale: against a separately written oracle, which walks the tables
// of E4M3's and UE5M3's values in fp64, and against themselves however a tensor is cut.

#include "kernels/grouped_update.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/simd_ops.h"
#include "kernels/scalar/adamw.h"
#include "kernels/scalar/fp8_state.h"

namespace ravel::kernels {
namespace {

constexpr DType kFp8Mean = DType::kF8E4M3;
constexpr DType kFp8Square = DType::kU8;
constexpr DType kMeanTypes[] = {DType::kF32, DType::kBF16, kFp8Mean};
constexpr DType kSquareTypes[] = {DType::kF32, DType::kBF16, kFp8Square};

// The finite values of a format with three bits of mantissa, without sign, by code.
std::vector<double> TableOf(int codes, int bias) {
  std::vector<double> values;
  for (int code = 0; code < codes; ++code) {
    const int exponent = std::max(1, code >> 3);
    const int mantissa = (code & 7) + (code < 8 ? 0 : 8);
    values.push_back(std::ldexp(mantissa, exponent - bias - 3));
  }
  return values;
}
std::vector<double> E4M3Table() {
  return TableOf(127, 7);
}
std::vector<double> UE5M3Table() {
  return TableOf(255, 15);
}

// The smallest exponent e from -127 on for which amax <= 448 * 2^e.
int ScaleExponent(double amax) {
  int e = -127;
  while (e < 127 && amax > std::ldexp(448.0, e)) {
    ++e;
  }
  return e;
}

TEST(Fp8State, AScaleIsTheSmallestPowerThatHoldsTheGroup) {
  std::mt19937_64 random(1);
  std::vector<float> amaxes = {0.0f, 0x1p-149f, 0x1p-126f, 448.0f, 1.0f, 0x1.fffffep127f};
  for (int i = 0; i < 20000; ++i) {
    amaxes.push_back(std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7F800000u)));
  }
  for (const float amax : amaxes) {
    const int mean = scalar::ScaleOfMeans(std::bit_cast<uint32_t>(amax)) - 127;
    const double over = static_cast<double>(amax) / std::ldexp(448.0, mean);
    // 1/448 is rounded to fp32, so at the edge of a power the choice is that of the product.
    EXPECT_LE(over, 1.0 + 1e-7) << amax;
    EXPECT_GE(mean, ScaleExponent(amax) - 1);
    EXPECT_LE(mean, ScaleExponent(amax) + 1);
    const int square = scalar::ScaleOfSquares(std::bit_cast<uint32_t>(amax)) - 127;
    EXPECT_LE(static_cast<double>(amax) / std::ldexp(114688.0, square), 1.0 + 1e-7) << amax;
    EXPECT_EQ(square, std::max(-127, mean - 8)) << amax;
  }
}

TEST(Fp8State, ValuesOfSquaresAreThoseOfTheTable) {
  const std::vector<double> table = UE5M3Table();
  for (size_t code = 0; code < table.size(); ++code) {
    EXPECT_EQ(static_cast<double>(scalar::UE5M3Value(static_cast<uint8_t>(code))), table[code]);
  }
  EXPECT_EQ(table.back(), 114688.0);
}

// All draws: as many go up as the value is from the code below, in units of 2^-16.
TEST(Fp8State, SquaresAreRoundedWithoutBias) {
  const std::vector<double> table = UE5M3Table();
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < 300; ++i) {
    const auto v = static_cast<float>(std::ldexp(1.0 + uniform(random), i % 32 - 16));
    size_t low = 0;
    while (low + 1 < table.size() && table[low + 1] <= static_cast<double>(v)) {
      ++low;
    }
    const bool is_last = low + 1 == table.size();
    const double share =
        is_last ? 0 : (static_cast<double>(v) - table[low]) / (table[low + 1] - table[low]);
    int64_t up = 0;
    for (uint32_t draw = 0; draw < 65536; ++draw) {
      const uint8_t code = scalar::EncodeSquare(v, 127, draw);
      ASSERT_TRUE(code == low || code == low + 1) << v;
      up += code == low + 1 ? 1 : 0;
    }
    // Below the smallest normal value the sum of value and draw is rounded to fp32.
    EXPECT_NEAR(static_cast<double>(up), std::floor(65536.0 * share), v < 0x1p-14f ? 1 : 0) << v;
  }
}

TEST(Fp8State, ASquareAboveZeroIsNeverZero) {
  for (const float v : {0x1p-149f, 0x1p-100f, 1e-20f}) {
    for (const uint32_t draw : {0u, 1u, 65535u}) {
      EXPECT_EQ(scalar::EncodeSquare(v, 150, draw), 1) << v;
    }
  }
  EXPECT_EQ(scalar::EncodeSquare(0.0f, 0, 0), 0);
  EXPECT_EQ(scalar::EncodeSquare(114688.0f, 127, 0), 0xFE);
  EXPECT_EQ(scalar::EncodeSquare(114688.0f, 127, 65535), 0xFE);
}

// A group with a NaN has the scale that is NaN, and no code is.
TEST(Fp8State, AGroupWithNanHasItInItsScale) {
  EXPECT_EQ(scalar::ScaleOfMeans(0x7FC00000u), scalar::kNanScale);
  EXPECT_EQ(scalar::ScaleOfSquares(0x7F800001u), scalar::kNanScale);
  for (const float x : {0.0f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(scalar::EncodeMean(x, scalar::kNanScale, 7), 0);
    EXPECT_EQ(scalar::EncodeSquare(x, scalar::kNanScale, 7), 0);
  }
  EXPECT_TRUE(std::isnan(scalar::DecodeMean(0, scalar::kNanScale)));
  EXPECT_TRUE(std::isnan(scalar::DecodeSquare(0, scalar::kNanScale)));
  // What the formats have behind their largest code is the value that would follow.
  EXPECT_EQ(scalar::DecodeMean(0xFF, 127), -480.0f);
  EXPECT_EQ(scalar::DecodeSquare(0xFF, 127), 122880.0f);
}

// Tensors of rows of 200 and of 36 elements, and one of 300 in one row.
struct Tensor {
  int64_t rows = 0;
  int64_t row = 0;
};
constexpr Tensor kTensors[] = {{3, 200}, {7, 36}, {1, 300}};
constexpr int64_t kElements = 600 + 252 + 300;
constexpr int64_t kScales = 6 + 7 + 3;

struct State {
  std::vector<float> main = std::vector<float>(kElements);
  std::vector<uint8_t> m = std::vector<uint8_t>(kElements * 4, 0);
  std::vector<uint8_t> v = std::vector<uint8_t>(kElements * 4, 0);
  std::vector<uint8_t> m_scales = std::vector<uint8_t>(kScales, 0);
  std::vector<uint8_t> v_scales = std::vector<uint8_t>(kScales, 0);
  bool operator==(const State&) const = default;
};

TensorView Flat(void* data, int64_t elements, DType dtype) {
  TensorView view = VectorView(nullptr, elements);
  view.dtype = dtype;
  view.data = data;
  return view;
}

class GroupedUpdateTest : public ::testing::Test {
 protected:
  GroupedUpdateTest() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (auto* values : {&start_.main, &gradient_}) {
      values->resize(kElements);
      for (float& value : *values) {
        value = normal(random);
      }
    }
  }
  // All tensors, each cut into pieces of `rows` rows.
  static std::vector<UpdatePiece> Pieces(int64_t rows) {
    std::vector<UpdatePiece> pieces;
    int64_t offset = 0;
    int64_t scale = 0;
    uint32_t site = 5;
    for (const Tensor& tensor : kTensors) {
      for (int64_t first = 0; first < tensor.rows; first += rows) {
        const int64_t count = std::min(rows, tensor.rows - first);
        pieces.push_back({.offset = offset,
                          .elements = count * tensor.row,
                          .first_index = first * tensor.row,
                          .site = site,
                          .row = tensor.row,
                          .first_scale = scale});
        offset += count * tensor.row;
        scale += count * ((tensor.row + 127) / 128);
      }
      ++site;
    }
    return pieces;
  }
  GroupedUpdateArgs ArgsOf(State& state, DType m, DType v, uint32_t step) {
    UpdateScalars scalars;
    scalars.learning_rate = 1e-2f;
    scalars.weight_decay = 0.1f;
    GroupedUpdateArgs args = {
        .update = {.main_weight = Flat(state.main.data(), kElements, DType::kF32),
                   .g = Flat(gradient_.data(), kElements, DType::kF32),
                   .m = Flat(state.m.data(), kElements, m),
                   .v = Flat(state.v.data(), kElements, v),
                   .seed = 77,
                   .step = step,
                   .scalars = scalars}};
    if (m == kFp8Mean) {
      args.m_scales = Flat(state.m_scales.data(), kScales, DType::kU8);
    }
    if (v == kFp8Square) {
      args.v_scales = Flat(state.v_scales.data(), kScales, DType::kU8);
    }
    return args;
  }
  void Run(State& state, DType m, DType v, uint32_t step, const std::vector<UpdatePiece>& pieces) {
    GroupedUpdateArgs args = ArgsOf(state, m, v, step);
    args.update.table = {.pieces = pieces.data(), .count = std::ssize(pieces)};
    GroupedUpdate(stream_, args);
  }

  State start_;
  std::vector<float> gradient_;
  CpuStream stream_;
};

TEST_F(GroupedUpdateTest, CutsOfATensorChangeNoBit) {
  for (const auto& [m, v] : {std::pair{kFp8Mean, kFp8Square},
                             std::pair{kFp8Mean, DType::kBF16},
                             std::pair{DType::kBF16, kFp8Square},
                             std::pair{DType::kF32, DType::kBF16}}) {
    State whole = start_;
    State rows = start_;
    State blocks = start_;
    for (uint32_t step = 0; step < 5; ++step) {
      Run(whole, m, v, step, Pieces(100));
      Run(rows, m, v, step, Pieces(1));
      Run(blocks, m, v, step, CutForBlocks(Pieces(2)));
    }
    EXPECT_EQ(whole, rows);
    EXPECT_EQ(whole, blocks);
    EXPECT_NE(whole.main, start_.main);
  }
}

TEST_F(GroupedUpdateTest, EveryInstructionSetGivesTheSameBits) {
  const auto run = [&](cpu::SimdPath path, DType m, DType v) {
    cpu::UseSimdPath(path);
    State state = start_;
    for (uint32_t step = 0; step < 5; ++step) {
      Run(state, m, v, step, Pieces(100));
    }
    cpu::UseBestSimdPath();
    return state;
  };
  for (const DType m : kMeanTypes) {
    for (const DType v : kSquareTypes) {
      const State portable = run(cpu::SimdPath::kPortable, m, v);
      for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
        if (cpu::RunsHere(path)) {
          EXPECT_EQ(portable, run(path, m, v)) << DTypeName(m) << DTypeName(v);
        }
      }
    }
  }
}

// Groups with zeros of either sign, with values too small for a normal code, with both, with an
// infinite value or a NaN, each beside a group without: the paths of vectors, which take two groups
// and both states at a time, give the bits of the plain loops.
TEST_F(GroupedUpdateTest, RareValuesInAnyGroupHaveTheBitsOfPlainLoops) {
  constexpr int64_t kRow = 512;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> rare = {{0.0f, -0.0f},
                                                {1e-12f, -1e-12f},
                                                {0.0f, -0.0f, 1e-12f},
                                                {1e-30f, 0.0f},
                                                {std::numeric_limits<float>::infinity()},
                                                {kNan, 0.0f},
                                                {-kNan}};
  const UpdatePiece piece = {.elements = 2 * kRow, .first_index = 64 * 77, .site = 5, .row = kRow};
  std::fill(start_.m.begin(), start_.m.end(), uint8_t{0x80});  // -0, which a gradient of -0 keeps
  const std::vector<float> gradient = gradient_;
  for (const std::vector<float>& values : rare) {
    for (const int64_t group : {0, 1, 2, 7}) {
      gradient_ = gradient;
      for (size_t k = 0; k < values.size(); ++k) {
        gradient_[static_cast<size_t>(group * 128 + 5) + 40 * k] = values[k];
      }
      const auto run = [&](cpu::SimdPath path) {
        cpu::UseSimdPath(path);
        State state = start_;
        for (uint32_t step = 0; step < 3; ++step) {
          Run(state, kFp8Mean, kFp8Square, step, {piece});
        }
        cpu::UseBestSimdPath();
        return state;
      };
      const State plain = run(cpu::SimdPath::kPortable);
      EXPECT_EQ(plain.m_scales[static_cast<size_t>(group)] == scalar::kNanScale,
                std::isnan(values[0]));
      for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
        if (!cpu::RunsHere(path)) {
          continue;
        }
        const State state = run(path);
        EXPECT_EQ(state.m, plain.m) << values[0] << " in group " << group;
        EXPECT_EQ(state.v, plain.v) << values[0] << " in group " << group;
        EXPECT_EQ(state.m_scales, plain.m_scales);
        EXPECT_EQ(state.v_scales, plain.v_scales);
        for (size_t i = 0; i < plain.main.size(); ++i) {
          EXPECT_TRUE(state.main[i] == plain.main[i] ||
                      (std::isnan(state.main[i]) && std::isnan(plain.main[i])));
        }
      }
    }
  }
}

// fp32 in both is the plain update: the path through groups adds nothing of its own.
TEST_F(GroupedUpdateTest, WideStatesAreThoseOfThePlainUpdate) {
  State grouped = start_;
  State plain = start_;
  Run(grouped, DType::kF32, DType::kF32, 0, Pieces(100));
  ElementUpdateArgs args = ArgsOf(plain, DType::kF32, DType::kF32, 0).update;
  const std::vector<UpdatePiece> pieces = Pieces(100);
  args.table = {.pieces = pieces.data(), .count = std::ssize(pieces)};
  ElementUpdate(stream_, args);
  EXPECT_EQ(grouped, plain);
}

// One step from zero: each stored value is the code below or above the exact one.
TEST_F(GroupedUpdateTest, CodesAreNeighboursOfTheNewValues) {
  State state = start_;
  Run(state, kFp8Mean, kFp8Square, 0, Pieces(100));
  State exact = start_;
  Run(exact, DType::kF32, DType::kF32, 0, Pieces(100));
  EXPECT_EQ(state.main, exact.main);  // the step is that of the unrounded states
  const std::vector<double> table = E4M3Table();
  const std::vector<double> squares = UE5M3Table();
  int64_t offset = 0;
  size_t group = 0;
  for (const Tensor& tensor : kTensors) {
    for (int64_t row = 0; row < tensor.rows; ++row) {
      for (int64_t column = 0; column < tensor.row; column += 128, ++group) {
        const int64_t count = std::min<int64_t>(128, tensor.row - column);
        const double m_scale = std::ldexp(1.0, state.m_scales[group] - 127);
        const double v_scale = std::ldexp(1.0, state.v_scales[group] - 127);
        for (int64_t i = 0; i < count; ++i, ++offset) {
          const auto at = static_cast<size_t>(offset);
          float m = 0;
          float v = 0;
          std::memcpy(&m, exact.m.data() + at * 4, 4);
          std::memcpy(&v, exact.v.data() + at * 4, 4);
          const size_t code = state.m[at] & 0x7Fu;
          const double magnitude = std::fabs(static_cast<double>(m)) / m_scale;
          ASSERT_LE(code == 0 ? 0.0 : table[code - 1], magnitude);
          ASSERT_GE(code == 126 ? 448.0 * 1.000001 : table[code + 1], magnitude);
          ASSERT_EQ(state.m[at] >> 7, std::signbit(m) ? 1 : 0);
          const size_t square_code = state.v[at];
          const double square = static_cast<double>(v) / v_scale;
          ASSERT_LE(square_code == 0 ? 0.0 : squares[square_code - 1], square);
          ASSERT_GE(square_code == 254 ? 114688.0 * 1.000001 : squares[square_code + 1], square);
        }
      }
    }
  }
}

TEST_F(GroupedUpdateTest, Fp8StateZeroGroupStaysZero) {
  std::fill(gradient_.begin(), gradient_.end(), 0.0f);
  State state = start_;
  Run(state, kFp8Mean, kFp8Square, 3, Pieces(100));
  EXPECT_EQ(state.m, start_.m);
  EXPECT_EQ(state.v, start_.v);
  EXPECT_EQ(state.m_scales, start_.m_scales);
  for (const float weight : state.main) {
    EXPECT_TRUE(std::isfinite(weight));
  }
  const State before = state;
  const int32_t apply = 0;
  std::fill(gradient_.begin(), gradient_.end(), std::numeric_limits<float>::infinity());
  GroupedUpdateArgs args = ArgsOf(state, kFp8Mean, kFp8Square, 4);
  const std::vector<UpdatePiece> pieces = Pieces(100);
  args.update.table = {.pieces = pieces.data(), .count = std::ssize(pieces)};
  args.update.apply = &apply;
  GroupedUpdate(stream_, args);
  EXPECT_EQ(state, before);
}

// Every type of state: a group of which one element moves, and one of magnitudes whose squares just
// fit into fp32. What does not move stays zero, and what moves is neither zero nor infinite.
TEST_F(GroupedUpdateTest, OneLiveElementAndTheLargestMagnitudesStayFinite) {
  constexpr int64_t kLive = 7;
  constexpr float kLargest = 0x1p62f;
  for (const float size : {1e-6f, 1.0f, kLargest}) {
    for (int64_t i = 0; i < kElements; ++i) {
      gradient_[static_cast<size_t>(i)] = size == kLargest || i == kLive ? size : 0.0f;
    }
    for (const DType m : kMeanTypes) {
      for (const DType v : kSquareTypes) {
        State state = start_;
        for (uint32_t step = 0; step < 3; ++step) {
          Run(state, m, v, step, Pieces(100));
        }
        for (const float weight : state.main) {
          ASSERT_TRUE(std::isfinite(weight)) << size << DTypeName(m) << DTypeName(v);
        }
        const auto is_zero = [](const std::vector<uint8_t>& bytes, int64_t at, DType type) {
          const int64_t width = DTypeBytes(type);
          const auto begin = bytes.begin() + at * width;
          return std::all_of(begin, begin + width, [](uint8_t byte) { return byte == 0; });
        };
        EXPECT_FALSE(is_zero(state.m, kLive, m)) << size << DTypeName(m);
        EXPECT_FALSE(is_zero(state.v, kLive, v)) << size << DTypeName(v);
        for (const int64_t dead : {int64_t{0}, kLive + 1, kElements - 1}) {
          EXPECT_EQ(is_zero(state.m, dead, m), size != kLargest) << dead;
          EXPECT_EQ(is_zero(state.v, dead, v), size != kLargest) << dead;
        }
      }
    }
  }
}

// An element that lies past 2^31, 2^32 or 2^36 in its tensor has draws of its own: another one that
// an index of 32 bits would take for it has others. At 2^36 draws have a second word of their
// counter that is not the one before.
TEST_F(GroupedUpdateTest, DrawsFollowIndicesOf64Bits) {
  std::vector<State> inside;  // by path, the plain loops first
  for (const cpu::SimdPath path :
       {cpu::SimdPath::kPortable, cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (!cpu::RunsHere(path)) {
      continue;
    }
    cpu::UseSimdPath(path);
    const auto run = [&](int64_t first, int64_t rows) {
      State state = start_;
      std::vector<UpdatePiece> pieces;
      for (int64_t row = 0; row < 8; row += rows) {
        pieces.push_back({.offset = row * 128,
                          .elements = rows * 128,
                          .first_index = first + row * 128,
                          .site = 5,
                          .row = 128,
                          .first_scale = row});
      }
      Run(state, kFp8Mean, kFp8Square, 0, pieces);
      return state;
    };
    const State low = run(0, 8);
    for (const int power : {31, 32, 36}) {
      const int64_t first = int64_t{1} << power;
      EXPECT_EQ(run(first - 512, 8), run(first - 512, 1)) << power;
      const State far = run(first, 8);
      EXPECT_NE(far.v, low.v) << power;
      EXPECT_NE(far.m, low.m) << power;
      EXPECT_EQ(far.main, low.main);
    }
    // Carries inside a group.
    inside.push_back(run((int64_t{1} << 36) - 72, 8));
    EXPECT_EQ(inside.back(), inside.front());
    cpu::UseBestSimdPath();
  }
}

// The rule of scalar/philox.h, written out: 32 halves for 64 elements.
uint32_t HalfOfElement(uint64_t index, scalar::PhiloxPosition position) {
  const uint64_t of_block = index % 64;
  position.block = index / 64 * 4 + of_block % 32 / 8;
  const uint32_t half = scalar::PhiloxHalf(scalar::DrawStates(77, position), of_block % 8);
  return of_block < 32 ? half : (half & 0xFFu) << 8 | half >> 8;
}

// v by the element's bits, m by those with their bytes exchanged.
TEST_F(GroupedUpdateTest, AnElementIsRoundedByItsHalf) {
  constexpr int64_t kFirst = 1 << 20 | 5;
  constexpr int64_t kCount = 120;  // one group
  const UpdatePiece piece = {
      .elements = kCount, .first_index = kFirst, .site = 5, .row = kCount, .first_scale = 0};
  for (const cpu::SimdPath path :
       {cpu::SimdPath::kPortable, cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (!cpu::RunsHere(path)) {
      continue;
    }
    cpu::UseSimdPath(path);
    State state = start_;
    GroupedUpdateArgs args = ArgsOf(state, kFp8Mean, DType::kBF16, 3);
    args.update.table = {.pieces = &piece, .count = 1};
    GroupedUpdate(stream_, args);
    cpu::UseBestSimdPath();
    const auto* squares = reinterpret_cast<const uint16_t*>(state.v.data());
    for (int64_t i = 0; i < kCount; ++i) {
      const auto index = static_cast<uint64_t>(kFirst + i);
      const uint32_t half = HalfOfElement(index, {.step = 3, .site = 5});
      const scalar::AdamWElement next =
          scalar::AdamWStep(args.update.scalars,
                            {start_.main[static_cast<size_t>(i)], 0, 0},
                            gradient_[static_cast<size_t>(i)]);
      EXPECT_EQ(squares[i], scalar::Bf16Stochastic(next.v, half)) << i;
      EXPECT_EQ(state.m[static_cast<size_t>(i)],
                scalar::EncodeMean(next.m, state.m_scales[0], scalar::ExchangeBytes(half)))
          << i;
    }
  }
}

// After gradients fall tenfold, the stored average of squares follows the exact one: rounded to
// nearest it would stand still.
TEST_F(GroupedUpdateTest, Fp8VTracksFp32AfterDrop) {
  State narrow = start_;
  State wide = start_;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  const auto steps = [&](uint32_t first, uint32_t count, float sigma) {
    for (uint32_t step = first; step < first + count; ++step) {
      for (float& g : gradient_) {
        g = sigma * normal(random);
      }
      Run(narrow, kFp8Mean, kFp8Square, step, Pieces(100));
      Run(wide, DType::kF32, DType::kF32, step, Pieces(100));
    }
  };
  const auto ratio = [&] {
    double sum = 0;
    size_t group = 0;
    int64_t offset = 0;
    for (const Tensor& tensor : kTensors) {
      for (int64_t row = 0; row < tensor.rows; ++row) {
        for (int64_t column = 0; column < tensor.row; column += 128, ++group) {
          for (int64_t i = column; i < std::min(column + 128, tensor.row); ++i, ++offset) {
            float exact = 0;
            std::memcpy(&exact, wide.v.data() + offset * 4, 4);
            sum += static_cast<double>(scalar::DecodeSquare(narrow.v[static_cast<size_t>(offset)],
                                                            narrow.v_scales[group])) /
                   static_cast<double>(exact);
          }
        }
      }
    }
    return sum / static_cast<double>(kElements);
  };
  steps(0, 100, 1.0f);
  EXPECT_NEAR(ratio(), 1.0, 0.05);
  steps(100, 150, 0.1f);
  EXPECT_NEAR(ratio(), 1.0, 0.05);
}

}  // namespace
}  // namespace ravel::kernels
