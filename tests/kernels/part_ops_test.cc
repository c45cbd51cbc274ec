// Bits of sums of parts and of the loss over blocks of a vocabulary: orders that ranks rely on.

#include <algorithm>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "kernels/cpu/simd_ops.h"
#include "kernels/embedding.h"
#include "kernels/part_sum.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::kernels {
namespace {

std::vector<float> Values(size_t n, uint32_t seed) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-30f;
  }
  return values;
}

class PartOps : public ::testing::Test {
 protected:
  ~PartOps() override { cpu::UseBestSimdPath(); }
  CpuStream stream_;
};

TEST_F(PartOps, PiecesAreATreeAndTheResidualComesLast) {
  constexpr int64_t kColumns = 21;
  std::vector<std::vector<float>> pieces;
  for (uint32_t i = 0; i < 4; ++i) {
    pieces.push_back(Values(kColumns, i + 1));
  }
  std::vector<float> residual = Values(kColumns, 9);
  std::vector<float> bias = Values(kColumns, 10);
  std::vector<float> out(kColumns);
  SumPartsArgs args = {.pieces = {},
                       .residual = MatrixView(residual.data(), 1, kColumns),
                       .bias = VectorView(bias.data(), kColumns),
                       .out = MatrixView(out.data(), 1, kColumns)};
  for (std::vector<float>& piece : pieces) {
    args.pieces.push_back(MatrixView(piece.data(), 1, kColumns));
  }
  SumParts(stream_, args);
  int other_orders = 0;
  for (size_t i = 0; i < kColumns; ++i) {
    const float left = pieces[0][i] + pieces[1][i];
    const float right = pieces[2][i] + pieces[3][i];
    EXPECT_EQ(out[i], (residual[i] + bias[i]) + (left + right)) << i;
    other_orders += out[i] != residual[i] + (bias[i] + (left + right)) ? 1 : 0;
  }
  EXPECT_GT(other_orders, 0);
}

TEST_F(PartOps, ANarrowSumIsRoundedOnce) {
  constexpr int64_t kColumns = 64;
  std::vector<float> left = Values(kColumns, 1);
  std::vector<float> right = Values(kColumns, 2);
  std::vector<uint16_t> residual;
  for (const float x : Values(kColumns, 3)) {
    residual.push_back(FloatToBf16(x));
  }
  const std::vector<uint16_t> before = residual;
  TensorView hidden = MatrixView(nullptr, 1, kColumns);
  hidden.dtype = DType::kBF16;
  hidden.data = residual.data();
  SumParts(stream_,
           {.pieces = {MatrixView(left.data(), 1, kColumns), MatrixView(right.data(), 1, kColumns)},
            .residual = hidden,
            .out = hidden});
  int twice = 0;
  for (size_t i = 0; i < kColumns; ++i) {
    const float sum = left[i] + right[i];
    EXPECT_EQ(residual[i], FloatToBf16(Bf16ToFloat(before[i]) + sum)) << i;
    const float rounded = Bf16ToFloat(FloatToBf16(sum));
    twice += residual[i] != FloatToBf16(Bf16ToFloat(before[i]) + rounded) ? 1 : 0;
  }
  EXPECT_GT(twice, 0);
}

TEST_F(PartOps, RefusesPiecesThatAreNoTree) {
  std::vector<float> memory(12);
  const TensorView piece = MatrixView(memory.data(), 2, 2);
  EXPECT_DEATH(SumParts(stream_, {.pieces = {piece, piece, piece}, .out = piece}),
               "a power of two");
  EXPECT_DEATH(SumParts(stream_, {.pieces = {}, .out = piece}), "a power of two");
}

struct Loss {
  std::vector<float> losses;
  std::vector<float> gradient;
};

// Each block in memory of its own, as ranks have it.
Loss LossOf(CpuStream& stream,
            const std::vector<float>& logits,
            std::vector<int32_t> targets,
            int64_t vocabulary,
            int64_t blocks,
            int64_t block_rows) {
  const auto tokens = static_cast<int64_t>(targets.size());
  TensorView ids = VectorView(nullptr, tokens);
  ids.dtype = DType::kI32;
  ids.data = targets.data();
  std::vector<float> statistics(static_cast<size_t>(3 * blocks * tokens), NAN);
  const TensorView all = MatrixView(statistics.data(), 3 * blocks, tokens);
  std::vector<std::vector<float>> own;
  std::vector<TensorView> views;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = std::min(block * block_rows, vocabulary);
    const int64_t rows = std::min(block_rows, vocabulary - first);
    std::vector<float>& mine = own.emplace_back(static_cast<size_t>(rows * tokens));
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(logits.data() + t * vocabulary + first, rows, mine.data() + t * rows);
    }
    views.push_back(MatrixView(mine.data(), tokens, rows));
    VocabularyStatistics(stream,
                         {.logits = views.back(),
                          .targets = ids,
                          .first_id = block * block_rows,
                          .statistics = RowsOf(all, 3 * block, 3)});
  }
  Loss loss = {std::vector<float>(targets.size()), std::vector<float>(logits.size())};
  VocabularyLoss(stream,
                 {.statistics = all,
                  .targets = ids,
                  .vocabulary = vocabulary,
                  .loss = VectorView(loss.losses.data(), tokens)});
  for (int64_t block = 0; block < blocks; ++block) {
    const TensorView& view = views[static_cast<size_t>(block)];
    VocabularyGradient(stream,
                       {.logits = view,
                        .targets = ids,
                        .first_id = block * block_rows,
                        .statistics = RowsOf(all, 3 * block, 3)});
    const int64_t first = std::min(block * block_rows, vocabulary);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(view.Row<float>(t), view.size[1], loss.gradient.data() + t * vocabulary + first);
    }
  }
  return loss;
}

