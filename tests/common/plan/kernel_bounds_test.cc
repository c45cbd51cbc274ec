// Numbers of the planner that kernels must agree with: a plan may not include kernels, a test may.

#include <gtest/gtest.h>

#include "common/philox.h"
#include "common/plan/model_inventory.h"
#include "kernels/attention.h"
#include "kernels/loss.h"
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

TEST(KernelBounds, LogitsChunkIsTheKernels) {
  EXPECT_EQ(kLogitsChunkTokens, kernels::kLossChunkTokens);
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
