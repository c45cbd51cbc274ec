// kernels/cuda/functions_cublas_lt.cc over a cuBLASLt that computes what its descriptors say: which
// operand has which type, layout and scale.

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cublasLt.h>

#include "common/dtype.h"
#include "common/gemm_scales.h"
#include "kernels/cuda/functions.h"
#include "kernels/scalar/float4.h"
#include "kernels/scalar/float8.h"

namespace ravel::kernels::cuda {

// Of the rest of the library.
int32_t Fail(std::string text) {
  ADD_FAILURE() << text;
  return kOtherError;
}

namespace {

constexpr int32_t kF32 = static_cast<int32_t>(DType::kF32);
constexpr int32_t kFp16 = static_cast<int32_t>(DType::kF16);
constexpr int32_t kBf16 = static_cast<int32_t>(DType::kBF16);
constexpr int32_t kPackedE2M1 = static_cast<int32_t>(DType::kU8);
constexpr int32_t kE4M3 = static_cast<int32_t>(DType::kF8E4M3);
constexpr int32_t kE5M2 = static_cast<int32_t>(DType::kF8E5M2);

float ValueOf(int32_t type, uint8_t code) {
  return type == kE5M2 ? scalar::E5M2::ValueOfCode(code) : scalar::E4M3::ValueOfCode(code);
}

// a [m, k] and b [n, k], as gemms of codes have them.
struct CodesGemm {
  CodesGemm(int32_t a_type, int32_t b_type, int32_t output) {
    gemm.m = 32;
    gemm.n = 48;
    gemm.k = 64;
    gemm.a_stride = 80;
    gemm.b_stride = 64;
    gemm.c_stride = 64;
    gemm.transpose_b = 1;
    gemm.input_type = a_type;
    gemm.b_type = b_type;
    gemm.output_type = output;
    gemm.a_align = gemm.b_align = gemm.c_align = 16;
  }
  int32_t Candidates() {
    int32_t count = -1;
    RavelCudaAlgorithm algorithm = {};
    EXPECT_EQ(GemmCandidates(0, &gemm, 0, &algorithm, 1, &count), 0);
    return count;
  }
  RavelCudaGemm gemm = {};
};

class CublasLtTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("RAVEL_CUBLASLT_LIBRARY", RAVEL_FAKE_CUBLASLT_LIBRARY, 1); }

  // Codes of small integers, so that sums are exact.
  std::vector<uint8_t> Codes(int32_t type, int64_t count) {
    std::vector<uint8_t> codes(static_cast<size_t>(count));
    for (uint8_t& code : codes) {
      const auto value = static_cast<float>(static_cast<int>(random_() % 9) - 4);
      code = static_cast<uint8_t>(type == kE5M2 ? scalar::E5M2::NearestCode(value)
                                                : scalar::E4M3::NearestCode(value));
    }
    return codes;
  }

  void Compare(CodesGemm& of) {
    const RavelCudaGemm& gemm = of.gemm;
    ASSERT_EQ(of.Candidates(), 1);
    const std::vector<uint8_t> a = Codes(gemm.input_type, gemm.m * gemm.a_stride);
    const std::vector<uint8_t> b = Codes(gemm.b_type, gemm.n * gemm.b_stride);
    std::vector<float> wide(static_cast<size_t>(gemm.m * gemm.c_stride), 0.5f);
    std::vector<uint16_t> narrow(wide.size(), FloatToBf16(0.5f));
    const float scale_a = 0.25f;
    const float scale_b = 2.0f;
    const bool bf16 = gemm.output_type == kBf16;
    const RavelCudaGemmBuffers buffers = {
        .a = a.data(),
        .b = b.data(),
        .c = bf16 ? static_cast<void*>(narrow.data()) : static_cast<void*>(wide.data()),
        .workspace = nullptr,
        .workspace_bytes = 0,
        .scale_a = &scale_a,
        .scale_b = &scale_b,
        .factors = nullptr};
    StreamHandle stream = {.device = 0, .stream = nullptr};
    const RavelCudaAlgorithm algorithm = {};
    ASSERT_EQ(GemmRun(&stream, &gemm, &algorithm, &buffers), 0);
    for (int64_t row = 0; row < gemm.m; ++row) {
      for (int64_t column = 0; column < gemm.n; ++column) {
        float sum = 0;
        for (int64_t i = 0; i < gemm.k; ++i) {
          sum += ValueOf(gemm.input_type, a[static_cast<size_t>(row * gemm.a_stride + i)]) *
                 ValueOf(gemm.b_type, b[static_cast<size_t>(column * gemm.b_stride + i)]);
        }
        const float expected = 0.5f * sum + (gemm.accumulate != 0 ? 0.5f : 0.0f);
        const auto at = static_cast<size_t>(row * gemm.c_stride + column);
        ASSERT_EQ(bf16 ? Bf16ToFloat(narrow[at]) : wide[at],
                  bf16 ? Bf16ToFloat(FloatToBf16(expected)) : expected)
            << row << ", " << column;
      }
    }
  }

