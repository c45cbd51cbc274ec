#include "worker/checkpoint/unacknowledged.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/memory_store.h"

namespace ravel::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class UnacknowledgedTest : public ::testing::Test {
 protected:
  // An attempt with seals of the first `seals` of two ranks.
  void Attempt(int64_t step, int seals) {
    const ckpt::AttemptKey key{step, 1, 1};
    const std::string folder = store::JoinPath(ckpt::AttemptName(key), ckpt::kSealsFolder);
    ASSERT_TRUE(store::MakeDirectories(store_, folder).ok());
    for (int64_t writer = 0; writer < seals; ++writer) {
      ASSERT_TRUE(
          store_.Put(store::JoinPath(ckpt::AttemptName(key), ckpt::SealFileName(writer)), "seal")
              .ok());
    }
    attempts_.Sealed(key);
  }
  std::vector<int64_t> Trim(int64_t answered_step) {
    const auto removed = attempts_.Trim(store_, answered_step);
    EXPECT_TRUE(removed.ok()) << removed.status();
    std::vector<int64_t> steps;
    for (const ckpt::AttemptKey& key : *removed) {
      steps.push_back(key.step);
    }
    return steps;
  }
  std::vector<std::string> Folders() {
    std::vector<std::string> names;
    const auto entries = store_.List("");
    EXPECT_TRUE(entries.ok()) << entries.status();
    for (const store::ListedEntry& entry : *entries) {
      names.push_back(entry.name);
    }
    return names;
  }

  store::MemoryStore store_;
  UnacknowledgedAttempts attempts_{2, 2};
};

TEST_F(UnacknowledgedTest, TheNewestCompleteOnesStay) {
  Attempt(1, 2);
  Attempt(2, 2);
  EXPECT_THAT(Trim(-1), IsEmpty());
  Attempt(3, 2);
  EXPECT_THAT(Trim(-1), ElementsAre(1));
  EXPECT_THAT(Folders(), ElementsAre("step-0000000002.e1.a1.tmp", "step-0000000003.e1.a1.tmp"));
}

TEST_F(UnacknowledgedTest, OneThatIsNotCompletePushesNoCompleteOneOut) {
  Attempt(1, 2);
  Attempt(2, 2);
  Attempt(3, 1);
  EXPECT_THAT(Trim(-1), IsEmpty());
  Attempt(4, 1);
  EXPECT_THAT(Trim(-1), IsEmpty());
  Attempt(5, 2);
  EXPECT_THAT(Trim(-1), ElementsAre(1));
}

TEST_F(UnacknowledgedTest, WhatWasAnsweredIsLeftToTheCoordinator) {
  Attempt(1, 2);
  Attempt(2, 2);
  Attempt(3, 2);
  EXPECT_THAT(Trim(2), IsEmpty());
  EXPECT_EQ(Folders().size(), 3U);
  Attempt(4, 2);
  Attempt(5, 2);
  EXPECT_THAT(Trim(2), ElementsAre(3));
}

TEST_F(UnacknowledgedTest, OneThatWasCommittedMeanwhileIsLeftAlone) {
  Attempt(1, 2);
  ASSERT_TRUE(store_.PublishIfAbsent("step-0000000001.e1.a1.tmp", "step-0000000001").ok());
  Attempt(2, 2);
  Attempt(3, 2);
  EXPECT_THAT(Trim(-1), IsEmpty()) << "not removed here";
  EXPECT_THAT(
      Folders(),
      ElementsAre("step-0000000001", "step-0000000002.e1.a1.tmp", "step-0000000003.e1.a1.tmp"));
}

}  // namespace
}  // namespace ravel::checkpoint
