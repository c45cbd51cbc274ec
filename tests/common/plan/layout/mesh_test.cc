#include "common/plan/layout/mesh.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Mesh MeshOf(std::vector<MeshAxis> axes) {
  absl::StatusOr<Mesh> mesh = Mesh::Create(std::move(axes));
  EXPECT_TRUE(mesh.ok()) << mesh.status();
  return *std::move(mesh);
}

TEST(MeshTest, RankCountsThroughTheLastAxisFirst) {
  const Mesh mesh = MeshOf({{"replicate", 2}, {"shard", 3}, {"tensor", 4}});
  EXPECT_EQ(mesh.rank_count(), 24);
  int64_t rank = 0;
  for (int64_t o = 0; o < 2; ++o) {
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t t = 0; t < 4; ++t, ++rank) {
        EXPECT_EQ(mesh.RankOf({o, i, t}), rank);
        EXPECT_THAT(mesh.CoordinateOf(rank), ElementsAre(o, i, t));
      }
    }
  }
  EXPECT_EQ(mesh.Text(), "replicate 2 x shard 3 x tensor 4");
  EXPECT_EQ(mesh.AxisIndex("shard"), 1);
  EXPECT_EQ(mesh.AxisIndex("expert"), -1);
  EXPECT_EQ(mesh.AxisSize("tensor"), 4);
  EXPECT_EQ(mesh.AxisSize("expert"), 1);
}

TEST(MeshTest, WithoutAxesThereIsOneRank) {
  const Mesh mesh;
  EXPECT_EQ(mesh.rank_count(), 1);
  EXPECT_TRUE(mesh.CoordinateOf(0).empty());
  EXPECT_EQ(mesh.RankOf({}), 0);
  EXPECT_THAT(mesh.Groups({}), ElementsAre(ElementsAre(0)));
}

TEST(MeshTest, GroupsOfOneAxis) {
  const Mesh mesh = MeshOf({{"replicate", 2}, {"shard", 3}});
  EXPECT_THAT(mesh.GroupOf(4, {"shard"}), ElementsAre(3, 4, 5));
  EXPECT_THAT(mesh.GroupOf(4, {"replicate"}), ElementsAre(1, 4));
  EXPECT_THAT(mesh.Groups({"replicate"}),
              ElementsAre(ElementsAre(0, 3), ElementsAre(1, 4), ElementsAre(2, 5)));
}

TEST(MeshTest, GroupOrderIsThatOfTheAxesAsked) {
  const Mesh mesh = MeshOf({{"replicate", 2}, {"shard", 3}});
  EXPECT_THAT(mesh.GroupOf(5, {"replicate", "shard"}), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(mesh.GroupOf(5, {"shard", "replicate"}), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_EQ(mesh.GroupIndex(4, {"shard", "replicate"}), 3);
}

// Ranks belong together exactly when they agree on every other axis.
TEST(MeshTest, RandomGroupsPartitionTheRanks) {
  std::mt19937_64 random(testing::kSeed);
  for (int round = 0; round < 300; ++round) {
    std::vector<MeshAxis> axes;
    for (uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      axes.push_back({"a" + std::to_string(i), static_cast<int64_t>(1 + random() % 4)});
    }
    const Mesh mesh = MeshOf(axes);
    std::vector<std::string> chosen;
    for (const MeshAxis& axis : axes) {
      if (random() % 2 == 0) {
        chosen.push_back(axis.name);
      }
    }
    std::shuffle(chosen.begin(), chosen.end(), random);
    SCOPED_TRACE(mesh.Text() + ", round " + std::to_string(round));
    std::multiset<int64_t> seen;
    for (const std::vector<int64_t>& group : mesh.Groups(chosen)) {
      for (size_t place = 0; place < group.size(); ++place) {
        seen.insert(group[place]);
        EXPECT_EQ(mesh.GroupIndex(group[place], chosen), static_cast<int64_t>(place));
        EXPECT_EQ(mesh.GroupOf(group[place], chosen), group);
        for (size_t i = 0; i < axes.size(); ++i) {
          if (std::find(chosen.begin(), chosen.end(), axes[i].name) == chosen.end()) {
            EXPECT_EQ(mesh.CoordinateOf(group[place])[i], mesh.CoordinateOf(group[0])[i]);
          }
        }
      }
    }
    ASSERT_EQ(seen.size(), static_cast<size_t>(mesh.rank_count()));
    ASSERT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
  }
}

TEST(MeshTest, ExpertViewRenumbersNobody) {
  const Mesh mesh = MeshOf({{"replicate", 2}, {"shard", 6}, {"tensor", 2}});
  const absl::StatusOr<Mesh> view = mesh.ExpertView(3);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->Text(), "replicate 2 x shard 2 x expert 3 x tensor 2");
  EXPECT_EQ(view->rank_count(), mesh.rank_count());
  for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
    const Coordinate whole = mesh.CoordinateOf(rank);
    const Coordinate split = view->CoordinateOf(rank);
    EXPECT_EQ(split[1] * 3 + split[2], whole[1]);
    EXPECT_EQ(split[0], whole[0]);
    EXPECT_EQ(split[3], whole[2]);
  }
}