  // Scales of an operand's blocks, by row and block, and the memory where they lie in a form.
  struct Scales {
    float At(int64_t row, int64_t i) const {
      const int64_t codes = CodesOfScale(form);
      const int64_t of_row = form == ScaleForm::kSquares128 ? row / 128 : row;
      return values[static_cast<size_t>(of_row * blocks + i / codes)];
    }
    ScaleForm form;
    int64_t blocks;
    std::vector<float> values;
    std::vector<uint8_t> bytes;
  };
  Scales MakeScales(ScaleForm form, int64_t outer, int64_t inner) {
    Scales scales = {.form = form, .blocks = ScaleBlocks(form, inner), .values = {}, .bytes = {}};
    scales.bytes.resize(static_cast<size_t>(ScaleBytes(form, outer, inner)));
    const int64_t rows = form == ScaleForm::kSquares128 ? (outer + 127) / 128 : outer;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < scales.blocks; ++block) {
        const int exponent = static_cast<int>(random_() % 5) - 2;
        const float value = std::ldexp(1.0f, exponent);
        scales.values.push_back(value);
        const int64_t of = form == ScaleForm::kSquares128 ? row * 128 : row;
        const int64_t index = ScaleIndex(form, of, block, outer, scales.blocks);
        if (form == ScaleForm::kBlocks16) {
          scales.bytes[static_cast<size_t>(index)] =
              static_cast<uint8_t>(scalar::E4M3::NearestCode(value));
        } else if (form == ScaleForm::kBlocks32) {
          scales.bytes[static_cast<size_t>(index)] = static_cast<uint8_t>(127 + exponent);
        } else {
          std::memcpy(scales.bytes.data() + index * 4, &value, sizeof(value));
        }
      }
    }
    return scales;
  }

  // The same for codes with a scale for each block.
  void CompareBlocks(ScaleForm a_form, ScaleForm b_form) {
    CodesGemm of(kE4M3, kE4M3, kF32);
    RavelCudaGemm& gemm = of.gemm;
    gemm.m = 144;
    gemm.n = 160;
    gemm.k = gemm.a_stride = gemm.b_stride = 288;
    gemm.c_stride = 160;
    gemm.a_form = static_cast<int32_t>(a_form);
    gemm.b_form = static_cast<int32_t>(b_form);
    ASSERT_EQ(of.Candidates(), 1);
    const std::vector<uint8_t> a = Codes(kE4M3, gemm.m * gemm.k);
    const std::vector<uint8_t> b = Codes(kE4M3, gemm.n * gemm.k);
    const Scales a_scales = MakeScales(a_form, gemm.m, gemm.k);
    const Scales b_scales = MakeScales(b_form, gemm.n, gemm.k);
    std::vector<float> c(static_cast<size_t>(gemm.m * gemm.n));
    const RavelCudaGemmBuffers buffers = {.a = a.data(),
                                          .b = b.data(),
                                          .c = c.data(),
                                          .workspace = nullptr,
                                          .workspace_bytes = 0,
                                          .scale_a = a_scales.bytes.data(),
                                          .scale_b = b_scales.bytes.data(),
                                          .factors = nullptr};
    StreamHandle stream = {.device = 0, .stream = nullptr};
    const RavelCudaAlgorithm algorithm = {};
    ASSERT_EQ(GemmRun(&stream, &gemm, &algorithm, &buffers), 0);
    for (int64_t row = 0; row < gemm.m; ++row) {
      for (int64_t column = 0; column < gemm.n; ++column) {
        float sum = 0;
        for (int64_t i = 0; i < gemm.k; ++i) {
          sum += ValueOf(kE4M3, a[static_cast<size_t>(row * gemm.k + i)]) * a_scales.At(row, i) *
                 ValueOf(kE4M3, b[static_cast<size_t>(column * gemm.k + i)]) *
                 b_scales.At(column, i);
        }
        ASSERT_EQ(c[static_cast<size_t>(row * gemm.n + column)], sum) << row << ", " << column;
      }
    }
  }

  // Packed codes: factors[0] * (the sum of products) + factors[1] * c, both read from memory.
  void ComparePacked(int32_t output, int32_t accumulate) {
    CodesGemm of(kPackedE2M1, kPackedE2M1, output);
    RavelCudaGemm& gemm = of.gemm;
    gemm.m = 144;
    gemm.n = 160;
    gemm.k = 288;
    gemm.a_stride = 320;
    gemm.b_stride = 288;
    gemm.c_stride = 160;
    gemm.accumulate = accumulate;
    gemm.a_form = gemm.b_form = static_cast<int32_t>(ScaleForm::kBlocks16);
    ASSERT_EQ(of.Candidates(), 1);
    const auto bytes = [&](int64_t count) {
      std::vector<uint8_t> codes(static_cast<size_t>(count));
      for (uint8_t& code : codes) {
        code = static_cast<uint8_t>(random_());
      }
      return codes;
    };
    const std::vector<uint8_t> a = bytes(gemm.m * gemm.a_stride / 2);
    const std::vector<uint8_t> b = bytes(gemm.n * gemm.b_stride / 2);
    const auto value = [](const std::vector<uint8_t>& codes, int64_t at) {
      const uint32_t byte = codes[static_cast<size_t>(at / 2)];
      return scalar::E2M1Value(at % 2 == 0 ? byte % 16 : byte / 16);
    };
    const Scales a_scales = MakeScales(ScaleForm::kBlocks16, gemm.m, gemm.k);
    const Scales b_scales = MakeScales(ScaleForm::kBlocks16, gemm.n, gemm.k);
    const float factors[] = {0.25f, accumulate != 0 ? 1.0f : 0.0f};
    std::vector<float> wide(static_cast<size_t>(gemm.m * gemm.n), 0.5f);
    std::vector<uint16_t> narrow(wide.size(), FloatToBf16(0.5f));
    const bool bf16 = output == kBf16;
    const RavelCudaGemmBuffers buffers = {
        .a = a.data(),
        .b = b.data(),
        .c = bf16 ? static_cast<void*>(narrow.data()) : static_cast<void*>(wide.data()),
        .workspace = nullptr,
        .workspace_bytes = 0,
        .scale_a = a_scales.bytes.data(),
        .scale_b = b_scales.bytes.data(),
        .factors = factors};
    StreamHandle stream = {.device = 0, .stream = nullptr};
    const RavelCudaAlgorithm algorithm = {};
    ASSERT_EQ(GemmRun(&stream, &gemm, &algorithm, &buffers), 0);
    for (int64_t row = 0; row < gemm.m; ++row) {
      for (int64_t column = 0; column < gemm.n; ++column) {
        float sum = 0;
        for (int64_t i = 0; i < gemm.k; ++i) {
          sum += value(a, row * gemm.a_stride + i) * a_scales.At(row, i) *
                 value(b, column * gemm.b_stride + i) * b_scales.At(column, i);
        }
        const float expected = 0.25f * sum + (accumulate != 0 ? 0.5f : 0.0f);
        const auto at = static_cast<size_t>(row * gemm.n + column);
        ASSERT_EQ(bf16 ? Bf16ToFloat(narrow[at]) : wide[at],
                  bf16 ? Bf16ToFloat(FloatToBf16(expected)) : expected)
            << row << ", " << column;
      }
    }
  }

  static int64_t LastPointerMode() {
    void* library = dlopen(RAVEL_FAKE_CUBLASLT_LIBRARY, RTLD_NOW);
    EXPECT_NE(library, nullptr);
    const auto last =
        reinterpret_cast<int64_t (*)()>(dlsym(library, "FakeCublasLtLastPointerMode"));
    EXPECT_NE(last, nullptr);
    return last();
  }

  std::mt19937 random_{7};
};

