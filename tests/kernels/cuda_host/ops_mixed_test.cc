// The ops of mixed precision on the CPU, which device kernels are compared with, and their scalar
// rules.

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/element_update.h"
#include "kernels/reduce_add.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels {
namespace {

TensorView Flat(void* data, int64_t n, DType dtype) {
  return {.data = data, .dtype = dtype, .rank = 1, .size = {n}, .row_stride = 1};
}

TEST(Bfloat16Rules, SplitIsABijectionOnFiniteValues) {
  for (uint64_t step = 0; step < (uint64_t{1} << 32); step += 65521) {  // prime: every low half
    const float x = std::bit_cast<float>(static_cast<uint32_t>(step));
    if (std::isfinite(x) && (static_cast<uint32_t>(step) & 0x7FFFFFFFu) < 0x7F7F8000u) {
      const scalar::SplitWeight split = scalar::SplitOf(x);
      ASSERT_EQ(std::bit_cast<uint32_t>(scalar::JoinOf(split)), static_cast<uint32_t>(step));
      ASSERT_EQ(split.weight, scalar::Bf16HalfAway(x));
    }
  }
}

TEST(Bfloat16Rules, TiesGoToEvenOrAwayFromZero) {
  const float tie = std::bit_cast<float>(0x3F808000u);  // between 0x3F80 and 0x3F81
  EXPECT_EQ(scalar::Bf16Nearest(tie), 0x3F80);
  EXPECT_EQ(scalar::Bf16HalfAway(tie), 0x3F81);
  EXPECT_EQ(scalar::Bf16HalfAway(-tie), 0xBF81);
  EXPECT_EQ(scalar::Bf16Nearest(std::numeric_limits<float>::quiet_NaN()), 0x7FFF);
  EXPECT_EQ(scalar::Bf16Nearest(std::numeric_limits<float>::infinity()), 0x7F80);
}

TEST(Bfloat16Rules, ExactlyTheCutOffFractionOfDrawsRoundsUp) {
  for (const uint32_t low : {0u, 1u, 0x1234u, 0x8000u, 0xFFFFu}) {
    const float x = -std::bit_cast<float>(0x3F800000u | low);
    uint32_t up = 0;
    for (uint32_t random = 0; random < 65536; ++random) {
      const uint16_t rounded = scalar::Bf16Stochastic(x, random);
      ASSERT_TRUE(rounded == 0xBF80 || rounded == 0xBF81);
      up += rounded == 0xBF81 ? 1 : 0;
    }
    EXPECT_EQ(up, low);
  }
  EXPECT_EQ(scalar::Bf16Stochastic(std::numeric_limits<float>::max(), 0xFFFF), 0x7F7F);
}

UpdateScalars SomeScalars() {
  UpdateScalars scalars;
  scalars.learning_rate = 1e-2f;
  scalars.weight_decay = 0.1f;
  return scalars;
}

class MixedAdamWTest : public ::testing::Test {
 protected:
  static constexpr int64_t kCount = 37;

  // Twenty steps over [begin, end) of the tensor, the main weight as fp32 or as a remainder.
  struct State {
    std::vector<float> main = std::vector<float>(kCount);
    std::vector<uint16_t> weight = std::vector<uint16_t>(kCount);
    std::vector<int16_t> remainder = std::vector<int16_t>(kCount);
    std::vector<uint16_t> m = std::vector<uint16_t>(kCount);
    std::vector<uint16_t> v = std::vector<uint16_t>(kCount);
  };

  static State Start() {
    State state;
    for (size_t i = 0; i < kCount; ++i) {
      state.main[i] = std::sin(static_cast<float>(i + 1));
      const scalar::SplitWeight split = scalar::SplitOf(state.main[i]);
      state.weight[i] = split.weight;
      state.remainder[i] = split.remainder;
    }
    return state;
  }