TEST_F(PartOps, BlocksWithoutRowsChangeNoBit) {
  constexpr int64_t kVocabulary = 16;
  const std::vector<float> logits = Values(6 * kVocabulary, 4);
  const std::vector<int32_t> targets = {0, 15, -1, 7, 8, 3};
  const Loss two = LossOf(stream_, logits, targets, kVocabulary, 2, 8);
  const Loss four = LossOf(stream_, logits, targets, kVocabulary, 4, 8);
  EXPECT_EQ(two.losses, four.losses);
  EXPECT_EQ(two.gradient, four.gradient);
  EXPECT_NE(two.losses, LossOf(stream_, logits, targets, kVocabulary, 1, 16).losses);
  for (size_t j = 0; j < 16; ++j) {
    EXPECT_EQ(two.gradient[2 * 16 + j], 0.0f);
  }
}

TEST_F(PartOps, EveryPathGivesTheSameBits) {
  constexpr int64_t kVocabulary = 101;
  const std::vector<float> logits = Values(5 * kVocabulary, 5);
  const std::vector<int32_t> targets = {0, 100, -1, 77, 13};
  cpu::UseSimdPath(cpu::SimdPath::kPortable);
  const Loss portable = LossOf(stream_, logits, targets, kVocabulary, 4, 32);
  for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (cpu::RunsHere(path)) {
      cpu::UseSimdPath(path);
      const Loss loss = LossOf(stream_, logits, targets, kVocabulary, 4, 32);
      EXPECT_EQ(loss.losses, portable.losses);
      EXPECT_EQ(loss.gradient, portable.gradient);
    }
  }
}

// Three ranks have 4, 4 and 3 of 11 rows; each other row of theirs is -0.
TEST_F(PartOps, RowsOfATableInPartsAddUpToTheBitsOfTheWhole) {
  constexpr int64_t kRows = 11;
  constexpr int64_t kColumns = 13;
  constexpr int64_t kTokens = 9;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> storage = Values(kRows * kColumns, 7);
    storage[5] = -0.0f;  // of row 0: +0 added to it would be +0
    TensorView table = MatrixView(storage.data(), kRows, kColumns);
    table.dtype = dtype;
    std::vector<int32_t> ids = {10, 0, 3, 4, 7, 8, 0, 4, 10};
    TensorView tokens = VectorView(nullptr, kTokens);
    tokens.dtype = DType::kI32;
    tokens.data = ids.data();
    std::vector<float> whole(kTokens * kColumns);
    const TensorView of_whole = MatrixView(whole.data(), kTokens, kColumns);
    EmbeddingForward(stream_, {.ids = tokens, .table = table, .out = of_whole});
    std::vector<float> dout = Values(kTokens * kColumns, 8);
    const TensorView gradient = MatrixView(dout.data(), kTokens, kColumns);
    std::vector<float> dwhole(kRows * kColumns, NAN);
    EmbeddingBackward(
        stream_,
        {.ids = tokens, .dout = gradient, .dtable = MatrixView(dwhole.data(), kRows, kColumns)});
    std::vector<float> sum(whole.size(), -0.0f);
    std::vector<float> dtable(dwhole.size(), NAN);
    for (const int64_t first : {0, 4, 8}) {
      const int64_t rows = std::min<int64_t>(4, kRows - first);
      const TableRows of_rank = {.first = first, .vocabulary = kRows};
      std::vector<float> part(whole.size(), NAN);
      EmbeddingForward(stream_,
                       {.ids = tokens,
                        .table = RowsOf(table, first, rows),
                        .out = MatrixView(part.data(), kTokens, kColumns),
                        .rows = of_rank});
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += part[i];
      }
      EmbeddingBackward(stream_,
                        {.ids = tokens,
                         .dout = gradient,
                         .dtable = RowsOf(MatrixView(dtable.data(), kRows, kColumns), first, rows),
                         .rows = of_rank});
    }
    EXPECT_EQ(std::memcmp(sum.data(), whole.data(), sum.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(dtable.data(), dwhole.data(), dtable.size() * sizeof(float)), 0);
  }
}

TEST_F(PartOps, ANonFiniteLogitShowsInTheLoss) {
  std::vector<float> logits = Values(16, 6);
  logits[3] = NAN;
  EXPECT_TRUE(std::isnan(LossOf(stream_, logits, {9}, 16, 2, 8).losses[0]));
}

}  // namespace
}  // namespace ravel::kernels