TEST_F(CublasLtTest, ScalesOfBlocksLieWhereTheLibraryReadsThem) {
  CompareBlocks(ScaleForm::kBlocks128, ScaleForm::kSquares128);
  CompareBlocks(ScaleForm::kSquares128, ScaleForm::kBlocks128);
  CompareBlocks(ScaleForm::kBlocks128, ScaleForm::kBlocks128);
  CompareBlocks(ScaleForm::kBlocks32, ScaleForm::kBlocks32);
}

TEST_F(CublasLtTest, PackedCodesHaveTheirFactorsInMemoryOfTheDevice) {
  for (const int32_t output : {kF32, kBf16}) {
    for (const int32_t accumulate : {0, 1}) {
      ComparePacked(output, accumulate);
      EXPECT_EQ(LastPointerMode(), CUBLASLT_POINTER_MODE_DEVICE);
    }
  }
  CodesGemm of(kE4M3, kE4M3, kBf16);
  Compare(of);
  EXPECT_EQ(LastPointerMode(), CUBLASLT_POINTER_MODE_HOST);
}

TEST_F(CublasLtTest, GemmsOfCodesHaveATypeAndAScaleForEachOperand) {
  for (const auto& [a, b] : {std::pair(kE4M3, kE4M3), {kE5M2, kE4M3}, {kE4M3, kE5M2}}) {
    for (const int32_t output : {kF32, kBf16}) {
      for (const int32_t accumulate : {0, 1}) {
        CodesGemm of(a, b, output);
        of.gemm.accumulate = accumulate;
        Compare(of);
      }
    }
  }
}

