// Tests the calls of gemms, the loss and attention to a device.

#include <cmath>

#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "tests/kernels/cuda_host/recording_stream.h"
#include "tests/kernels/cuda_host/views.h"

namespace ravel::kernels::cuda::testing {
namespace {

TEST(CudaGemm, DescribesTheGemmToTheLibrary) {
  RecordingStream stream;
  Memory memory;
  const TensorView a = memory.Matrix(100, 30, DType::kBF16, 2);
  const TensorView b = memory.Matrix(100, 50, DType::kBF16, 0, 1);
  const TensorView c = memory.Matrix(30, 50);
  Gemm(stream,
       {.a = a, .transpose_a = Transpose::kYes, .b = b, .c = c, .output = Output::kAccumulate});
  ASSERT_EQ(stream.gemms.size(), 1u);
  EXPECT_TRUE(stream.launches.empty());
  const RavelCudaGemm& gemm = stream.gemms[0].gemm;
  EXPECT_EQ(gemm.m, 30);
  EXPECT_EQ(gemm.n, 50);
  EXPECT_EQ(gemm.k, 100);
  EXPECT_EQ(gemm.a_stride, 32);
  EXPECT_EQ(gemm.transpose_a, 1);
  EXPECT_EQ(gemm.transpose_b, 0);
  EXPECT_EQ(gemm.input_type, static_cast<int32_t>(DType::kBF16));
  EXPECT_EQ(gemm.output_type, static_cast<int32_t>(DType::kF32));
  EXPECT_EQ(gemm.accumulate, 1);
  EXPECT_EQ(gemm.a_align, 64);  // rows of 64 bytes
  EXPECT_EQ(gemm.b_align, 2);   // begins two bytes off
  EXPECT_EQ(gemm.c_align, 8);   // rows of 200 bytes
}

TEST(CudaGemm, FallbackReadsTransposedOperandsByTheirStrides) {
  RecordingStream stream;
  stream.has_cublas = false;
  Memory memory;
  Gemm(stream,
       {.a = memory.Matrix(130, 8),
        .b = memory.Matrix(65, 8, DType::kF32, 3),
        .transpose_b = Transpose::kYes,
        .c = memory.Matrix(130, 65)});
  ASSERT_EQ(stream.launches.size(), 1u);
  EXPECT_EQ(stream.launches[0].shape.grid[0], 2u);
  EXPECT_EQ(stream.launches[0].shape.grid[1], 3u);
  const auto params = stream.ParamsOf<GemmParams>(0);
  EXPECT_EQ(params.a_row, 8);
  EXPECT_EQ(params.a_column, 1);
  EXPECT_EQ(params.b_row, 1);
  EXPECT_EQ(params.b_column, 11);
}

TEST(CudaGemm, OfFp16HasItsTypeAndItsOwnKernels) {
  Memory memory;
  for (const bool cublas : {true, false}) {
    RecordingStream stream;
    stream.has_cublas = cublas;
    for (const DType result : {DType::kF16, DType::kF32}) {
      Gemm(stream,
           {.a = memory.Matrix(30, 8, DType::kF16),
            .b = memory.Matrix(8, 20, DType::kF16),
            .c = memory.Matrix(30, 20, result)});
    }
    if (cublas) {
      EXPECT_EQ(stream.gemms[0].gemm.input_type, static_cast<int32_t>(DType::kF16));
      EXPECT_EQ(stream.gemms[0].gemm.output_type, static_cast<int32_t>(DType::kF16));
      EXPECT_EQ(stream.gemms[1].gemm.output_type, static_cast<int32_t>(DType::kF32));
    } else {
      EXPECT_EQ(stream.launches[0].shape.variant, kFp16Scalar);
      EXPECT_EQ(stream.launches[1].shape.variant, kFp16MixedScalar);
    }
  }
}

TEST(CudaGemm, ScaledSumsTakeTheOwnKernel) {
  RecordingStream stream;
  Memory memory;
  const TensorView scale = memory.Vector(1);
  Gemm(stream,
       {.a = memory.Matrix(30, 8, DType::kBF16),
        .b = memory.Matrix(8, 20, DType::kBF16),
        .c = memory.Matrix(30, 20),
        .scale_b = scale});
  EXPECT_TRUE(stream.gemms.empty());
  ASSERT_EQ(stream.launches.size(), 1u);
  const auto params = stream.ParamsOf<GemmParams>(0);
  EXPECT_EQ(params.scale_a, nullptr);
  EXPECT_EQ(params.scale_b, scale.data);
}

// The factors of packed codes are made first; strides are told in codes.
TEST(CudaGemm, PackedCodesTakeTheirFactorsFromTheDevice) {
  RecordingStream stream;
  Memory memory;
  const TensorView whole_a = memory.Vector(1);
  const TensorView whole_b = memory.Vector(1);
  const TensorView factors = memory.Vector(2);
  const auto scales = [&](int64_t outer) {
    return memory.Vector(ScaleBytes(ScaleForm::kBlocks16, outer, 64), DType::kU8);
  };
  Gemm(stream,
       {.a = memory.Matrix(48, 32, DType::kU8, 16),
        .b = memory.Matrix(80, 32, DType::kU8),
        .transpose_b = Transpose::kYes,
        .c = memory.Matrix(48, 80),
        .output = Output::kAccumulate,
        .scale_a = scales(48),
        .scale_b = scales(80),
        .form_a = ScaleForm::kBlocks16,
        .form_b = ScaleForm::kBlocks16,
        .whole_a = whole_a,
        .whole_b = whole_b,
        .factors = factors});
  ASSERT_EQ(stream.launches.size(), 1u);
  const auto params = stream.ParamsOf<GemmFactorsParams>(0);
  EXPECT_EQ(params.a, whole_a.data);
  EXPECT_EQ(params.b, whole_b.data);
  EXPECT_EQ(params.to, factors.data);
  EXPECT_EQ(params.beta, 1.0f);
  ASSERT_EQ(stream.gemms.size(), 1u);
  const RavelCudaGemm& gemm = stream.gemms[0].gemm;
  EXPECT_EQ(gemm.k, 64);
  EXPECT_EQ(gemm.a_stride, 96);
  EXPECT_EQ(gemm.b_stride, 64);
  EXPECT_EQ(gemm.a_align, 16);  // rows of 48 bytes
  EXPECT_EQ(gemm.b_align, 32);
  EXPECT_EQ(gemm.input_type, static_cast<int32_t>(DType::kU8));
  EXPECT_EQ(gemm.b_type, static_cast<int32_t>(DType::kU8));
}

TEST(CudaGemm, EmptySumsAreZerosOrNothing) {
  RecordingStream stream;
  Memory memory;
  const TensorView a = memory.Matrix(4, 0);
  const TensorView b = memory.Matrix(0, 5);
  Gemm(stream, {.a = a, .b = b, .c = memory.Matrix(4, 5)});
  EXPECT_EQ(stream.fills.size(), 1u);
  Gemm(stream, {.a = a, .b = b, .c = memory.Matrix(4, 5), .output = Output::kAccumulate});
  Gemm(stream, {.a = memory.Matrix(0, 4), .b = memory.Matrix(4, 5), .c = memory.Matrix(0, 5)});
  EXPECT_EQ(stream.fills.size(), 1u);
  EXPECT_TRUE(stream.launches.empty() && stream.gemms.empty());
}

TEST(CudaGemmDeathTest, NarrowResultsOfWideOperandsAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  RecordingStream stream;
  Memory memory;
  EXPECT_DEATH(Gemm(stream,
                    {.a = memory.Matrix(2, 2),
                     .b = memory.Matrix(2, 2),
                     .c = memory.Matrix(2, 2, DType::kBF16)}),
               "a product is fp32, or of the type of its factors");
}

TEST(CudaLoss, TheScaleIsANumberOrLiesInMemoryOfTheDevice) {
  RecordingStream stream;
  Memory memory;
  const TensorView scale = memory.Vector(1);
  LinearCrossEntropyTrainArgs args = {.x = memory.Matrix(5, 64, DType::kF16),
                                      .w = memory.Matrix(10, 64, DType::kF16),
                                      .targets = memory.Ids(5),
                                      .loss = memory.Vector(5),
                                      .dx = memory.Matrix(5, 64, DType::kF16),
                                      .dw = {},
                                      .workspace = memory.Matrix(5, 10, DType::kF16),
                                      .loss_scale = 8.0f};
  LinearCrossEntropyTrain(stream, args);
  args.loss_scale = 1.0f;
  args.device_loss_scale = scale.As<float>();
  LinearCrossEntropyTrain(stream, args);
  EXPECT_EQ(stream.ParamsOf<CrossEntropyParams>(0).loss_scale, 8.0f);
  EXPECT_EQ(stream.ParamsOf<CrossEntropyParams>(0).device_loss_scale, nullptr);
  EXPECT_EQ(stream.ParamsOf<CrossEntropyParams>(1).device_loss_scale, scale.data);
}

TEST(CudaLoss, ChunksHaveTheRowsOfTheWorkspace) {
  RecordingStream stream;
  Memory memory;
  const TensorView x = memory.Matrix(5000, 64, DType::kBF16);
  LinearCrossEntropyTrain(stream,
                          {.x = x,
                           .w = memory.Matrix(1024, 64, DType::kBF16),
                           .targets = memory.Ids(5000),
                           .loss = memory.Vector(5000),
                           .dx = x,
                           .dw = memory.Matrix(1024, 64),
                           .workspace = memory.Matrix(2048, 1024, DType::kBF16)});
  ASSERT_EQ(stream.launches.size(), 3u);
  ASSERT_EQ(stream.gemms.size(), 9u);
  EXPECT_EQ(stream.ParamsOf<CrossEntropyParams>(2).tokens, 5000 - 2 * 2048);
  EXPECT_EQ(stream.gemms[8].gemm.m, 5000 - 2 * 2048);
  // The weight gradient comes before dx, which may be the memory of x; the first one overwrites.
  EXPECT_EQ(stream.gemms[1].gemm.transpose_a, 1);
  EXPECT_EQ(stream.gemms[1].gemm.accumulate, 0);
  EXPECT_EQ(stream.gemms[4].gemm.accumulate, 1);
  EXPECT_EQ(stream.gemms[5].c, x.As<char>() + 2048 * 64 * 2);
}

TEST(CudaLoss, FrozenHeadHasNoWeightGradient) {
  RecordingStream stream;
  Memory memory;
  LinearCrossEntropyTrain(stream,
                          {.x = memory.Matrix(8, 16),
                           .w = memory.Matrix(32, 16),
                           .targets = memory.Ids(8),
                           .loss = memory.Vector(8),
                           .dx = memory.Matrix(8, 16),
                           .dw = {},
                           .workspace = memory.Matrix(8, 32)});
  EXPECT_EQ(stream.gemms.size(), 2u);
}

AttentionForwardArgs Attention(Memory& memory, int64_t tokens, const AttentionShape& shape) {
  return {.shape = shape,
          .q = memory.Matrix(tokens, shape.query_heads * shape.head_size),
          .k = memory.Matrix(tokens, shape.kv_heads * shape.head_size),
          .v = memory.Matrix(tokens, shape.kv_heads * shape.head_size),
          .out = memory.Matrix(tokens, shape.query_heads * shape.head_size),
          .log_sum_exp = memory.Matrix(shape.StatisticRows(tokens), shape.sequence_tokens),
          .workspace = {}};
}

TEST(CudaAttention, GridIsTilesByHeadsBySequences) {
  RecordingStream stream;
  Memory memory;
  const AttentionShape shape = {
      .sequence_tokens = 100, .query_heads = 8, .kv_heads = 2, .head_size = 80, .scale = 0.5f};
  const AttentionForwardArgs forward = Attention(memory, 300, shape);
  AttentionForward(stream, forward);
  AttentionBackward(stream,
                    {.shape = shape,
                     .q = forward.q,
                     .k = forward.k,
                     .v = forward.v,
                     .out = forward.out,
                     .log_sum_exp = forward.log_sum_exp,
                     .dout = memory.Matrix(300, 640),
                     .dq = memory.Matrix(300, 640),
                     .dk = memory.Matrix(300, 160),
                     .dv = memory.Matrix(300, 160),
                     .workspace = {}});
  ASSERT_EQ(stream.launches.size(), 3u);
  using Grid = std::array<uint32_t, 3>;
  EXPECT_EQ(stream.launches[0].shape.grid, (Grid{4, 8, 3}));
  EXPECT_EQ(stream.launches[1].shape.grid, (Grid{4, 2, 3}));  // keys and values: by key head
  EXPECT_EQ(stream.launches[2].shape.grid, (Grid{4, 8, 3}));
  for (const RecordingStream::Record& launch : stream.launches) {
    EXPECT_EQ(launch.shape.variant, 2);  // heads of up to 128
  }
}

TEST(CudaAttention, SharedMemoryFitsTheSmallestDeviceItIsBuiltFor) {
  for (const Kernel kernel : {Kernel::kAttentionForward,
                              Kernel::kAttentionBackwardKeys,
                              Kernel::kAttentionBackwardQueries}) {
    for (const int32_t head : {32, 64, 128, 256}) {
      EXPECT_LE(AttentionSharedBytes(kernel, head), 227u * 1024) << head;
    }
  }
}

TEST(CudaAttention, NoTokensLaunchNothing) {
  RecordingStream stream;
  Memory memory;
  AttentionForward(
      stream,
      Attention(
          memory,
          0,
          {.sequence_tokens = 4, .query_heads = 2, .kv_heads = 1, .head_size = 8, .scale = 1.0f}));
  EXPECT_TRUE(stream.launches.empty());
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
