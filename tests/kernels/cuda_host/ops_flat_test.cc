// What ops over flat ranges ask of a device.

#include <gtest/gtest.h>

#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/element_update.h"
#include "kernels/grouped_update.h"
#include "kernels/philox.h"
#include "kernels/quantize.h"
#include "kernels/reduce_add.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"
#include "tests/kernels/cuda_host/recording_stream.h"
#include "tests/kernels/cuda_host/views.h"

namespace ravel::kernels::cuda::testing {
namespace {

TEST(CudaAdamW, ScalarsArriveInTheirFields) {
  RecordingStream stream;
  Memory memory;
  UpdateScalars scalars;
  scalars.learning_rate = 0.25f;
  scalars.gradient_scale = 0.5f;
  AdamWUpdate(stream,
              {memory.Vector(1024),
               memory.Vector(1024),
               memory.Vector(1024),
               memory.Vector(1024),
               scalars});
  const auto params = stream.ParamsOf<AdamWParams>(0);
  EXPECT_EQ(params.scalars.beta2, scalars.beta2);
  EXPECT_EQ(params.scalars.learning_rate, 0.25f);
  EXPECT_EQ(params.scalars.gradient_scale, 0.5f);
  EXPECT_EQ(stream.launches[0].shape.variant, kF32Vector);
  EXPECT_EQ(stream.launches[0].shape.grid[0], 1u);
}

// Fails when a call launches once per piece: groups of many small tensors would wait for launches.
TEST(CudaAdamW, ATableOfPiecesIsOneLaunchWithABlockForEach) {
  RecordingStream stream;
  Memory memory;
  const std::vector<UpdatePiece> pieces =
      CutForBlocks({{.offset = 0, .elements = 5000}, {.offset = 6000, .elements = 10}});
  const PieceTable table = {.pieces = pieces.data(), .count = 3};
  const TensorView v = memory.Vector(8192);
  AdamWUpdate(stream, {.p = v, .g = v, .m = v, .v = v, .table = table});
  ElementUpdate(stream, {.main_weight = v, .g = v, .m = v, .v = v, .table = table});
  ASSERT_EQ(stream.launches.size(), 2u);
  for (const auto& launch : stream.launches) {
    EXPECT_EQ(launch.shape.grid[0], 3u);
  }
  EXPECT_EQ(stream.ParamsOf<AdamWParams>(0).pieces.table,
            reinterpret_cast<const DeviceUpdatePiece*>(pieces.data()));
  EXPECT_EQ(stream.ParamsOf<ElementUpdateParams>(1).pieces.count, 3);
}

// However many tensors a job has: there is no table of a fixed size in an argument.
TEST(CudaAdamW, ManyTensorsOneLaunch) {
  constexpr int64_t kTensors = 10'000;
  RecordingStream stream;
  Memory memory;
  std::vector<UpdatePiece> pieces;
  for (int64_t i = 0; i < kTensors; ++i) {
    pieces.push_back({.offset = 256 * i, .elements = 200, .site = static_cast<uint32_t>(i)});
  }
  const PieceTable table = {.pieces = pieces.data(), .count = kTensors};
  const TensorView v = memory.Vector(256 * kTensors);
  AdamWUpdate(stream, {.p = v, .g = v, .m = v, .v = v, .table = table});
  ASSERT_EQ(stream.launches.size(), 1u);
  EXPECT_EQ(stream.ParamsOf<AdamWParams>(0).pieces.count, kTensors);
  GroupedUpdate(stream,
                {.update = {.main_weight = v,
                            .g = v,
                            .m = memory.Vector(256 * kTensors, DType::kF8E4M3),
                            .v = memory.Vector(256 * kTensors, DType::kU8),
                            .table = table},
                 .m_scales = memory.Vector(2 * kTensors, DType::kU8),
                 .v_scales = memory.Vector(2 * kTensors, DType::kU8)});
  ASSERT_EQ(stream.launches.size(), 2u);
  UpdateDelayedScales(stream,
                      {.weight_amax = memory.Matrix(1, kTensors, DType::kU32),
                       .activation_amax = memory.Matrix(kTensors, 2, DType::kU32),
                       .scales = memory.Matrix(3 * kTensors, kDelayedWords),
                       .histories = memory.Matrix(3 * kTensors, 1024)});
  ASSERT_EQ(stream.launches.size(), 3u);
  EXPECT_EQ(stream.launches[2].shape.grid[0], 3u * kTensors);
}

TEST(UpdatePieces, CutForBlocksKeepsElementsAndBeginsAtMultiples) {
  const UpdatePiece whole = {
      .offset = 100, .elements = 3 * kMaxBlockElements, .first_index = 7, .site = 9, .decays = 0};
  const std::vector<UpdatePiece> cut = CutForBlocks({whole, {.offset = 50000, .elements = 0}});
  ASSERT_EQ(cut.size(), 4u);
  int64_t next = 0;
  for (const UpdatePiece& piece : cut) {
    EXPECT_EQ(piece.offset, whole.offset + next);
    EXPECT_EQ(piece.first_index, whole.first_index + next);
    EXPECT_TRUE(next == 0 || piece.offset % kMaxBlockElements == 0);
    EXPECT_LE(piece.elements, kMaxBlockElements);
    EXPECT_EQ(piece.site, 9u);
    EXPECT_EQ(piece.decays, 0u);
    next += piece.elements;
  }
  EXPECT_EQ(next, whole.elements);
}

TEST(UpdatePiecesDeathTest, APieceOutsideItsRangesIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  CpuStream stream;
  std::vector<float> values(8, 1.0f);
  const TensorView v = VectorView(values.data(), 8);
  const UpdatePiece piece = {.offset = 4, .elements = 5};
  EXPECT_DEATH(
      AdamWUpdate(stream,
                  {.p = v, .g = v, .m = v, .v = v, .table = {.pieces = &piece, .count = 1}}),
      "a piece outside its ranges");
}

TEST(CudaMixedAdamW, VariantIsTheTypeOfTheGradientThenOfTheStates) {
  for (const DType gradient : {DType::kF32, DType::kBF16}) {
    for (const DType states : {DType::kF32, DType::kBF16}) {
      RecordingStream stream;
      Memory memory;
      ElementUpdate(stream,
                    {.weight = memory.Vector(10, DType::kBF16),
                     .remainder = memory.Vector(10, DType::kI16),
                     .g = memory.Vector(10, gradient),
                     .m = memory.Vector(10, states),
                     .v = memory.Vector(10, states),
                     .seed = 5,
                     .step = 6,
                     .site = 7,
                     .first_index = 9});
      EXPECT_EQ(stream.launches[0].shape.variant,
                (gradient == DType::kBF16 ? 2 : 0) + (states == DType::kBF16 ? 1 : 0));
      const auto params = stream.ParamsOf<ElementUpdateParams>(0);
      EXPECT_EQ(params.main_weight, nullptr);
      EXPECT_EQ(params.pieces.first_index, 9);
      EXPECT_EQ(params.pieces.site, 7u);
      EXPECT_EQ(params.pieces.count, 1);
    }
  }
}

TEST(CudaMixedAdamWDeathTest, AMainWeightIsOneOfTwoForms) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  RecordingStream stream;
  Memory memory;
  const TensorView v = memory.Vector(4);
  EXPECT_DEATH(ElementUpdate(stream, {.g = v, .m = v, .v = v}), "a main weight is fp32, or");
}

TEST(CudaTreeSum, VariantIsTheLogarithmOfTheCount) {
  for (const size_t count : {1u, 2u, 4u, 64u}) {
    RecordingStream stream;
    Memory memory;
    std::vector<const float*> pieces;
    for (size_t i = 0; i < count; ++i) {
      pieces.push_back(memory.Vector(100).As<float>());
    }
    TreeSum(stream, {pieces, memory.Vector(100)});
    ASSERT_EQ(stream.launches.size(), 1u);
    EXPECT_EQ(size_t{1} << stream.launches[0].shape.variant, count);
    const auto params = stream.ParamsOf<ReduceAddParams>(0);
    EXPECT_EQ(params.pieces[count - 1], pieces.back());
    EXPECT_EQ(params.aligned, 1);
  }
}

TEST(CudaTreeSum, ManyPiecesAreSubtreesThenTheirRoots) {
  RecordingStream stream;
  Memory memory;
  std::vector<const float*> pieces;
  for (size_t i = 0; i < 256; ++i) {
    pieces.push_back(memory.Vector(10).As<float>());
  }
  TreeSum(stream, {pieces, memory.Vector(10)});
  ASSERT_EQ(stream.launches.size(), 5u);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(3).pieces[0], pieces[192]);
  EXPECT_EQ(stream.launches[4].shape.variant, 2);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(4).pieces[1],
            static_cast<const float*>(stream.Scratch(0)) + 12);
}

