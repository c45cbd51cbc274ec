#include "common/model/logits_chunk.h"

#include <gtest/gtest.h>

#include "common/plan/plan_proto.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

TEST(LogitsChunk, OfAGpuIsAsLargeAsItsBytesAllow) {
  constexpr int64_t kLlama3 = 128256;
  EXPECT_EQ(LogitsChunkTokens(false, kLlama3, 2), 2048);
  EXPECT_EQ(LogitsChunkTokens(false, kLlama3, 4), 1024);
  EXPECT_EQ(LogitsChunkTokens(false, 50304, 2), 4096);
  EXPECT_EQ(LogitsChunkTokens(false, 65536, 2), 4096);
  EXPECT_EQ(LogitsChunkTokens(false, 65537, 2), 2048);
  EXPECT_EQ(LogitsChunkTokens(false, 61, 4), 4096);
  // A million words: more than the budget, and not fewer tokens.
  EXPECT_EQ(LogitsChunkTokens(false, int64_t{1} << 20, 2), 1024);
}

TEST(LogitsChunk, OfACpuTakesAtMost32MiB) {
  EXPECT_EQ(LogitsChunkTokens(true, 61, 4), 1024);
  EXPECT_EQ(LogitsChunkTokens(true, 8192, 4), 1024);
  EXPECT_EQ(LogitsChunkTokens(true, 8193, 4), 512);
  EXPECT_EQ(LogitsChunkTokens(true, 16385, 4), 256);
  EXPECT_EQ(LogitsChunkTokens(true, 128256, 4), 256);  // more, and not fewer tokens
}

// One lane of four sequences of 400 tokens.
JobSpec LongSpec(bool cpu, int64_t vocabulary = 257) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, vocabulary), 4);
  spec.data.sequence_length = 400;
  spec.global_batch = 16;
  spec.micro_batch = 4;
  spec.cpu_devices = cpu;
  return spec;
}

Shape LogitsOf(const ShardingPlan& plan) {
  for (const ActivationSpec& spec : plan.inventory.units.back().workspace) {
    if (spec.name == "logits") {
      return spec.shape;
    }
  }
  return {};
}

TEST(LogitsChunk, IsOfTheJobNotOfTheRanks) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    const ShardingPlan gpu =
        *BuildShardingPlan({.spec = LongSpec(false), .ranks = ranks, .shared_memory = false});
    EXPECT_EQ(gpu.options.logits_chunk_tokens, 4096) << ranks;
    EXPECT_EQ(LogitsOf(gpu), (Shape{1600, 257})) << ranks;
    const ShardingPlan cpu = *BuildShardingPlan({.spec = LongSpec(true), .ranks = ranks});
    EXPECT_EQ(cpu.options.logits_chunk_tokens, 1024);
    EXPECT_EQ(LogitsOf(cpu), (Shape{1024, 257}));
  }
}

TEST(LogitsChunk, RoundTripsAndIsHashed) {
  const ShardingPlan gpu =
      *BuildShardingPlan({.spec = LongSpec(false), .ranks = 2, .shared_memory = false});
  const ShardingPlan cpu =
      *BuildShardingPlan({.spec = LongSpec(true), .ranks = 2, .shared_memory = false});
  EXPECT_NE(PlanHash(gpu), PlanHash(cpu));
  const ShardingPlan many_words =
      *BuildShardingPlan({.spec = LongSpec(true, 32000), .ranks = 2, .shared_memory = false});
  EXPECT_EQ(ToProto(cpu).options().logits_chunk_tokens(), 1024);
  EXPECT_EQ(LogitsOf(many_words), (Shape{kLogitsChunkTokens, 32000}));
  EXPECT_EQ(ToProto(many_words).options().logits_chunk_tokens(), 0);
  EXPECT_EQ(ToProto(gpu).options().logits_chunk_tokens(), 4096);
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(gpu));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->options.logits_chunk_tokens, 4096);
  EXPECT_EQ(LogitsOf(*back), LogitsOf(gpu));
  EXPECT_EQ(PlanHash(*back), PlanHash(gpu));
  for (const int64_t tokens : {int64_t{-1}, kMostLogitsTokens + 1}) {
    v1::ShardingPlan proto = ToProto(gpu);
    proto.mutable_options()->set_logits_chunk_tokens(tokens);
    EXPECT_EQ(FromProto(proto).status().message(),
              absl::StrCat("plan: options.logits_chunk_tokens: expected 1 to 4096, got ", tokens));
  }
}

}  // namespace
}  // namespace ravel::plan
