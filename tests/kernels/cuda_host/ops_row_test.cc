// What ops over rows ask of a device: kernel, variant, grid, arguments.

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "tests/kernels/cuda_host/recording_stream.h"
#include "tests/kernels/cuda_host/views.h"

namespace ravel::kernels::cuda::testing {
namespace {

TEST(CudaRmsNorm, AlignedRowsUseVectorsAndStayInRegisters) {
  RecordingStream stream;
  Memory memory;
  RmsNormForward(stream,
                 {.x = memory.Matrix(8192, 4096, DType::kBF16),
                  .residual = memory.Matrix(8192, 4096, DType::kBF16),
                  .w = memory.Vector(4096, DType::kBF16),
                  .sum = memory.Matrix(8192, 4096, DType::kBF16),
                  .y = memory.Matrix(8192, 4096, DType::kBF16),
                  .rstd = memory.Vector(8192)});
  ASSERT_EQ(stream.launches.size(), 1u);
  const LaunchShape& shape = stream.launches[0].shape;
  EXPECT_EQ(shape.kernel, Kernel::kRmsNormForward);
  EXPECT_EQ(shape.variant, kBf16Vector);
  EXPECT_EQ(shape.block, 128u);  // 512 accesses of 8, four per thread
  EXPECT_EQ(shape.grid[0], 132u * 16);
  const auto params = stream.ParamsOf<RmsNormForwardParams>(0);
  EXPECT_EQ(params.rows, 8192);
  EXPECT_EQ(params.columns, 4096);
  EXPECT_NE(params.residual, nullptr);
}

TEST(CudaRmsNorm, OneMisalignedOperandIsEnoughForSingleElements) {
  const auto variant_of = [](int64_t columns, int64_t gap, int64_t offset) {
    RecordingStream stream;
    Memory memory;
    RmsNormForward(stream,
                   {.x = memory.Matrix(4, columns),
                    .residual = {},
                    .w = memory.Vector(columns),
                    .sum = {},
                    .y = memory.Matrix(4, columns, DType::kF32, gap, offset),
                    .rstd = memory.Vector(4)});
    return stream.launches[0].shape.variant;
  };
  EXPECT_EQ(variant_of(64, 0, 0), kF32Vector);
  EXPECT_EQ(variant_of(64, 4, 0), kF32Vector);
  EXPECT_EQ(variant_of(64, 1, 0), kF32Scalar);  // rows begin anywhere
  EXPECT_EQ(variant_of(64, 0, 1), kF32Scalar);  // the first does not
  EXPECT_EQ(variant_of(63, 1, 0), kF32Scalar);  // a ragged end
}

TEST(CudaRmsNorm, NoRowsLaunchNothingAndZeroTheWeightGradient) {
  RecordingStream stream;
  Memory memory;
  const TensorView dw = memory.Vector(16);
  RmsNormBackward(stream,
                  {.dy = memory.Matrix(0, 16),
                   .sum = memory.Matrix(0, 16),
                   .w = memory.Vector(16),
                   .rstd = memory.Vector(0),
                   .dresidual = {},
                   .dx = memory.Matrix(0, 16),
                   .dw = dw});
  EXPECT_TRUE(stream.launches.empty());
  ASSERT_EQ(stream.fills.size(), 1u);
  EXPECT_EQ(stream.fills[0].to, dw.data);
  EXPECT_EQ(stream.fills[0].bytes, 64);
}

TEST(CudaRmsNorm, PartialSumsDependOnRowsAloneAndFitTheScratch) {
  for (const int64_t rows : {1, 255, 256, 8192}) {
    RecordingStream stream;
    Memory memory;
    RmsNormBackward(stream,
                    {.dy = memory.Matrix(rows, 1024),
                     .sum = memory.Matrix(rows, 1024),
                     .w = memory.Vector(1024),
                     .rstd = memory.Vector(rows),
                     .dresidual = {},
                     .dx = memory.Matrix(rows, 1024),
                     .dw = memory.Vector(1024),
                     .dw_output = Output::kAccumulate});
    const int64_t partials = std::min<int64_t>(rows, 256);
    ASSERT_EQ(stream.launches.size(), 2u);
    EXPECT_EQ(stream.launches[0].shape.grid[0], partials);
    EXPECT_EQ(stream.scratch_bytes, std::vector<int64_t>{partials * 1024 * 4});
    const auto sum = stream.ParamsOf<SumPartialsParams>(1);
    EXPECT_EQ(sum.partial_rows, partials);
    EXPECT_EQ(sum.accumulate, 1);
    EXPECT_EQ(sum.partials, stream.ParamsOf<RmsNormBackwardParams>(0).partials);
  }
}

TEST(CudaRmsNorm, FrozenWeightHasNoSumOfPartials) {
  RecordingStream stream;
  Memory memory;
  RmsNormBackward(stream,
                  {.dy = memory.Matrix(3, 8),
                   .sum = memory.Matrix(3, 8),
                   .w = memory.Vector(8),
                   .rstd = memory.Vector(3),
                   .dresidual = {},
                   .dx = memory.Matrix(3, 8),
                   .dw = {}});
  EXPECT_EQ(stream.launches.size(), 1u);
}

TEST(CudaLayerNorm, WeightAndBiasPartialsLieSideBySide) {
  RecordingStream stream;
  Memory memory;
  LayerNormBackward(stream,
                    {.dy = memory.Matrix(1000, 768),
                     .x = memory.Matrix(1000, 768),
                     .w = memory.Vector(768),
                     .mean = memory.Vector(1000),
                     .rstd = memory.Vector(1000),
                     .dresidual = {},
                     .dx = memory.Matrix(1000, 768),
                     .dw = memory.Vector(768),
                     .db = memory.Vector(768)});
  ASSERT_EQ(stream.launches.size(), 3u);
  const auto params = stream.ParamsOf<LayerNormBackwardParams>(0);
  EXPECT_EQ(params.db_partials - params.dw_partials, 256 * 768);
  EXPECT_EQ(stream.scratch_bytes, std::vector<int64_t>{2 * 256 * 768 * 4});
  EXPECT_EQ(stream.ParamsOf<SumPartialsParams>(2).partials, params.db_partials);
}

TEST(CudaHeadNorm, AWarpTakesAHead) {
  RecordingStream stream;
  Memory memory;
  HeadNormBackward(stream,
                   {.dy = memory.Matrix(2, 6 * 128),
                    .x = memory.Matrix(2, 6 * 128),
                    .w = memory.Vector(128),
                    .dx = memory.Matrix(2, 6 * 128),
                    .dw = memory.Vector(128)});
  const auto params = stream.ParamsOf<HeadNormParams>(0);
  EXPECT_EQ(params.heads, 6);
  EXPECT_EQ(stream.launches[0].shape.grid[0], 3u);  // 12 heads, four warps each
  EXPECT_EQ(stream.ParamsOf<SumPartialsParams>(1).partial_rows, 12);
}

TEST(CudaHeadNormDeathTest, HeadsBeyondTheRegistersAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  RecordingStream stream;
  Memory memory;
  const TensorView x = memory.Matrix(1, 512);
  EXPECT_DEATH(HeadNormForward(stream, {.x = x, .w = memory.Vector(512), .y = x}),
               "heads of at most 256");
}

TEST(CudaSwiGlu, WideRowsGoAlongXAndManyRowsAlongY) {
  RecordingStream stream;
  Memory memory;
  SwiGluForward(stream,
                {memory.Matrix(8192, 14336, DType::kBF16),
                 memory.Matrix(8192, 14336, DType::kBF16),
                 memory.Matrix(8192, 14336, DType::kBF16)});
  const LaunchShape& shape = stream.launches[0].shape;
  EXPECT_EQ(shape.variant, kBf16Vector);
  EXPECT_EQ(shape.grid[0], 7u);              // 1792 accesses of a row in blocks of 256
  EXPECT_EQ(shape.grid[1], 132u * 16 / 7u);  // the rest of the device's blocks
}

TEST(CudaGelu, BackwardCarriesEveryStride) {
  RecordingStream stream;
  Memory memory;
  const TensorView x = memory.Matrix(2, 8, DType::kF32, 1);
  const TensorView dy = memory.Matrix(2, 8, DType::kF32, 2);
  const TensorView dx = memory.Matrix(2, 8, DType::kF32, 3);
  GeluBackward(stream, {.x = x, .dy = dy, .dx = dx, .y = {}});
  const auto params = stream.ParamsOf<GeluParams>(0);
  EXPECT_EQ(params.x_stride, 9);
  EXPECT_EQ(params.dy_stride, 10);
  EXPECT_EQ(params.dx_stride, 11);
  EXPECT_EQ(params.y, nullptr);
}

TEST(CudaRope, HalvesOfAHeadDecideOnVectors) {
  const auto variant_of = [](int64_t head_size) {
    RecordingStream stream;
    Memory memory;
    Rope(stream,
         {memory.Matrix(4, 2 * head_size),
          head_size,
          4,
          memory.Matrix(4, head_size / 2),
          memory.Matrix(4, head_size / 2),
          RopeDirection::kBackward});
    EXPECT_EQ(stream.ParamsOf<RopeParams>(0).sign, -1.0f);
    return stream.launches[0].shape.variant;
  };
  EXPECT_EQ(variant_of(64), kF32Vector);
  EXPECT_EQ(variant_of(4), kF32Scalar);  // rows are whole accesses, halves are not
}

TEST(CudaEmbedding, BackwardZeroesStridedTablesAndMixesTypes) {
  RecordingStream stream;
  Memory memory;
  EmbeddingBackward(stream,
                    {.ids = memory.Ids(9),
                     .dout = memory.Matrix(9, 4096, DType::kBF16),
                     .dtable = memory.Matrix(50, 4096, DType::kF32, 8)});
  ASSERT_EQ(stream.launches.size(), 2u);
  EXPECT_EQ(stream.launches[0].shape.kernel, Kernel::kFill);
  EXPECT_EQ(stream.launches[1].shape.variant, kMixedVector);
  EXPECT_EQ(stream.launches[1].shape.grid[0], 9u);
  EXPECT_EQ(stream.launches[1].shape.grid[1], 2u);  // 512 accesses in blocks of 256
}

// Rows 20 to 39 of a vocabulary of 50.
TEST(CudaEmbedding, TablesMayHavePartOfTheVocabulary) {
  RecordingStream stream;
  Memory memory;
  const TableRows rows = {.first = 20, .vocabulary = 50};
  EmbeddingForward(stream,
                   {.ids = memory.Ids(9),
                    .table = memory.Matrix(20, 64, DType::kBF16),
                    .out = memory.Matrix(9, 64, DType::kF32),
                    .rows = rows});
  EmbeddingBackward(stream,
                    {.ids = memory.Ids(9),
                     .dout = memory.Matrix(9, 64, DType::kBF16),
                     .dtable = memory.Matrix(20, 64, DType::kF32),
                     .output = Output::kAccumulate,
                     .rows = rows});
  ASSERT_EQ(stream.launches.size(), 2u);
  EXPECT_EQ(stream.launches[0].shape.variant, kMixedVector);
  const auto forward = stream.ParamsOf<EmbeddingForwardParams>(0);
  EXPECT_EQ(forward.vocabulary, 50);
  EXPECT_EQ(forward.first, 20);
  EXPECT_EQ(forward.rows, 20);
  const auto backward = stream.ParamsOf<EmbeddingBackwardParams>(1);
  EXPECT_EQ(backward.vocabulary, 50);
  EXPECT_EQ(backward.first, 20);
  EXPECT_EQ(backward.rows, 20);
}

TEST(CudaBias, IsATableOfOneRow) {
  RecordingStream stream;
  Memory memory;
  AddBias(stream, {.bias = memory.Vector(8), .y = memory.Matrix(5, 8)});
  const auto params = stream.ParamsOf<AddRowsParams>(0);
  EXPECT_EQ(params.period, 1);
  EXPECT_EQ(params.accumulate, 0);
}

TEST(CudaPositions, GradientWalksTheSequencesOfOnePosition) {
  RecordingStream stream;
  Memory memory;
  PositionGradient(
      stream, {.dx = memory.Matrix(12, 16), .dtable = memory.Matrix(8, 16), .sequence_tokens = 4});
  ASSERT_EQ(stream.launches.size(), 1u);
  EXPECT_EQ(stream.fills.size(), 1u);  // positions without tokens are zero
  EXPECT_EQ(stream.ParamsOf<PositionGradientParams>(0).period, 4);
}

TEST(CudaAdd, FlatRangesOfOneShapeAreOneRow) {
  RecordingStream stream;
  Memory memory;
  AddInPlace(stream, {memory.Vector(1000), memory.Vector(1000)});
  const auto params = stream.ParamsOf<AddInPlaceParams>(0);
  EXPECT_EQ(params.rows, 1);
  EXPECT_EQ(params.columns, 1000);
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
