// Places of scales as gemms of codes read them: each scale has one, and tiles read back as the
// library lays them out.

#include "common/gemm_scales.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"

namespace ravel {
namespace {

constexpr int64_t kShapes[][2] = {
    {1, 32}, {32, 32}, {128, 128}, {130, 160}, {257, 1056}, {384, 64}};

int64_t ElementBytes(ScaleForm form) {
  return form == ScaleForm::kBlocks16 || form == ScaleForm::kBlocks32 ? 1 : 4;
}

TEST(GemmScales, EveryScaleHasAPlaceOfItsOwnWithinTheBytes) {
  for (const ScaleForm form : {ScaleForm::kBlocks16,
                               ScaleForm::kBlocks32,
                               ScaleForm::kBlocks128,
                               ScaleForm::kSquares128}) {
    for (const auto& [outer, inner] : kShapes) {
      const int64_t blocks = ScaleBlocks(form, inner);
      const int64_t places = ScaleBytes(form, outer, inner) / ElementBytes(form);
      std::vector<int> taken(Size(places), 0);
      const int64_t step = form == ScaleForm::kSquares128 ? kScaleTileRows : 1;
      for (int64_t row = 0; row < outer; row += step) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t at = ScaleIndex(form, row, block, outer, blocks);
          ASSERT_GE(at, 0);
          ASSERT_LT(at, places) << outer << " " << inner;
          EXPECT_EQ(taken[Size(at)]++, 0) << row << " " << block;
          EXPECT_EQ(
              ScaleIndex(form, row + (outer - row > step ? step - 1 : 0), block, outer, blocks),
              at);
        }
      }
    }
  }
}

// The inverse, written from the layout: tiles of 512 bytes lie row by row; in a tile, 32 lines of
// 16 bytes, each with four rows that are 32 apart, of four blocks.
TEST(GemmScales, TilesReadBackToTheirRowsAndBlocks) {
  for (const ScaleForm form : {ScaleForm::kBlocks16, ScaleForm::kBlocks32}) {
    for (const auto& [outer, inner] : kShapes) {
      const int64_t blocks = ScaleBlocks(form, inner);
      EXPECT_EQ(blocks, inner / (form == ScaleForm::kBlocks16 ? 16 : 32));
      const int64_t tiles = (blocks + 3) / 4;
      const int64_t bytes = ScaleBytes(form, outer, inner);
      EXPECT_EQ(bytes % 512, 0);
      int64_t found = 0;
      for (int64_t at = 0; at < bytes; ++at) {
        const int64_t tile = at / 512;
        const int64_t row = tile / tiles * 128 + at % 512 / 16 + at % 16 / 4 * 32;
        const int64_t block = tile % tiles * 4 + at % 4;
        if (row < outer && block < blocks) {
          EXPECT_EQ(ScaleIndex(form, row, block, outer, blocks), at);
          ++found;
        }
      }
      EXPECT_EQ(found, outer * blocks);
    }
  }
}

}  // namespace
}  // namespace ravel