TEST_F(CublasLtTest, SumsAreFastOnlyWhereTheyMayBe) {
  void* library = dlopen(RAVEL_FAKE_CUBLASLT_LIBRARY, RTLD_NOW);
  ASSERT_NE(library, nullptr);
  const auto last = reinterpret_cast<int64_t (*)()>(dlsym(library, "FakeCublasLtLastFast"));
  ASSERT_NE(last, nullptr);
  for (const int32_t fast : {1, 0}) {
    CodesGemm of(kE4M3, kE4M3, kBf16);
    of.gemm.fast_accumulation = fast;
    Compare(of);
    EXPECT_EQ(last(), fast);
  }
}

TEST_F(CublasLtTest, WhatTheLibraryRefusesHasNoCandidates) {
  EXPECT_EQ(CodesGemm(kE5M2, kE5M2, kBf16).Candidates(), 0);
  CodesGemm turned(kE4M3, kE4M3, kBf16);
  turned.gemm.transpose_b = 0;
  turned.gemm.b_stride = 48;
  EXPECT_EQ(turned.Candidates(), 0);
  CodesGemm odd(kE4M3, kE4M3, kBf16);
  odd.gemm.k = 56;
  EXPECT_EQ(odd.Candidates(), 0);
  CodesGemm stride(kE4M3, kE4M3, kBf16);
  stride.gemm.a_stride = 72;
  EXPECT_EQ(stride.Candidates(), 0);
  const auto blocks = [](ScaleForm a, ScaleForm b, int32_t type, int32_t fast) {
    CodesGemm of(type, kE4M3, kBf16);
    of.gemm.a_form = static_cast<int32_t>(a);
    of.gemm.b_form = static_cast<int32_t>(b);
    of.gemm.fast_accumulation = fast;
    return of.Candidates();
  };
  EXPECT_EQ(blocks(ScaleForm::kBlocks128, ScaleForm::kSquares128, kE4M3, 0), 1);
  EXPECT_EQ(blocks(ScaleForm::kSquares128, ScaleForm::kSquares128, kE4M3, 0), 0);
  EXPECT_EQ(blocks(ScaleForm::kBlocks32, ScaleForm::kBlocks128, kE4M3, 0), 0);
  EXPECT_EQ(blocks(ScaleForm::kBlocks128, ScaleForm::kSquares128, kE5M2, 0), 0);
  EXPECT_EQ(blocks(ScaleForm::kBlocks128, ScaleForm::kSquares128, kE4M3, 1), 0);
  const auto packed = [](ScaleForm form, int64_t a_stride, int32_t fast) {
    CodesGemm of(kPackedE2M1, kPackedE2M1, kBf16);
    of.gemm.a_stride = a_stride;
    of.gemm.a_form = of.gemm.b_form = static_cast<int32_t>(form);
    of.gemm.fast_accumulation = fast;
    return of.Candidates();
  };
  EXPECT_EQ(packed(ScaleForm::kBlocks16, 96, 0), 1);
  EXPECT_EQ(packed(ScaleForm::kBlocks16, 80, 0), 0);
  EXPECT_EQ(packed(ScaleForm::kBlocks32, 96, 0), 0);
  EXPECT_EQ(packed(ScaleForm::kBlocks16, 96, 1), 0);
}

