// Updates in mixed types on every instruction set against the plain loops, bit by bit: all forms of
// weights, gradients and states, rows that are no whole vectors, elements that begin inside a draw,
// a counter that carries within a group, and values of every magnitude.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/simd_ops.h"
#include "kernels/grouped_update.h"
#include "tests/testing/cpu_time.h"
#include "tests/testing/sanitizer.h"

namespace ravel::kernels {
namespace {

constexpr int64_t kPathRow = 300;
constexpr int64_t kPathRows = 3;
constexpr int64_t kPathElements = kPathRow * kPathRows;
constexpr int64_t kPathScales = 3 * kPathRows;

struct PathForm {
  bool split = false;   // a bf16 weight and its remainder; else fp32
  bool weight = false;  // a narrow weight beside the fp32 one
  DType gradient = DType::kF32;
  DType mean = DType::kF32;
  DType square = DType::kF32;
  ElementRule rule = ElementRule::kAdamW;  // of one state: `square` is not there
  DType weight_type = DType::kBF16;
};

std::vector<PathForm> AllForms() {
  std::vector<PathForm> forms;
  for (const auto& [split, weight] : {std::pair{false, false}, {false, true}, {true, true}}) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) {
      for (const DType mean : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
        for (const DType square : {DType::kF32, DType::kBF16, DType::kU8}) {
          forms.push_back({split, weight, gradient, mean, square});
        }
        forms.push_back({split, weight, gradient, mean, DType::kF32, ElementRule::kLion});
        if (weight && !split) {
          const DType square = mean == DType::kF8E4M3 ? DType::kU8 : mean;
          forms.push_back(
              {split, weight, gradient, mean, square, ElementRule::kAdamW, DType::kF16});
        }
      }
    }
  }
  return forms;
}

std::string NameOf(const PathForm& form) {
  const auto name = [](DType dtype) { return std::string(DTypeName(dtype)); };
  return name(form.gradient) + " gradient, " + name(form.mean) + " " + name(form.square) +
         (form.split ? ", remainder" : "") +
         (form.weight ? ", " + name(form.weight_type) + " weight" : "");
}

// Memory of one tensor. Every operand has room for the widest type.
struct PathTensor {
  std::vector<uint32_t> main = std::vector<uint32_t>(kPathElements);
  std::vector<uint16_t> weight = std::vector<uint16_t>(kPathElements);
  std::vector<int16_t> remainder = std::vector<int16_t>(kPathElements);
  std::vector<uint32_t> mean = std::vector<uint32_t>(kPathElements);
  std::vector<uint32_t> square = std::vector<uint32_t>(kPathElements);
  std::vector<uint8_t> mean_scales = std::vector<uint8_t>(kPathScales);
  std::vector<uint8_t> square_scales = std::vector<uint8_t>(kPathScales);
  bool operator==(const PathTensor&) const = default;
};

TensorView FlatOf(void* data, int64_t elements, DType dtype) {
  TensorView view = VectorView(nullptr, elements);
  view.dtype = dtype;
  view.data = data;
  return view;
}

class UpdatePathsTest : public ::testing::Test {
 protected:
  // Magnitudes from 2^-`spread` to 2^spread times 2^center; some are zero.
  void FillGradients(int spread, int center = 0) {
    std::normal_distribution<float> normal;
    for (uint32_t& bits : gradient_) {
      const int exponent = static_cast<int>(random_() % static_cast<uint32_t>(2 * spread + 1));
      const float g = std::ldexp(normal(random_), exponent - spread + center);
      bits = random_() % 16 == 0 ? 0 : std::bit_cast<uint32_t>(g);
    }
  }
  // The same values as bf16, two in a word.
  std::vector<uint32_t> Rounded() const {
    std::vector<uint32_t> rounded(kPathElements);
    for (size_t i = 0; i < gradient_.size(); ++i) {
      const uint32_t bits = gradient_[i] >> 16;
      rounded[i / 2] |= i % 2 == 0 ? bits : bits << 16;
    }
    return rounded;
  }

