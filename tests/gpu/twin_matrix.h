#pragma once

// A matrix in memory of the device and its twin on the heap, for tests that compare both backends.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"
#include "tests/gpu/gpu.h"

namespace ravel::kernels::testing {

// A matrix in device memory and on the heap, for the CPU: its first element `offset` elements from
// where memory begins, rows `gap` elements apart.
class TwinMatrix {
 public:
  TwinMatrix(DType dtype, int64_t rows, int64_t columns, int64_t gap = 0, int64_t offset = 0)
      : view_{.dtype = dtype, .rank = 2, .size = {rows, columns}, .row_stride = columns + gap},
        offset_bytes_(offset * DTypeBytes(dtype)),
        mirror_(offset_bytes_ + rows * (columns + gap) * DTypeBytes(dtype)),
        heap_(Size(mirror_.bytes()), char{0x11}) {}

  TensorView host() { return On(heap_.data()); }
  TensorView device() { return On(mirror_.device()); }
  // The heap's elements become those of the device.
  void Send() {
    mirror_.Receive(0);
    std::copy(heap_.begin(), heap_.end(), static_cast<char*>(mirror_.host()));
    mirror_.Send();
  }
  bool Same() {
    mirror_.Receive();
    return std::equal(heap_.begin(), heap_.end(), static_cast<const char*>(mirror_.host()));
  }
  TensorView Result() {
    mirror_.Receive();
    return On(mirror_.host());
  }

 private:
  TensorView On(void* memory) {
    TensorView view = view_;
    view.data = static_cast<char*>(memory) + offset_bytes_;
    return view;
  }
  TensorView view_;
  int64_t offset_bytes_;
  Mirror mirror_;
  std::vector<char> heap_;
};

// Fixture of what is compared with the CPU.
class GpuQuantizeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
  }
  CudaStream& gpu() { return *TheGpu().stream; }

  // Values over many powers of two, some zeros, and `bad` in one place.
  static void Fill(TwinMatrix& matrix, uint64_t seed, float bad = 0) {
    std::mt19937_64 random(seed + InputSeed());
    std::normal_distribution<float> normal;
    const TensorView to = matrix.host();
    for (int64_t row = 0; row < to.size[0]; ++row) {
      for (int64_t column = 0; column < to.size[1]; ++column) {
        const bool here = row == to.size[0] / 2 && column == to.size[1] / 3;
        const float power = std::exp2(3.0f * normal(random));
        const float value = random() % 17 == 0 ? 0.0f : normal(random) * power;
        const float x = here && bad != 0 ? bad : value;
        if (to.dtype == DType::kBF16) {
          to.Row<uint16_t>(row)[column] = FloatToBf16(x);
        } else {
          to.Row<float>(row)[column] = x;
        }
      }
    }
    matrix.Send();
  }
  template <typename T>
  static void Set(TwinMatrix& word, T value) {
    *word.host().As<T>() = value;
    word.Send();
  }

  CpuStream cpu_;
};

}  // namespace ravel::kernels::testing
