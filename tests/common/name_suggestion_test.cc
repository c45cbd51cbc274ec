#include "common/name_suggestion.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(NameSuggestion, FindsWhatWasMeant) {
  const std::vector<std::string> names = {"globalBatch", "microBatch", "steps", "seed", "lr"};
  EXPECT_EQ(SuggestName("global_batch", names), "globalBatch");
  EXPECT_EQ(SuggestName("globalbach", names), "globalBatch");
  EXPECT_EQ(SuggestName("stpes", names), "steps");
  EXPECT_EQ(SuggestName("step", names), "steps");
  EXPECT_EQ(SuggestName("zzz", names), "");
  EXPECT_EQ(SuggestName("x", names), "");
  EXPECT_EQ(SuggestName(std::string(1000, 'x'), names), "");
}

}  // namespace
}  // namespace ravel