  void Run(const PathForm& form, int64_t first_index, uint32_t step, PathTensor& tensor) {
    std::vector<uint32_t> gradient = form.gradient == DType::kF32 ? gradient_ : Rounded();
    const UpdatePiece piece = {
        .elements = kPathElements, .first_index = first_index, .site = 9, .row = kPathRow};
    GroupedUpdateArgs args = {
        .update = {.g = FlatOf(gradient.data(), kPathElements, form.gradient),
                   .m = FlatOf(tensor.mean.data(), kPathElements, form.mean),
                   .v = FlatOf(tensor.square.data(), kPathElements, form.square),
                   .seed = 0x123456789ABCDEFull,
                   .step = step,
                   .table = {.pieces = &piece, .count = 1},
                   .rule = form.rule}};
    if (form.rule != ElementRule::kAdamW) {
      args.update.v = {};
    }
    if (form.split) {
      args.update.remainder = FlatOf(tensor.remainder.data(), kPathElements, DType::kI16);
    } else {
      args.update.main_weight = FlatOf(tensor.main.data(), kPathElements, DType::kF32);
    }
    if (form.weight) {
      args.update.weight = FlatOf(tensor.weight.data(), kPathElements, form.weight_type);
    }
    if (form.mean == DType::kF8E4M3) {
      args.m_scales = FlatOf(tensor.mean_scales.data(), kPathScales, DType::kU8);
    }
    if (form.square == DType::kU8 && form.rule == ElementRule::kAdamW) {
      args.v_scales = FlatOf(tensor.square_scales.data(), kPathScales, DType::kU8);
    }
    args.update.scalars.learning_rate = 1e-2f;
    args.update.scalars.weight_decay = step % 2 == 0 ? 0.1f : 0.0f;
    GroupedUpdate(stream_, args);
  }

  // The first steps from zero on that path, the last of them with gradients that are not finite.
  PathTensor Steps(
      cpu::SimdPath path, const PathForm& form, int64_t first_index, int spread, int center = 0) {
    cpu::UseSimdPath(path);
    PathTensor tensor;
    random_.seed(4);
    for (uint32_t step = 0; step < 6; ++step) {
      FillGradients(spread, center);
      if (step == 5) {
        gradient_[7] = 0x7F800000u;
        gradient_[200] = 0xFFC00001u;
      }
      Run(form, first_index, step, tensor);
    }
    cpu::UseBestSimdPath();
    return tensor;
  }

  std::mt19937 random_;
  std::vector<uint32_t> gradient_ = std::vector<uint32_t>(kPathElements);
  CpuStream stream_;
};

TEST_F(UpdatePathsTest, EveryInstructionSetGivesTheBitsOfThePlainLoops) {
  // The last two: word 0 of the counter carries inside the second group, and between two groups.
  constexpr int64_t kCarry = int64_t{1} << 35;
  for (const int64_t first_index :
       {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{4'000'000'003}, kCarry - 170, kCarry - 128}) {
    for (const PathForm& form : AllForms()) {
      for (const int spread : {1, 14, 60}) {
        const PathTensor portable = Steps(cpu::SimdPath::kPortable, form, first_index, spread);
        for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
          if (cpu::RunsHere(path)) {
            EXPECT_EQ(portable, Steps(path, form, first_index, spread))
                << NameOf(form) << " from " << first_index << " spread " << spread;
          }
        }
      }
    }
  }
}

// Scales of every power of two: where the short ways of fp8 groups end, and beyond.
TEST_F(UpdatePathsTest, ScalesOfEveryPowerGiveTheBitsOfThePlainLoops) {
  const PathForm form = {
      .split = true, .weight = true, .mean = DType::kF8E4M3, .square = DType::kU8};
  for (int center = -140; center <= 126; ++center) {
    const PathTensor portable = Steps(cpu::SimdPath::kPortable, form, 3, 2, center);
    for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
      if (cpu::RunsHere(path)) {
        EXPECT_EQ(portable, Steps(path, form, 3, 2, center)) << center;
      }
    }
  }
}

// Every form of AdamW has vector loops: with AVX2 it takes less than half of the plain loops' time,
// the least of several tries. Fails where a form falls back to one element at a time.
TEST_F(UpdatePathsTest, Bf16CpuAdamIsVectorised) {
  if (ravel::testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's checks of every load outweigh what vectors save";
  }
  if (!cpu::RunsHere(cpu::SimdPath::kAvx2)) {
    GTEST_SKIP() << "this processor lacks the instructions";
  }
  FillGradients(4);
  const auto least = [&](cpu::SimdPath path, const PathForm& form) {
    cpu::UseSimdPath(path);
    PathTensor tensor;
    double ms = std::numeric_limits<double>::infinity();
    for (int attempt = 0; attempt < 5; ++attempt) {
      const double start = ravel::testing::ThreadCpuMs();
      for (uint32_t step = 0; step < 40; ++step) {
        Run(form, 0, step, tensor);
      }
      ms = std::min(ms, ravel::testing::ThreadCpuMs() - start);
    }
    cpu::UseBestSimdPath();
    return ms;
  };
  for (const PathForm& form : AllForms()) {
    const double plain = least(cpu::SimdPath::kPortable, form);
    const double vector = least(cpu::SimdPath::kAvx2, form);
    EXPECT_LT(vector, plain / 2) << NameOf(form);
  }
}

}  // namespace
}  // namespace ravel::kernels
