// Submissions that share a transaction.

#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/fake_world.h"

namespace ravel::coordinator {
namespace {

TEST(SubmitAll, ARequestThatIsRepeatedInOneGroupGivesTheSameJob) {
  FakeWorld world;
  world.StartCoordinator();
  const plan::JobSpec spec = world.Spec("job", {1}, 8);
  std::vector<SubmitDraft> drafts;
  drafts.push_back(world.Draft(spec, "one"));
  drafts.push_back(world.Draft(world.Spec("other", {1}, 8), "two"));
  drafts.push_back(world.Draft(spec, "one"));
  drafts.push_back(world.Draft(spec, "three"));
  const std::vector<absl::StatusOr<JobView>> answers =
      world.controller().SubmitAll(std::move(drafts));
  ASSERT_EQ(answers.size(), 4U);
  ASSERT_TRUE(answers[0].ok() && answers[1].ok() && answers[2].ok()) << answers[2].status();
  EXPECT_EQ(answers[0]->record.uid, answers[2]->record.uid);
  EXPECT_NE(answers[0]->record.uid, answers[1]->record.uid);
  EXPECT_TRUE(absl::IsAlreadyExists(answers[3].status())) << "the same name";
  EXPECT_EQ(world.controller().List().size(), 2U);
}

}  // namespace
}  // namespace ravel::coordinator