  void Step(State& state, bool remainder, int64_t begin, int64_t end, uint32_t step) {
    std::vector<float> g(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      g[i] = std::cos(static_cast<float>(i * (step + 1)));
    }
    const int64_t n = end - begin;
    ElementUpdateArgs args = {.weight = Flat(state.weight.data() + begin, n, DType::kBF16),
                              .g = Flat(g.data() + begin, n, DType::kF32),
                              .m = Flat(state.m.data() + begin, n, DType::kBF16),
                              .v = Flat(state.v.data() + begin, n, DType::kBF16),
                              .seed = 11,
                              .step = step,
                              .site = 3,
                              .first_index = 101 + begin,
                              .scalars = SomeScalars()};
    if (remainder) {
      args.remainder = Flat(state.remainder.data() + begin, n, DType::kI16);
    } else {
      args.main_weight = Flat(state.main.data() + begin, n, DType::kF32);
    }
    ElementUpdate(stream_, args);
  }

  CpuStream stream_;
};

TEST_F(MixedAdamWTest, BothFormsOfMainWeightTrainWithTheSameBits) {
  State wide = Start();
  State split = Start();
  for (uint32_t step = 0; step < 20; ++step) {
    Step(wide, false, 0, kCount, step);
    Step(split, true, 0, kCount, step);
  }
  EXPECT_EQ(wide.weight, split.weight);
  EXPECT_EQ(wide.m, split.m);
  EXPECT_EQ(wide.v, split.v);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(scalar::JoinOf({split.weight[i], split.remainder[i]}), wide.main[i]);
  }
}

TEST_F(MixedAdamWTest, DrawsIndependentOfGridAndShard) {
  State whole = Start();
  State parts = Start();
  for (uint32_t step = 0; step < 20; ++step) {
    Step(whole, true, 0, kCount, step);
    Step(parts, true, 0, 5, step);
    Step(parts, true, 5, 6, step);
    Step(parts, true, 6, kCount, step);
  }
  EXPECT_EQ(whole.v, parts.v);
  EXPECT_EQ(whole.remainder, parts.remainder);
}

TEST_F(MixedAdamWTest, ATableGivesTheBitsOfItsPiecesOneByOne) {
  // Two tensors, one without decay, with a gap that nothing touches.
  const UpdatePiece pieces[] = {
      {.offset = 0, .elements = 11, .first_index = 6, .site = 3},
      {.offset = 14, .elements = 23, .first_index = 0, .site = 4, .decays = 0}};
  State table = Start();
  State single = Start();
  const auto args_of = [](State& state, std::vector<float>& g, int64_t begin, int64_t n) {
    return ElementUpdateArgs{.weight = Flat(state.weight.data() + begin, n, DType::kBF16),
                             .remainder = Flat(state.remainder.data() + begin, n, DType::kI16),
                             .g = Flat(g.data() + begin, n, DType::kF32),
                             .m = Flat(state.m.data() + begin, n, DType::kBF16),
                             .v = Flat(state.v.data() + begin, n, DType::kBF16),
                             .seed = 11,
                             .step = 2,
                             .scalars = SomeScalars()};
  };
  std::vector<float> g(kCount, 0.25f);
  ElementUpdateArgs all = args_of(table, g, 0, kCount);
  all.table = {.pieces = pieces, .count = 2};
  ElementUpdate(stream_, all);
  for (const UpdatePiece& piece : pieces) {
    ElementUpdateArgs one = args_of(single, g, piece.offset, piece.elements);
    one.first_index = piece.first_index;
    one.site = piece.site;
    one.scalars.weight_decay = piece.decays != 0 ? one.scalars.weight_decay : 0.0f;
    ElementUpdate(stream_, one);
  }
  EXPECT_EQ(table.weight, single.weight);
  EXPECT_EQ(table.remainder, single.remainder);
  EXPECT_EQ(table.m, single.m);
  EXPECT_EQ(table.v, single.v);
  EXPECT_EQ(table.v[12], 0);
}

