#include "common/plan/sample_order.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "common/philox.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

TEST(Philox, KnownAnswers) {
  const PhiloxBlock zeros = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  EXPECT_EQ(PhiloxDraw(0, {0, 0, 0, 0}), zeros);
  const PhiloxBlock ones = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  EXPECT_EQ(PhiloxDraw(~uint64_t{0}, {~0u, ~0u, ~0u, ~0u}), ones);
}

std::vector<SampleRef> Stream(const SampleOrderSpec& spec, int64_t steps) {
  std::vector<SampleRef> stream;
  for (int64_t step = 0; step < steps; ++step) {
    for (const SampleRef& sample : SamplesOfStep(spec, step)) {
      stream.push_back(sample);
    }
  }
  return stream;
}

TEST(SampleOrder, EachSampleOncePerPass) {
  for (const int64_t samples : {1, 2, 3, 7, 64, 65, 1000}) {
    const SampleOrderSpec spec = {
        .sources = {{.samples = samples}}, .seed = 5, .global_batch = 4, .lanes = 2};
    const int64_t steps = (3 * samples + 3) / 4;
    std::vector<std::set<int64_t>> seen(4);
    int64_t position = 0;
    for (const SampleRef& sample : Stream(spec, steps)) {
      EXPECT_EQ(sample.pass, position / samples);
      EXPECT_TRUE(sample.index >= 0 && sample.index < samples);
      EXPECT_TRUE(seen[static_cast<size_t>(sample.pass)].insert(sample.index).second);
      ++position;
    }
    EXPECT_EQ(static_cast<int64_t>(seen[2].size()), samples);
  }
}

TEST(SampleOrder, DependsOnSeedAndPositionOnly) {
  const SampleOrderSpec spec = {
      .sources = {{.samples = 101}}, .seed = 9, .global_batch = 8, .lanes = 8};
  const std::vector<SampleRef> stream = Stream(spec, 30);
  SampleOrderSpec other_lanes = spec;
  other_lanes.lanes = 1;
  EXPECT_EQ(Stream(other_lanes, 30), stream);
  // The stream is one sequence that the global batch only cuts.
  SampleOrderSpec other_batch = spec;
  other_batch.global_batch = 16;
  EXPECT_EQ(Stream(other_batch, 15), stream);
  SampleOrderSpec other_seed = spec;
  other_seed.seed = 10;
  EXPECT_NE(Stream(other_seed, 30), stream);
  // Passes differ from each other.
  std::vector<int64_t> first;
  std::vector<int64_t> second;
  for (size_t i = 0; i < 101; ++i) {
    first.push_back(stream[i].index);
    second.push_back(stream[i + 101].index);
  }
  EXPECT_NE(first, second);
}

TEST(SampleOrder, GoldenBatch) {
  const SampleOrderSpec spec = {
      .sources = {{.samples = 1000}}, .seed = 42, .global_batch = 8, .lanes = 4};
  std::vector<int64_t> indices;
  for (const SampleRef& sample : SamplesOfStep(spec, 3)) {
    indices.push_back(sample.index);
  }
  const std::vector<int64_t> golden = {472, 942, 547, 730, 850, 852, 164, 416};
  EXPECT_EQ(indices, golden) << "this order is what a job's loss curve depends on";
}

TEST(SampleOrder, LooksRandom) {
  // Neighbours of a large permutation are not near each other, and halves mix.
  const SampleOrderSpec spec = {
      .sources = {{.samples = 100000}}, .seed = 1, .global_batch = 1000, .lanes = 1};
  const std::vector<SampleRef> stream = Stream(spec, 10);
  int64_t near = 0;
  int64_t low = 0;
  for (size_t i = 0; i < stream.size(); ++i) {
    low += stream[i].index < 50000 ? 1 : 0;
    near += i > 0 && std::abs(stream[i].index - stream[i - 1].index) < 1000 ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(low), 5000.0, 250.0);
  EXPECT_NEAR(static_cast<double>(near), 199.0, 80.0);
}

TEST(SampleOrder, SourcesFollowTheirWeights) {
  const SampleOrderSpec spec = {.sources = {{.samples = 50, .weight = 3},
                                            {.samples = 0, .weight = 9},
                                            {.samples = 80, .weight = 1},
                                            {.samples = 20, .weight = 2}},
                                .seed = 3,
                                .global_batch = 6,
                                .lanes = 1};
  std::vector<int64_t> visits(4, 0);
  std::vector<std::set<std::pair<int64_t, int64_t>>> seen(4);
  int64_t position = 0;
  for (const SampleRef& sample : Stream(spec, 200)) {
    const auto source = static_cast<size_t>(sample.source);
    EXPECT_EQ(sample.pass, visits[source] / spec.sources[source].samples);
    EXPECT_TRUE(seen[source].emplace(sample.pass, sample.index).second);
    ++visits[source];
    ++position;
    const auto share = [&](double weight) { return static_cast<double>(position) * weight / 6; };
    EXPECT_NEAR(static_cast<double>(visits[0]), share(3), 1.5);
    EXPECT_NEAR(static_cast<double>(visits[2]), share(1), 2.5);
    EXPECT_NEAR(static_cast<double>(visits[3]), share(2), 2.5);
  }
  EXPECT_EQ(visits[1], 0);
}

TEST(SampleOrder, EvaluationWalksTheFilesInOrder) {
  const SampleOrderSpec spec = {
      .sources = {{.samples = 3}, {.samples = 2}}, .seed = 1, .global_batch = 4, .lanes = 1};
  const std::vector<SampleRef> second = EvaluationSamples(spec, 1);
  const std::vector<SampleRef> expected = {{1, 1, 0}, {0, 0, 1}, {0, 1, 1}, {0, 2, 1}};
  EXPECT_EQ(second, expected);
}

TEST(SampleOrder, SamplesShareOneToken) {
  EXPECT_EQ(SampleCount(0, 4), 0);
  EXPECT_EQ(SampleCount(4, 4), 0);
  EXPECT_EQ(SampleCount(5, 4), 1);
  EXPECT_EQ(SampleCount(8, 4), 1);
  EXPECT_EQ(SampleCount(9, 4), 2);
}

}  // namespace
}  // namespace ravel::plan