// 8192 pieces: 128 subtrees, two above them, then the root, in ranges whose roots fit the scratch.
TEST(CudaTreeSum, SubtreesOfSubtreesShareTheScratchInRanges) {
  RecordingStream stream;
  Memory memory;
  constexpr int64_t kElements = 200'000;
  const TensorView piece = memory.Vector(kElements);
  const std::vector<const float*> pieces(8192, piece.As<float>());
  const TensorView out = memory.Vector(kElements);
  TreeSum(stream, {pieces, out});
  constexpr int64_t kRange = kScratchBytes / 4 / 130 / 4 * 4;
  ASSERT_EQ(stream.launches.size(), 2u * (128 + 2 + 1));
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(130).out, out.As<float>());
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(130).elements, kRange);
  EXPECT_EQ(stream.launches[130].shape.variant, 1);
  const auto above = stream.ParamsOf<ReduceAddParams>(128);
  // As numbers: the scratch of a stream that only records is no array.
  const auto scratch = reinterpret_cast<uintptr_t>(stream.Scratch(0));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(above.pieces[1]), scratch + 4 * kRange);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(above.out), scratch + 4 * 128 * kRange);
  const auto second = stream.ParamsOf<ReduceAddParams>(131);
  EXPECT_EQ(second.pieces[0], piece.As<float>() + kRange);
  EXPECT_EQ(second.elements, kElements - kRange);
}

