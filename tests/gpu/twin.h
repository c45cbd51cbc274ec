#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/tensor_view.h"
#include "kernels/scalar/bfloat16.h"
#include "tests/gpu/gpu.h"

namespace ravel::kernels::testing {

// Elements of one type in device memory and on the heap (for the CPU).
class Twin {
 public:
  Twin(DType dtype, int64_t elements)
      : dtype_(dtype),
        bytes_(elements * DTypeBytes(dtype)),
        mirror_(bytes_),
        heap_(static_cast<size_t>(bytes_)) {}
  static Twin Normal(DType dtype, int64_t elements, uint64_t seed) {
    Twin twin(dtype, elements);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elements; ++i) {
      const float value = normal(random);
      if (dtype == DType::kBF16) {
        twin.host().As<uint16_t>()[i] = FloatToBf16(value);
      } else if (dtype == DType::kF16) {
        twin.host().As<uint16_t>()[i] = FloatToFp16(value);
      } else {
        twin.host().As<float>()[i] = value;
      }
    }
    twin.Send();
    return twin;
  }

  // The heap's elements become those of the device.
  void Send() {
    mirror_.Receive(0);
    std::memcpy(mirror_.host(), heap_.data(), heap_.size());
    mirror_.Send();
  }
  TensorView host(int64_t begin = 0, int64_t end = -1) { return Range(heap_.data(), begin, end); }
  TensorView device(int64_t begin = 0, int64_t end = -1) {
    return Range(static_cast<char*>(mirror_.device()), begin, end);
  }
  // The device's content, as the host reads it.
  TensorView Result() {
    mirror_.Receive();
    return Range(static_cast<char*>(mirror_.host()), 0, -1);
  }
  bool Same() const {
    mirror_.Receive();
    return std::memcmp(mirror_.host(), heap_.data(), heap_.size()) == 0;
  }

 private:
  TensorView Range(char* data, int64_t begin, int64_t end) const {
    const int64_t bytes = DTypeBytes(dtype_);
    return {.data = data + begin * bytes,
            .dtype = dtype_,
            .rank = 1,
            .size = {(end < 0 ? bytes_ / bytes : end) - begin},
            .row_stride = 1};
  }
  DType dtype_;
  int64_t bytes_;
  Mirror mirror_;
  std::vector<char> heap_;
};

// Ops on the device, and on the CPU beside it; skipped, with the reason, where there is no device.
class TwinTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
  }
  CudaStream& gpu() { return *TheGpu().stream; }
  void Finish() { ASSERT_TRUE(gpu().Synchronize().ok()); }
  CpuStream cpu_;
};

}  // namespace ravel::kernels::testing