// Against PyTorch's formula in fp64: buf = momentum * buf + g; p -= lr * (buf, or g + momentum *
// buf), and decay that is decoupled.
TEST(SgdUpdate, IsMomentumWithDecoupledDecayInEveryForm) {
  CpuStream stream;
  UpdateScalars scalars;
  scalars.beta1 = 0.9f;
  scalars.learning_rate = 0.1f;
  scalars.weight_decay = 0.01f;
  scalars.gradient_scale = 0.5f;
  for (const bool nesterov : {false, true}) {
    std::vector<float> p = {1.0f, -2.0f, 0.25f}, m(3), g = {0.5f, 4.0f, -1.0f};
    std::vector<uint16_t> weight(3);
    std::vector<int16_t> remainder(3);
    std::vector<float> split_m(3);
    std::vector<double> p64(p.begin(), p.end()), m64(3);
    for (size_t i = 0; i < 3; ++i) {
      const scalar::SplitWeight split = scalar::SplitOf(p[i]);
      weight[i] = split.weight;
      remainder[i] = split.remainder;
    }
    ElementUpdateArgs args = {.main_weight = VectorView(p.data(), 3),
                              .g = VectorView(g.data(), 3),
                              .m = VectorView(m.data(), 3),
                              .v = {},
                              .scalars = scalars,
                              .rule = nesterov ? ElementRule::kSgdNesterov : ElementRule::kSgd};
    ElementUpdateArgs split = args;
    split.main_weight = {};
    split.weight = Flat(weight.data(), 3, DType::kBF16);
    split.remainder = Flat(remainder.data(), 3, DType::kI16);
    split.m = VectorView(split_m.data(), 3);
    for (int step = 0; step < 5; ++step) {
      ElementUpdate(stream, args);
      ElementUpdate(stream, split);
      for (size_t i = 0; i < 3; ++i) {
        const double gradient = 0.5 * static_cast<double>(g[i]);
        m64[i] = 0.9 * m64[i] + gradient;
        p64[i] -= 0.1 * ((nesterov ? gradient + 0.9 * m64[i] : m64[i]) + 0.01 * p64[i]);
        EXPECT_NEAR(static_cast<double>(p[i]), p64[i], 1e-5) << nesterov << step;
        EXPECT_EQ(scalar::JoinOf({weight[i], remainder[i]}), p[i]);
        EXPECT_EQ(split_m[i], m[i]);
      }
    }
  }
}

// Against the formula in fp64; the sign of 0 is 0.
TEST(LionUpdate, IsTheSignOfAnAverageWithDecoupledDecay) {
  CpuStream stream;
  UpdateScalars scalars;
  scalars.beta2 = 0.99f;
  scalars.one_minus_beta2 = 1.0f - 0.99f;
  scalars.learning_rate = 0.1f;
  scalars.weight_decay = 0.01f;
  scalars.gradient_scale = 0.5f;
  constexpr size_t kCount = 4;
  std::vector<float> p = {1.0f, -2.0f, 0.25f, 3.0f}, m(kCount), g(kCount);
  std::vector<double> p64(p.begin(), p.end()), m64(kCount);
  for (int step = 0; step < 6; ++step) {
    for (size_t i = 0; i < 3; ++i) {
      g[i] =
          static_cast<float>(static_cast<int>(i * 5 + static_cast<size_t>(step) * 7) % 11) - 5.0f;
    }
    g[3] = 0.0f;
    ElementUpdate(stream,
                  {.main_weight = VectorView(p.data(), kCount),
                   .g = VectorView(g.data(), kCount),
                   .m = VectorView(m.data(), kCount),
                   .v = {},
                   .scalars = scalars,
                   .rule = ElementRule::kLion});
    for (size_t i = 0; i < kCount; ++i) {
      const double gradient = 0.5 * static_cast<double>(g[i]);
      const double direction = 0.9 * m64[i] + 0.1 * gradient;
      const double sign = direction > 0 ? 1 : direction < 0 ? -1 : 0;
      p64[i] -= 0.1 * (sign + 0.01 * p64[i]);
      m64[i] = 0.99 * m64[i] + 0.01 * gradient;
      EXPECT_NEAR(static_cast<double>(p[i]), p64[i], 1e-5) << step << ' ' << i;
      EXPECT_NEAR(static_cast<double>(m[i]), m64[i], 1e-6) << step << ' ' << i;
    }
  }
}

TEST_F(MixedAdamWTest, SkippedStepChangesNothing) {
  std::vector<float> p = {1, 2}, g = {3, 4}, m = {5, 6}, v = {7, 8};
  const int32_t apply = 0;
  ElementUpdate(stream_,
                {.main_weight = VectorView(p.data(), 2),
                 .g = VectorView(g.data(), 2),
                 .m = VectorView(m.data(), 2),
                 .v = VectorView(v.data(), 2),
                 .scalars = SomeScalars(),
                 .apply = &apply});
  EXPECT_EQ(p, (std::vector<float>{1, 2}));
  EXPECT_EQ(m, (std::vector<float>{5, 6}));
}

