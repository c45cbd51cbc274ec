// Ids of different kinds of things do not mix, and know their positions.

#include "common/model/ids.h"

#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/sharding_plan.h"

namespace ravel::plan {
namespace {

template <typename Vector, typename Index>
concept Indexes = requires(Vector vector, Index index) {
  vector[index];
};

template <typename A, typename B>
concept Compares = requires(A a, B b) {
  a == b;
}
|| requires(A a, B b) {
  a < b;
};

template <typename To, typename From>
concept Becomes = std::is_convertible_v<From, To> || std::is_constructible_v<To, From> ||
    std::is_assignable_v<To&, From>;

// Each kind indexes its own vectors, and no others.
static_assert(Indexes<ProgramBuffers, BufferId>);
static_assert(!Indexes<ProgramBuffers, GroupId>);
static_assert(!Indexes<ProgramBuffers, InstructionId>);
static_assert(Indexes<GroupLayouts, GroupId>);
static_assert(!Indexes<GroupLayouts, BufferId>);
static_assert(!Indexes<GroupLayouts, UnitId>);
static_assert(Indexes<RolesOfGroups, GroupId>);
static_assert(!Indexes<RolesOfGroups, UnitId>);
static_assert(Indexes<decltype(ModelInventory::units), UnitId>);
static_assert(!Indexes<decltype(ModelInventory::units), TensorId>);
static_assert(Indexes<decltype(ModelInventory::tensors), TensorId>);
static_assert(!Indexes<decltype(ModelInventory::tensors), UnitId>);
static_assert(Indexes<decltype(StepProgram::instructions), InstructionId>);
static_assert(!Indexes<decltype(StepProgram::instructions), BufferId>);
// Nor those of the standard library.
static_assert(!Indexes<std::vector<int>, BufferId>);

static_assert(Compares<GroupId, GroupId>);
static_assert(!Compares<GroupId, UnitId>);
static_assert(!Compares<BufferId, InstructionId>);
static_assert(!Compares<TensorId, BufferId>);

static_assert(!Becomes<GroupId, UnitId>);
static_assert(!Becomes<UnitId, GroupId>);
static_assert(!Becomes<BufferId, InstructionId>);
static_assert(!Becomes<InstructionId, TensorId>);
// An id is no number by itself.
static_assert(!std::is_convertible_v<BufferId, int>);
static_assert(!std::is_convertible_v<BufferId, size_t>);

TEST(Ids, NoneIsBeforeTheFirst) {
  EXPECT_EQ(GroupId(), -1);
  EXPECT_LT(GroupId(), GroupId(0));
  EXPECT_EQ(BufferId(7).value(), 7);
}

TEST(Ids, AVectorGivesOutItsIdsInOrder) {
  IdVector<UnitId, std::string> units;
  EXPECT_EQ(units.Add("embed"), 0);
  EXPECT_EQ(units.Add("head"), 1);
  EXPECT_EQ(units[UnitId(1)], "head");
  EXPECT_EQ(units.last_id(), 1);
  std::vector<UnitId> seen;
  for (const UnitId unit : units.ids()) {
    seen.push_back(unit);
  }
  EXPECT_EQ(seen, (std::vector<UnitId>{0, 1}));
}

TEST(Ids, AVectorHasWhatIsInIt) {
  const IdVector<BufferId, bool> written(3, false);
  EXPECT_TRUE(written.Has(0));
  EXPECT_TRUE(written.Has(2));
  EXPECT_FALSE(written.Has(3));
  EXPECT_FALSE(written.Has(BufferId()));
  EXPECT_FALSE((IdVector<BufferId, bool>().Has(0)));
}

}  // namespace
}  // namespace ravel::plan
