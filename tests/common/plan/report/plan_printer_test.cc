#include "common/plan/report/plan_printer.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

TEST(PlanPrinter, Bytes) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1536), "1.50 KiB");
  EXPECT_EQ(BytesText(int64_t{50} << 20), "50.0 MiB");
}

TEST(PlanPrinter, SummaryShowsMemoryWireAndUnits) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 256), 2, 4, true);
  const std::string text = PlanSummary(plan);
  for (const char* part : {"2 rank(s), 4 lanes, 2 turn(s)",
                           "main weight",
                           "exp_avg",
                           "main grad",
                           "activations",
                           "wire per rank and step",
                           "layers.0 .. layers.1 (2)",
                           "lower bound"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(PlanPrinter, SummarySaysWhichLayersRunTwiceOrNotAtAll) {
  ModelConfig config = testing::Llama(64, 2, 96, 256);
  JobSpec spec = testing::SpecOf(config, 4);
  const auto summary = [&] { return PlanSummary(*BuildShardingPlan({.spec = spec, .ranks = 2})); };
  const std::string plain = summary();
  EXPECT_THAT(plain, ::testing::Not(HasSubstr("layer_")));
  EXPECT_THAT(plain, ::testing::Not(HasSubstr("layerDrop")));
  EXPECT_THAT(plain, ::testing::Not(HasSubstr("layerSharing")));
  spec.model->layer_sharing = true;
  EXPECT_THAT(summary(), HasSubstr("\nlayerSharing: every layer runs twice in a row\n"));
  spec.model->layer_sharing = false;
  spec.layer_drop = 0.1;
  EXPECT_THAT(summary(),
              HasSubstr("\nlayerDrop: a micro-batch leaves out each layer with probability 0.1; "
                        "FLOPs and times are those to be expected; no CUDA graphs\n"));
}

// Digits after "@" change with every buffer size.
std::string WithoutAddresses(const std::string& text) {
  std::string plain;
  bool address = false;
  for (const char c : text) {
    address = address && c >= '0' && c <= '9';
    if (!address) {
      plain += c;
    }
    address = address || c == '@';
  }
  return plain;
}

// The program of the design's worked example: three units, window of two.
TEST(PlanPrinter, ListingOfTheWorkedExample) {
  ModelConfig config = testing::Llama(64, 1, 96, 16);
  JobSpec spec = testing::SpecOf(config, 2);
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  const std::string text = ProgramListing(plan, plan.program(Phase::kOnly));
  const std::string golden = R"(program only
   0  gather   Gather         embed      -> gathered/embed @
   1  gather   Gather         layers.0   -> gathered/layers.0 @
   2  compute  Forward        embed        waits 0
   3  host     Free                      gathered/embed
   4  gather   Gather         head       -> gathered/head @  waits 2
   5  compute  Forward        layers.0     waits 1
   6  compute  Forward        head         waits 4
   7  reduce   AllocStaging   head       -> staging/head @
   8  reduce   AllocStaging   layers.0   -> staging/layers.0 @
   9  compute  Backward       head         waits 7
  10  reduce   ReduceScatter  head         waits 9
  11  host     Free                      staging/head
  12  reduce   AllocStaging   embed      -> staging/embed @
  13  host     Free                      gathered/head
  14  gather   Gather         embed      -> gathered/embed @  waits 9
  15  compute  Backward       layers.0     waits 8
  16  reduce   ReduceScatter  layers.0     waits 15
  17  host     Free                      staging/layers.0
  18  compute  Backward       embed        waits 12, 14
  19  reduce   ReduceScatter  embed        waits 18
  20  host     Free                      staging/embed
  21  host     Free                      gathered/embed
  22  host     Free                      gathered/layers.0
  23  reduce   StatsReduce
  24  reduce   DecideStep
  25  compute  OptimizerStep  embed        waits 24
  26  compute  OptimizerStep  layers.0
  27  compute  OptimizerStep  head
  28  host     EndPhase                    waits 27
)";
  EXPECT_EQ(WithoutAddresses(text), golden);
}

}  // namespace
}  // namespace ravel::plan
