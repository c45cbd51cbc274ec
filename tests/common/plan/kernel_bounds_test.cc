// Numbers of the planner that kernels must agree with: a plan may not include kernels, a test may.

#include <gtest/gtest.h>

#include "common/model/attention_workspace.h"
#include "common/model/model_inventory.h"
#include "common/philox.h"
#include "kernels/attention.h"
#include "kernels/cuda_host/attention_plans.h"
#include "kernels/scalar/philox.h"

namespace ravel::plan {
namespace {

TEST(KernelBounds, AttentionScratchIsEnough) {
  for (const int64_t tokens :
       {1, 2, 15, 16, 17, 48, 63, 64, 65, 96, 128, 255, 1024, 8192, 131072}) {
    for (const int64_t head : {2, 8, 10, 16, 48, 64, 80, 96, 128, 192, 256, 512, 1024, 4096}) {
      for (const int64_t heads : {1, 8, 64}) {
        const kernels::AttentionShape shape = {.sequence_tokens = tokens,
                                               .query_heads = 4 * heads,
                                               .kv_heads = heads,
                                               .head_size = head,
                                               .scale = 1.0f};
        EXPECT_GE(AttentionScratchElements(tokens, head),
                  kernels::AttentionWorkspaceElements(shape))
            << tokens << " tokens, head size " << head << ", kv heads " << heads;
      }
    }
  }
}

// The parts are the kernels' own, and the bytes those of the largest that stays below the limit.
TEST(KernelBounds, AttentionIsCutAsKernelsCutIt) {
  for (const bool exact : {false, true}) {
    for (const int64_t sequences : {1, 6, 64}) {
      for (const int64_t kv_heads : {1, 8, 12}) {
        const AttentionPass whole = {.sequences = sequences,
                                     .sequence_tokens = 8192,
                                     .query_heads = 4 * kv_heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = 128,
                                     .exact = exact};
        const int64_t given = AttentionWorkspaceBytes(whole);
        AttentionPass part = whole;
        kernels::cuda::AttentionPart cut = {sequences, kv_heads};
        while (AttentionEngineBytes(part) > given) {
          EXPECT_GT(AttentionEngineBytes(part), kMostAttentionBytes);
          cut = kernels::cuda::SmallerPart(cut);
          ASSERT_GT(cut.sequences, 0);
          part.sequences = cut.sequences;
          part.kv_heads = cut.kv_heads;
          part.query_heads = 4 * cut.kv_heads;
        }
        EXPECT_EQ(AttentionEngineBytes(part), given);
        EXPECT_TRUE(given <= kMostAttentionBytes || (cut.sequences == 1 && cut.kv_heads == 1));
      }
    }
  }
}

TEST(KernelBounds, OnePhilox) {
  for (uint32_t i = 0; i < 100; ++i) {
    const uint64_t key = uint64_t{i} * 0x9E3779B97F4A7C15u;
    EXPECT_EQ(PhiloxDraw(key, {i, i + 1, 7 * i, ~i}),
              kernels::scalar::Philox4x32(key, {i, i + 1, 7 * i, ~i}));
  }
}

}  // namespace
}  // namespace ravel::plan
