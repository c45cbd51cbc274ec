// Tests without a device how descriptions of attention are cut and which engine is chosen.

#include "kernels/cuda_host/attention_plans.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <absl/status/status.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/cuda_host/described_attention.h"

namespace ravel::kernels::cuda::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(AttentionKey, HasAllThatAPlanDependsOn) {
  const RavelCudaAttention attention = Described(1, true);
  EXPECT_EQ(AttentionKey(attention),
            "bwd-1x8192x32of8x128-s6144,6144,6144,4096,4096,6144,6144,6144-c3e000000");
  std::set<std::string> keys = {AttentionKey(attention)};
  const auto differs = [&](auto change) {
    RavelCudaAttention other = attention;
    change(other);
    return keys.insert(AttentionKey(other)).second;
  };
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.deterministic = 1; }));
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.backward = 0; }));
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.scale = std::nextafter(a.scale, 1.0f); }));
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.kv_heads = 4; }));
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.type = static_cast<int32_t>(DType::kF16); }));
  EXPECT_TRUE(differs([](RavelCudaAttention& a) { a.dv_stride = 1024; }));
}

TEST(AttentionParts, ShrinkBySequencesThenByKeyHeads) {
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (AttentionPart part = {6, 4}; part.sequences > 0; part = SmallerPart(part)) {
    parts.emplace_back(part.sequences, part.kv_heads);
  }
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_THAT(parts, ElementsAre(Pair{6, 4}, Pair{3, 4}, Pair{1, 4}, Pair{1, 2}, Pair{1, 1}));
}

TEST(AttentionParts, BeginAtTheirSequenceAndHeads) {
  const RavelCudaAttention attention = Described(2, false);
  std::vector<uint16_t> memory(1);
  float statistics = 0;
  RavelCudaAttentionBuffers whole = {};
  whole.q = memory.data();
  whole.k = memory.data();
  whole.out = memory.data();
  whole.log_sum_exp = &statistics;
  const RavelCudaAttentionBuffers part = PartOf(attention, whole, 1, 2);
  const auto elements = [&](const void* address) {
    return (reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(memory.data())) / 2;
  };
  EXPECT_EQ(elements(part.q), 8192 * 6144 + 8 * 128);  // four query heads for each key head
  EXPECT_EQ(elements(part.k), 8192 * 6144 + 2 * 128);
  EXPECT_EQ(elements(part.out), 8192 * 4096 + 8 * 128);
  EXPECT_EQ(part.log_sum_exp - &statistics, (32 + 8) * 8192);
  EXPECT_EQ(part.dq, nullptr);
  const RavelCudaAttention described = PartOf(attention, {1, 2});
  EXPECT_EQ(described.query_heads, 8);
}

// An engine whose workspace grows with sequences and heads.
class FakeEngines {
 public:
  AttentionPlans::Build Builder() {
    return [this](const RavelCudaAttention& a) -> absl::StatusOr<RavelCudaAttentionPlan> {
      if (a.head_size == 256) {
        return absl::UnavailableError("no engine");
      }
      ++alive;
      ++built;
      return RavelCudaAttentionPlan{
          .plan = this,
          .workspace_bytes = static_cast<uint64_t>(a.sequences * a.query_heads) * 100,
          .unified = 0,
          .engine = 6};
    };
  }
  AttentionPlans::Destroy Destroyer() {
    return [this](void*) { --alive; };
  }
  int alive = 0;
  int built = 0;
};

TEST(AttentionPlans, ABuiltPlanServesAllCalls) {
  FakeEngines engines;
  {
    AttentionPlans plans(engines.Destroyer());
    const RavelCudaAttention attention = Described(2, false);
    EXPECT_EQ(plans.Find(attention), nullptr);
    const AttentionChoice& choice = plans.Choose(attention, 6400, engines.Builder());
    EXPECT_EQ(choice.part.sequences, 2);
    EXPECT_EQ(choice.part.kv_heads, 8);
    EXPECT_EQ(&plans.Choose(attention, 6400, engines.Builder()), &choice);
    EXPECT_EQ(plans.Find(attention), &choice);
    EXPECT_EQ(engines.built, 1);
    EXPECT_THAT(plans.ToText(), HasSubstr(": cuDNN, chain, engine 6, workspace 6400\n"));
  }
  EXPECT_EQ(engines.alive, 0);
}

TEST(AttentionPlans, TooLittleWorkspaceMakesParts) {
  FakeEngines engines;
  AttentionPlans plans(engines.Destroyer());
  const AttentionChoice& choice = plans.Choose(Described(2, true), 1000, engines.Builder());
  EXPECT_NE(choice.plan, nullptr);
  EXPECT_EQ(choice.part.sequences, 1);
  EXPECT_EQ(choice.part.kv_heads, 2);  // eight query heads
  EXPECT_EQ(choice.workspace_bytes, 800u);
  EXPECT_EQ(plans.WholeWorkspaceBytes(), 6400u);
  EXPECT_EQ(engines.alive, 1);
  EXPECT_THAT(choice.text, HasSubstr("in parts of 1 sequences and 2 key heads"));
}

// With 51 tokens the statistics of four heads end on 16 bytes, those of two do not.
TEST(AttentionPlans, PartsWhoseStatisticsDoNotBeginOnVectorsAreLeftOut) {
  FakeEngines engines;
  AttentionPlans plans(engines.Destroyer());
  RavelCudaAttention attention = Described(2, false);
  attention.sequence_tokens = 51;
  attention.query_heads = 8;
  const AttentionChoice& four = plans.Choose(attention, 400, engines.Builder());
  EXPECT_EQ(four.part.sequences, 1);
  EXPECT_EQ(four.part.kv_heads, 4);
  AttentionPlans small(engines.Destroyer());
  EXPECT_EQ(small.Choose(attention, 300, engines.Builder()).plan, nullptr);
  EXPECT_THAT(small.ToText(), HasSubstr("smallest part that begins on 16 bytes"));
  attention.query_heads = 6;
  attention.kv_heads = 6;
  EXPECT_FALSE(PartsOnVectors(attention, {1, 6}));
  EXPECT_TRUE(PartsOnVectors(attention, {2, 6}));
}

TEST(AttentionPlans, OurOwnKernelRunsByNameAndWithItsReason) {
  FakeEngines engines;
  AttentionPlans plans(engines.Destroyer());
  RavelCudaAttention attention = Described(1, true);
  EXPECT_EQ(plans.Choose(attention, 399, engines.Builder()).plan, nullptr);
  EXPECT_EQ(engines.alive, 0);
  EXPECT_THAT(plans.ToText(), HasSubstr("our own kernel, because cuDNN needs a workspace of 3200"));
  attention.head_size = 256;
  EXPECT_EQ(plans.Choose(attention, 1 << 20, engines.Builder()).plan, nullptr);
  EXPECT_THAT(plans.ToText(), HasSubstr("our own kernel, because no engine"));
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