TEST(CudaReduceAdd, ManyPiecesAreAddedToWhatIsThere) {
  RecordingStream stream;
  Memory memory;
  const std::vector<const float*> pieces(128, memory.Vector(10).As<float>());
  const TensorView out = memory.Vector(10);
  ReduceAdd(stream, {.pieces = pieces, .out = out, .output = Output::kAccumulate});
  ASSERT_EQ(stream.launches.size(), 3u);
  EXPECT_EQ(stream.launches[2].shape.kernel, Kernel::kReduceAdd);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(2).accumulate, 1);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(2).out, out.As<float>());
}

// Subtrees read bf16, the rest their roots in fp32.
TEST(CudaReduceAdd, Bf16PiecesHaveVariantsOfTheirOwn) {
  RecordingStream stream;
  Memory memory;
  const TensorView piece = memory.Vector(10, DType::kBF16);
  const TensorView out = memory.Vector(10);
  ReduceAdd(stream, {.rounded_pieces = {piece.As<uint16_t>(), piece.As<uint16_t>()}, .out = out});
  ASSERT_EQ(stream.launches.size(), 1u);
  EXPECT_EQ(stream.launches[0].shape.kernel, Kernel::kReduceAdd);
  EXPECT_EQ(stream.launches[0].shape.variant, kBf16Sums + 1);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(0).accumulate, 0);
  const std::vector<const uint16_t*> many(128, piece.As<uint16_t>());
  ReduceAdd(stream, {.rounded_pieces = many, .out = out, .output = Output::kAccumulate});
  ASSERT_EQ(stream.launches.size(), 4u);
  EXPECT_EQ(stream.launches[1].shape.kernel, Kernel::kTreeSum);
  EXPECT_EQ(stream.launches[2].shape.variant, kBf16Sums + 6);
  EXPECT_EQ(stream.launches[3].shape.variant, 1);
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(3).accumulate, 1);
}

TEST(CudaTreeSum, OneMisalignedPieceStopsVectors) {
  RecordingStream stream;
  Memory memory;
  TreeSum(stream,
          {{memory.Vector(8).As<float>(), memory.Vector(8, DType::kF32, 1).As<float>()},
           memory.Vector(8)});
  EXPECT_EQ(stream.ParamsOf<ReduceAddParams>(0).aligned, 0);
}

