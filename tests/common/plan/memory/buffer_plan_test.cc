#include "common/plan/memory/buffer_plan.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/memory/packing.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/sanitizer.h"

namespace ravel::plan {
namespace {

struct Interval {
  int begin;
  int end;
  int64_t bytes;
};

std::vector<PackItem> Items(const std::vector<Interval>& intervals) {
  std::vector<PackItem> items;
  for (size_t i = 0; i < intervals.size(); ++i) {
    PackItem item = {.bytes = intervals[i].bytes, .conflicts = {}};
    for (size_t j = 0; j < intervals.size(); ++j) {
      if (i != j && intervals[i].begin <= intervals[j].end &&
          intervals[j].begin <= intervals[i].end) {
        item.conflicts.push_back(static_cast<int>(j));
      }
    }
    items.push_back(item);
  }
  return items;
}

int64_t Bound(const std::vector<Interval>& intervals) {
  int64_t bound = 0;
  for (const Interval& at : intervals) {
    int64_t live = 0;
    for (const Interval& other : intervals) {
      live += other.begin <= at.begin && at.begin <= other.end ? other.bytes : 0;
    }
    bound = std::max(bound, live);
  }
  return bound;
}

TEST(PackItems, SmallExampleMeetsItsBound) {
  const std::vector<Interval> intervals = {{0, 3, 10}, {1, 5, 6}, {4, 7, 8}, {6, 9, 4}};
  EXPECT_EQ(Bound(intervals), 16);
  const Packing packing = PackItems(Items(intervals));
  EXPECT_EQ(packing.peak, 16);
  EXPECT_EQ(packing.offsets[0], packing.offsets[2]);
}

TEST(PackItems, RandomIntervalsNeverOverlapAndStayNearTheBound) {
  double worst = 1;
  for (int trial = 0; trial < ravel::testing::Fewer(2000, 20); ++trial) {
    std::mt19937_64 random(testing::kSeed + static_cast<uint64_t>(trial));
    std::vector<Interval> intervals;
    const size_t count = random() % 30 + 1;
    for (size_t i = 0; i < count; ++i) {
      const int begin = static_cast<int>(random() % 40);
      intervals.push_back({begin,
                           begin + static_cast<int>(random() % 10),
                           static_cast<int64_t>(random() % 100 + 1)});
    }
    const std::vector<PackItem> items = Items(intervals);
    const Packing packing = PackItems(items);
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_LE(packing.offsets[i] + items[i].bytes, packing.peak);
      for (const size_t other : items[i].conflicts) {
        const size_t j = other;
        EXPECT_TRUE(packing.offsets[i] + items[i].bytes <= packing.offsets[j] ||
                    packing.offsets[j] + items[j].bytes <= packing.offsets[i])
            << "trial " << trial;
      }
    }
    EXPECT_GE(packing.peak, Bound(intervals));
    worst =
        std::max(worst, static_cast<double>(packing.peak) / static_cast<double>(Bound(intervals)));
  }
  EXPECT_LT(worst, 1.5);
}

TEST(PackItems, EqualUnitsInAWindowMeetTheBound) {
  std::vector<Interval> intervals;
  for (int i = 0; i < 40; ++i) {
    intervals.push_back({i, i + 1, 100});
  }
  EXPECT_EQ(PackItems(Items(intervals)).peak, 200);
}

// Items of which any two may conflict: not those of one program.
std::vector<PackItem> RandomItems(uint64_t seed, size_t most) {
  std::mt19937_64 random(seed);
  std::vector<PackItem> items(random() % most + 1);
  for (PackItem& item : items) {
    item.bytes = static_cast<int64_t>(random() % 100 + 1);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (random() % 3 != 0) {
        items[i].conflicts.push_back(static_cast<int>(j));
        items[j].conflicts.push_back(static_cast<int>(i));
      }
    }
  }
  return items;
}

// By trying every set.
int64_t HeaviestOfAllCliques(const std::vector<PackItem>& items) {
  int64_t heaviest = 0;
  for (uint32_t set = 0; set < uint32_t{1} << items.size(); ++set) {
    int64_t bytes = 0;
    bool all = true;
    for (size_t i = 0; i < items.size() && all; ++i) {
      if ((set >> i & 1) != 0) {
        bytes += items[i].bytes;
        uint32_t others = 0;
        for (const size_t other : items[i].conflicts) {
          others |= uint32_t{1} << other;
        }
        all = (set & ~others & ~(uint32_t{1} << i)) == 0;
      }
    }
    heaviest = all ? std::max(heaviest, bytes) : heaviest;
  }
  return heaviest;
}

TEST(HeaviestClique, IsThatOfAllSetsAndNoPackingIsSmaller) {
  for (uint64_t trial = 0; trial < 200; ++trial) {
    const std::vector<PackItem> items = RandomItems(testing::kSeed + trial, 12);
    const int64_t heaviest = HeaviestClique(items);
    EXPECT_EQ(heaviest, HeaviestOfAllCliques(items)) << "trial " << trial;
    EXPECT_GE(PackItems(items).peak, heaviest);
  }
}

TEST(PackCloser, GoesOnToWhatIsEnoughAndOverlapsNothing) {
  int closer = 0;
  for (uint64_t trial = 0; trial < ravel::testing::Fewer<uint64_t>(40, 5); ++trial) {
    const std::vector<PackItem> items = RandomItems(testing::kSeed + trial, 24);
    const Packing first = PackItems(items, std::numeric_limits<int64_t>::max());  // no search
    const int64_t bound = HeaviestClique(items);
    const Packing packing = PackCloser(items, first, bound);
    EXPECT_LE(packing.peak, first.peak);
    EXPECT_GE(packing.peak, bound);
    closer += packing.peak < first.peak ? 1 : 0;
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_LE(packing.offsets[i] + items[i].bytes, packing.peak);
      for (const size_t other : items[i].conflicts) {
        const size_t j = other;
        EXPECT_TRUE(packing.offsets[i] + items[i].bytes <= packing.offsets[j] ||
                    packing.offsets[j] + items[j].bytes <= packing.offsets[i])
            << "trial " << trial;
      }
    }
    // What was asked for ends it.
    EXPECT_EQ(PackCloser(items, first, first.peak).peak, first.peak);
  }
  EXPECT_GT(closer, ravel::testing::kSanitized ? 0 : 5);
}

TEST(PlanBuffers, OptimizerBuffersStartOnDifferentPages) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(512, 4, 1408, 1024), 2, 2, false);
  for (size_t unit = 0; unit < plan.inventory.units.size(); ++unit) {
    std::vector<int64_t> pages;
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const ProgramBuffer& buffer = plan.buffers[i];
      const bool walked =
          buffer.kind == BufferKind::kMainWeight || buffer.kind == BufferKind::kState;
      if (buffer.unit == static_cast<int>(unit) && walked && buffer.bytes >= 65536) {
        EXPECT_EQ(plan.memory.offsets[i] % 4096, 0);
        pages.push_back(plan.memory.offsets[i] / 4096 % 8);
      }
    }
    std::sort(pages.begin(), pages.end());
    EXPECT_EQ(std::adjacent_find(pages.begin(), pages.end()), pages.end());
  }
}

TEST(PlanBuffers, WorkspacesShareOnePlace) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 5, 96, 64), 2, 2, false);
  int64_t first = -1;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].kind == BufferKind::kWorkspace &&
        plan.buffers[i].name != "workspace/head") {
      EXPECT_TRUE(first < 0 || plan.memory.offsets[i] == first);
      first = plan.memory.offsets[i];
    }
  }
}

}  // namespace
}  // namespace ravel::plan
