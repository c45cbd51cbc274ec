// fp16 as bits: the conversions of every SIMD path against an oracle in fp64, what a loss scale
// does to the gradient of the head, and model weights of fp16 from main weights.

#include "kernels/scalar/float16.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/cast.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/element_update.h"
#include "kernels/loss.h"

namespace ravel::kernels::testing {
namespace {

// All values of fp16, the places between neighbours where rounding turns, and what is next to them
// in fp32; beyond the largest, and what is not finite.
std::vector<float> EdgeValues() {
  std::vector<float> values;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (uint32_t bits = 0; bits < 0x7C00u; ++bits) {
    const float below = Fp16ToFloat(static_cast<uint16_t>(bits));
    const float above =
        bits + 1 < 0x7C00u ? Fp16ToFloat(static_cast<uint16_t>(bits + 1)) : 65536.0f;
    const float middle = 0.5f * (below + above);
    for (const float value : {below, middle}) {
      for (const float near : {std::nextafter(value, -1.0f), value, std::nextafter(value, 1e9f)}) {
        values.push_back(near);
        values.push_back(-near);
      }
    }
  }
  for (const float value : {65536.0f, 1e30f, kInfinity, 1e-30f, 1e-42f}) {
    values.push_back(value);
    values.push_back(-value);
  }
  return values;
}

TEST(Float16, NarrowingIsTheNearestOfTheOracle) {
  for (const float value : EdgeValues()) {
    ASSERT_EQ(scalar::Fp16Nearest(value), FloatToFp16(value)) << value;
  }
  EXPECT_EQ(scalar::Fp16Nearest(65519.996f), 0x7BFF);
  EXPECT_EQ(scalar::Fp16Nearest(65520.0f), 0x7C00);
  EXPECT_EQ(scalar::Fp16Nearest(0x1p-25f), 0x0000);
  EXPECT_EQ(scalar::Fp16Nearest(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_TRUE(std::isnan(scalar::Fp16Value(scalar::Fp16Nearest(std::nanf("")))));
}

TEST(Float16, WideningIsExact) {
  for (uint32_t bits = 0; bits <= 0xFFFFu; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = scalar::Fp16Value(half);
    if (std::isnan(value)) {
      EXPECT_GT(half & 0x7FFF, 0x7C00);
    } else {
      ASSERT_EQ(scalar::Fp16Nearest(value), half);
      ASSERT_EQ(value, Fp16ToFloat(half));
    }
  }
}

// Sums through loads and stores of a SIMD path: rounded to fp32, then to fp16.
TEST(Float16, EveryPathRoundsAlike) {
  std::vector<uint16_t> halves;
  for (uint32_t bits = 0; bits <= 0xFFFFu; ++bits) {
    if (!std::isnan(Fp16ToFloat(static_cast<uint16_t>(bits)))) {
      halves.push_back(static_cast<uint16_t>(bits));
    }
  }
  const auto n = static_cast<int64_t>(halves.size());
  const auto view = [n](std::vector<uint16_t>& values) {
    TensorView flat = VectorView(reinterpret_cast<float*>(values.data()), n);
    flat.dtype = DType::kF16;
    return flat;
  };
  CpuStream stream;
  for (const cpu::SimdPath path :
       {cpu::SimdPath::kPortable, cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (!cpu::RunsHere(path)) {
      continue;
    }
    cpu::UseSimdPath(path);
    for (const float other : {0.0f, 0x1p-24f, 0.33325195f, -1.0009766f, 2047.0f, -65504.0f}) {
      std::vector<uint16_t> x(halves.size(), FloatToFp16(other));
      std::vector<uint16_t> y = halves;
      AddInPlace(stream, {.x = view(x), .y = view(y)});
      const float addend = Fp16ToFloat(x.front());
      for (size_t i = 0; i < halves.size(); ++i) {
        ASSERT_EQ(y[i], FloatToFp16(Fp16ToFloat(halves[i]) + addend))
            << halves[i] << " + " << other;
      }
    }
  }
  cpu::UseBestSimdPath();
}

TEST(Float16, ALossScaleMultipliesTheGradientAlone) {
  constexpr int64_t kTokens = 5;
  constexpr int64_t kHidden = 19;
  constexpr int64_t kVocabulary = 37;
  const auto fp16 = [](std::vector<uint16_t>& values, int64_t rows, int64_t columns) {
    TensorView view = MatrixView(reinterpret_cast<float*>(values.data()), rows, columns);
    view.dtype = DType::kF16;
    return view;
  };
  const auto values = [](int64_t count, int64_t step) {
    std::vector<uint16_t> made;
    for (int64_t i = 0; i < count; ++i) {
      made.push_back(FloatToFp16(static_cast<float>(i * step % 23 - 11) / 16.0f));
    }
    return made;
  };
  std::vector<uint16_t> x = values(kTokens * kHidden, 7);
  std::vector<uint16_t> w = values(kVocabulary * kHidden, 5);
  std::vector<int32_t> targets = {3, -1, 36, 0, 12};
  const auto run = [&](float scale) {
    std::vector<uint16_t> dx(x.size());
    std::vector<uint16_t> logits(2 * kVocabulary);
    std::vector<float> dw(w.size());
    std::vector<float> loss(kTokens);
    CpuStream stream;
    TensorView ids = VectorView(reinterpret_cast<float*>(targets.data()), kTokens);
    ids.dtype = DType::kI32;
    LinearCrossEntropyTrain(stream,
                            {.x = fp16(x, kTokens, kHidden),
                             .w = fp16(w, kVocabulary, kHidden),
                             .targets = ids,
                             .loss = VectorView(loss.data(), kTokens),
                             .dx = fp16(dx, kTokens, kHidden),
                             .dw = MatrixView(dw.data(), kVocabulary, kHidden),
                             .workspace = fp16(logits, 2, kVocabulary),
                             .loss_scale = scale});
    std::vector<float> all = loss;
    for (const float value : dw) {
      all.push_back(value / scale);
    }
    for (const uint16_t value : dx) {
      all.push_back(Fp16ToFloat(value) / scale);
    }
    return all;
  };
  EXPECT_EQ(run(1024.0f), run(4096.0f));
  const std::vector<float> large = run(131072.0f);
  EXPECT_EQ(large.front(), run(1.0f).front());
  EXPECT_FALSE(std::isfinite(large.back()));
}

TEST(Float16, WeightsOfAnUpdateAreTheNearestToMainWeights) {
  constexpr int64_t kElements = 300;
  std::vector<float> main(kElements);
  std::vector<float> g(kElements, 0.25f);
  std::vector<float> m(kElements);
  std::vector<float> v(kElements);
  for (size_t i = 0; i < main.size(); ++i) {
    main[i] = std::ldexp(1.0f + static_cast<float>(i) / 300.0f, static_cast<int>(i % 40) - 26);
  }
  std::vector<uint16_t> weight(kElements);
  TensorView narrow = VectorView(reinterpret_cast<float*>(weight.data()), kElements);
  narrow.dtype = DType::kF16;
  CpuStream stream;
  ElementUpdate(stream,
                {.main_weight = VectorView(main.data(), kElements),
                 .weight = narrow,
                 .g = VectorView(g.data(), kElements),
                 .m = VectorView(m.data(), kElements),
                 .v = VectorView(v.data(), kElements),
                 .scalars = {.learning_rate = 1e-3f}});
  std::vector<uint16_t> cast(kElements);
  TensorView again = narrow;
  again.data = cast.data();
  Cast(stream, {.from = VectorView(main.data(), kElements), .to = again});
  EXPECT_EQ(cast, weight);
  for (size_t i = 0; i < main.size(); ++i) {
    ASSERT_EQ(weight[i], FloatToFp16(main[i]));
  }
}

TEST(Float16, IsRefusedWhereNothingComputesIt) {
  CpuStream stream;
  std::vector<float> memory(64);
  const TensorView wide = VectorView(memory.data(), 8);
  TensorView fp16 = wide;
  fp16.dtype = DType::kF16;
  TensorView bf16 = wide;
  bf16.dtype = DType::kBF16;
  EXPECT_DEATH(Cast(stream, {.from = bf16, .to = fp16}), "fp32 is expected");
  EXPECT_DEATH(ElementUpdate(stream, {.main_weight = wide, .g = fp16, .m = wide, .v = wide}),
               "fp32 or bf16 is expected");
}

}  // namespace
}  // namespace ravel::kernels::testing
