#include "coordinator/access/call_budget.h"

#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_clock.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

int Taken(CallBudget& budget, const std::string& identity, int calls) {
  int taken = 0;
  for (int call = 0; call < calls; ++call) {
    taken += budget.Take(identity).ok() ? 1 : 0;
  }
  return taken;
}

TEST(CallBudgetTest, ABurstThenTheRate) {
  testing::FakeClock clock;
  CallBudget budget(clock, {.per_second = 100, .burst = 200});
  EXPECT_EQ(Taken(budget, "user/a", 300), 200);
  EXPECT_EQ(budget.refused(), 100);
  const absl::Status refused = budget.Take("user/a");
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("user/a"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("in 10 ms"));
  clock.AdvanceMs(9);
  EXPECT_EQ(Taken(budget, "user/a", 1), 0);
  clock.AdvanceMs(1);
  EXPECT_EQ(Taken(budget, "user/a", 2), 1);
  clock.AdvanceMs(500);
  EXPECT_EQ(Taken(budget, "user/a", 100), 50);
}

TEST(CallBudgetTest, OneIdentityCostsNoOtherAndIdleTimeIsNotSaved) {
  testing::FakeClock clock;
  CallBudget budget(clock, {.per_second = 10, .burst = 20});
  EXPECT_EQ(Taken(budget, "user/a", 50), 20);
  EXPECT_EQ(Taken(budget, "user/b", 50), 20);
  clock.AdvanceMs(int64_t{365} * 24 * 3600 * 1000);
  EXPECT_EQ(Taken(budget, "user/a", 50), 20);
}

// 10,000 names, each of which called once, then one that calls without end.
TEST(CallBudgetTest, ForgetsWhoIsIdleAndNeverWhoIsNot) {
  testing::FakeClock clock;
  CallBudget budget(clock, {.per_second = 100, .burst = 200});
  EXPECT_EQ(Taken(budget, "user/busy", 200), 200);
  for (int name = 0; name < 10000; ++name) {
    EXPECT_TRUE(budget.Take(absl::StrCat("user/", name)).ok());
  }
  EXPECT_EQ(Taken(budget, "user/busy", 1), 0);
}

}  // namespace
}  // namespace ravel::coordinator