// Four ranks, two expert ranks: {0,2} and {1,3} hold the same experts and reduce them together.
TEST(MeshTest, RanksThatShareExpertsAreAnAxisOfTheView) {
  const absl::StatusOr<Mesh> view = MeshOf({{"shard", 4}}).ExpertView(2);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_THAT(view->Groups({"shard"}), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
  EXPECT_THAT(view->Groups({"expert"}), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
}

TEST(MeshTest, TenThousandRanksAreArithmetic) {
  const Mesh mesh = MeshOf({{"replicate", 10}, {"shard", 125}, {"tensor", 8}});
  EXPECT_EQ(mesh.rank_count(), 10000);
  EXPECT_EQ(mesh.RankOf(mesh.CoordinateOf(9999)), 9999);
  EXPECT_EQ(mesh.GroupOf(9999, {"replicate"}).size(), 10u);
}

struct BadMesh {
  std::vector<MeshAxis> axes;
  std::string says;
};
TEST(MeshTest, RefusalsNameTheAxis) {
  const std::vector<BadMesh> bad = {
      {{{"shard", 0}}, "axis shard: size 0"},
      {{{"shard", -2}}, "axis shard: size -2"},
      {{{"shard", 2}, {"shard", 3}}, "axis shard appears twice"},
      {{{"shard", 2}, {"", 3}}, "axis 1 has no name"},
      {{{"replicate", 1 << 20}, {"shard", 1 << 20}}, "axis shard: more than"},
      {{{"replicate", INT64_MAX}, {"shard", INT64_MAX}}, "axis replicate: more than"},
  };
  for (const BadMesh& mesh : bad) {
    const absl::Status status = Mesh::Create(mesh.axes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(mesh.says));
  }
}

TEST(MeshTest, SplitsThatDoNotFitAreRefused) {
  const Mesh mesh = MeshOf({{"shard", 6}, {"tensor", 2}});
  EXPECT_THAT(std::string(mesh.ExpertView(4).status().message()), HasSubstr("expert"));
  EXPECT_FALSE(mesh.ExpertView(0).ok());
  EXPECT_FALSE(mesh.Split("shard", {"outer", 2}, {"inner", 4}).ok());
  EXPECT_THAT(std::string(mesh.Split("expert", {"a", 1}, {"b", 1}).status().message()),
              HasSubstr("no axis expert"));
  EXPECT_THAT(std::string(mesh.Split("shard", {"shard", 3}, {"tensor", 2}).status().message()),
              HasSubstr("tensor appears twice"));
}

}  // namespace
}  // namespace ravel::plan