TEST(CudaReduceAdd, BlocksDependOnTheLengthAlone) {
  const auto grid_of = [](int64_t n) {
    RecordingStream stream;
    Memory memory;
    double squares = 0;
    ReduceAdd(stream,
              {.pieces = {memory.Vector(n).As<float>()},
               .out = memory.Vector(n),
               .squared_norm = &squares});
    EXPECT_EQ(stream.launches[1].shape.kernel, Kernel::kSumDoubles);
    EXPECT_EQ(stream.ParamsOf<SumDoublesParams>(1).count, stream.launches[0].shape.grid[0]);
    return stream.launches[0].shape.grid[0];
  };
  EXPECT_EQ(grid_of(1), 1u);
  EXPECT_EQ(grid_of(1025), 2u);
  EXPECT_EQ(grid_of(1 << 26), 1024u);
}

TEST(CudaReduceAdd, EmptyRangeHasTheNormZero) {
  RecordingStream stream;
  Memory memory;
  double squares = 1;
  ReduceAdd(stream,
            {.pieces = {memory.Vector(0).As<float>()},
             .out = memory.Vector(0),
             .squared_norm = &squares});
  EXPECT_TRUE(stream.launches.empty());
  ASSERT_EQ(stream.fills.size(), 1u);
  EXPECT_EQ(stream.fills[0].to, &squares);
}

TEST(CudaRowSums, AWarpTakesARow) {
  RecordingStream stream;
  Memory memory;
  RowSumSquares(stream, {memory.Matrix(100, 256), memory.Vector(100)});
  EXPECT_EQ(stream.launches[0].shape.grid[0], 13u);  // eight rows per block
  EXPECT_EQ(stream.launches[0].shape.variant, kF32Vector);
}

TEST(CudaDigest, ClearsItsSumAndReadsItBack) {
  RecordingStream stream;
  Memory memory;
  EXPECT_EQ(DigestRange(stream, memory.Vector(5, DType::kU8), 100), 77u);
  ASSERT_EQ(stream.fills.size(), 1u);
  EXPECT_EQ(stream.launches[0].shape.variant, 0);
  EXPECT_EQ(stream.ParamsOf<DigestParams>(0).first_index, 100u);
  EXPECT_EQ(DigestRange(stream, memory.Vector(5, DType::kF64), 0), 77u);
  EXPECT_EQ(stream.launches[1].shape.variant, 3);
}

TEST(CudaInit, CoversTheGroupsThatARangeTouches) {
  RecordingStream stream;
  Memory memory;
  InitNormal(stream, {.out = memory.Vector(1024), .seed = 1, .site = 2, .first_index = 3});
  // Elements 3 to 1026 touch 257 groups of four: two blocks.
  EXPECT_EQ(stream.launches[0].shape.grid[0], 2u);
}

TEST(CudaCast, DirectionAndRounding) {
  RecordingStream stream;
  Memory memory;
  Cast(stream, {memory.Vector(64), memory.Vector(64, DType::kBF16), Bf16Rounding::kHalfAway});
  Cast(stream, {memory.Vector(63, DType::kBF16), memory.Vector(63)});
  EXPECT_EQ(stream.launches[0].shape.variant, kBf16Vector);
  EXPECT_EQ(stream.ParamsOf<CastParams>(0).half_away, 1);
  EXPECT_EQ(stream.launches[1].shape.variant, kMixedScalar);
  Cast(stream, {memory.Vector(64), memory.Vector(64, DType::kF16), Bf16Rounding::kHalfAway});
  Cast(stream, {memory.Vector(63, DType::kF16), memory.Vector(63)});
  EXPECT_EQ(stream.launches[2].shape.variant, kFp16Vector);
  EXPECT_EQ(stream.ParamsOf<CastParams>(2).half_away, 0);  // fp16 is the nearest
  EXPECT_EQ(stream.launches[3].shape.variant, kFp16MixedScalar);
}

TEST(CudaTranspose, TilesCoverRaggedSides) {
  RecordingStream stream;
  Memory memory;
  TransposeMatrix(stream,
                  {memory.Matrix(33, 65, DType::kBF16), memory.Matrix(65, 33, DType::kBF16)});
  EXPECT_EQ(stream.launches[0].shape.grid[0], 3u);
  EXPECT_EQ(stream.launches[0].shape.grid[1], 2u);
  EXPECT_EQ(stream.launches[0].shape.block, 256u);
}

TEST(CudaCopy, NothingIsNotCopied) {
  RecordingStream stream;
  CopyBytes(stream, {.to = nullptr, .from = nullptr, .bytes = 0});
  EXPECT_TRUE(stream.copies.empty());
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