// The fake refuses them otherwise.
TEST_F(CublasLtTest, OtherGemmsHaveNoScales) {
  EXPECT_EQ(CodesGemm(kBf16, 0, kF32).Candidates(), 1);
}

TEST_F(CublasLtTest, Fp16OperandsGiveFp16OrFp32) {
  for (const int32_t output : {kFp16, kF32}) {
    RavelCudaGemm gemm = {};
    gemm.m = 2;
    gemm.n = gemm.k = 3;
    gemm.a_stride = gemm.b_stride = gemm.c_stride = 3;
    gemm.transpose_b = 1;
    gemm.input_type = kFp16;
    gemm.output_type = output;
    gemm.a_align = gemm.b_align = gemm.c_align = 2;
    std::vector<uint16_t> a;
    for (int i = 0; i < 9; ++i) {
      a.push_back(FloatToFp16(static_cast<float>(i) / 1024.0f + 1.0f));
    }
    std::vector<uint16_t> narrow(6);
    std::vector<float> wide(6);
    const bool fp16 = output == kFp16;
    const RavelCudaGemmBuffers buffers = {
        .a = a.data(),
        .b = a.data(),
        .c = fp16 ? static_cast<void*>(narrow.data()) : static_cast<void*>(wide.data()),
        .workspace = nullptr,
        .workspace_bytes = 0,
        .scale_a = nullptr,
        .scale_b = nullptr,
        .factors = nullptr};
    StreamHandle stream = {.device = 0, .stream = nullptr};
    const RavelCudaAlgorithm algorithm = {};
    ASSERT_EQ(GemmRun(&stream, &gemm, &algorithm, &buffers), 0);
    for (size_t row = 0; row < 2; ++row) {
      for (size_t column = 0; column < 3; ++column) {
        float sum = 0;
        for (size_t i = 0; i < 3; ++i) {
          sum += Fp16ToFloat(a[3 * row + i]) * Fp16ToFloat(a[3 * column + i]);
        }
        const size_t at = 3 * row + column;
        EXPECT_EQ(fp16 ? Fp16ToFloat(narrow[at]) : wide[at],
                  fp16 ? Fp16ToFloat(FloatToFp16(sum)) : sum);
      }
    }
  }
}

}  // namespace
}  // namespace ravel::kernels::cuda