TEST_F(MixedAdamWTest, Fp32StatesGiveTheBitsOfThePlainUpdate) {
  std::vector<float> p = {1, -2, 3}, g = {0.5f, 0.25f, -1}, m = {0.1f, 0, 0}, v = {0.2f, 0, 1};
  std::vector<float> p2 = p, m2 = m, v2 = v;
  const UpdateScalars scalars = SomeScalars();
  ElementUpdate(stream_,
                {.main_weight = VectorView(p.data(), 3),
                 .g = VectorView(g.data(), 3),
                 .m = VectorView(m.data(), 3),
                 .v = VectorView(v.data(), 3),
                 .device_scalars = &scalars});
  AdamWUpdate(stream_,
              {VectorView(p2.data(), 3),
               VectorView(g.data(), 3),
               VectorView(m2.data(), 3),
               VectorView(v2.data(), 3),
               scalars});
  EXPECT_EQ(p, p2);
  EXPECT_EQ(m, m2);
  EXPECT_EQ(v, v2);
}

TEST(ReduceAddTest, AddsTheTreeAndCountsWhatIsNotFinite) {
  CpuStream stream;
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> a = {1, 2, 1e8f}, b = {3, 4, 1}, c = {5, inf, -1e8f}, d = {7, 8, 1};
  std::vector<float> out = {100, 100, 100};
  double squares = -1;
  int64_t non_finite = 5;
  const std::vector<const float*> pieces = {a.data(), b.data(), c.data(), d.data()};
  ReduceAdd(stream,
            {.pieces = pieces,
             .out = VectorView(out.data(), 3),
             .output = Output::kAccumulate,
             .non_finite = &non_finite});
  EXPECT_EQ(out[0], 116.0f);
  EXPECT_EQ(out[2], 100.0f);  // (1e8 + 1) + (-1e8 + 1) = 0 in fp32
  EXPECT_EQ(non_finite, 6);
  ReduceAdd(stream,
            {.pieces = {a.data()}, .out = VectorView(out.data(), 2), .squared_norm = &squares});
  EXPECT_EQ(squares, 5.0);
}

TEST(ReduceAddTest, WidensPiecesOfBf16) {
  CpuStream stream;
  const std::vector<uint16_t> a = {0x3F80, 0x4CBE}, b = {0xBF00, 0x3F80};  // 1, 9.96e7; -0.5, 1
  std::vector<float> out = {100, 100};
  const ReduceAddArgs args = {.rounded_pieces = {a.data(), b.data()},
                              .out = VectorView(out.data(), 2)};
  ReduceAdd(stream, args);
  EXPECT_EQ(out, (std::vector<float>{0.5f, std::bit_cast<float>(0x4CBE0000u)}));
  ReduceAddArgs more = args;
  more.output = Output::kAccumulate;
  ReduceAdd(stream, more);
  EXPECT_EQ(out, (std::vector<float>{1.0f, 2 * std::bit_cast<float>(0x4CBE0000u)}));
}

TEST(CastTest, RoundsAsAskedAndWidensExactly) {
  CpuStream stream;
  std::vector<float> x = {std::bit_cast<float>(0x3F808000u), -3.0f};
  std::vector<uint16_t> y(2);
  const TensorView narrow = Flat(y.data(), 2, DType::kBF16);
  Cast(stream, {VectorView(x.data(), 2), narrow});
  EXPECT_EQ(y[0], 0x3F80);
  Cast(stream, {VectorView(x.data(), 2), narrow, Bf16Rounding::kHalfAway});
  EXPECT_EQ(y[0], 0x3F81);
  Cast(stream, {narrow, VectorView(x.data(), 2)});
  EXPECT_EQ(x[1], -3.0f);
}

TEST(TransposeTest, MovesEveryElementAndNoGap) {
  CpuStream stream;
  std::vector<float> from = {1, 2, 3, -1, 4, 5, 6, -1};
  std::vector<float> to(6, -1);
  TensorView wide = MatrixView(from.data(), 2, 3);
  wide.row_stride = 4;
  TransposeMatrix(stream, {wide, MatrixView(to.data(), 3, 2)});
  EXPECT_EQ(to, (std::vector<float>{1, 4, 2, 5, 3, 6}));
}

}  // namespace
}  // namespace ravel::kernels
