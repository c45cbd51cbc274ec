// Copies that are under way, and what those leave that are killed.

#include "coordinator/saves/copy_marks.h"

#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/store/memory_store.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/retention.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/watched_store.h"

namespace ravel::coordinator {
namespace {

using store::MemoryStore;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

ckpt::AttemptKey CopyOf(int64_t step) {
  return {.step = step, .epoch = 1, .attempt = kCopyAttempt + 7, .job_tag = 0xbeef};
}

class CopyMarksTest : public ::testing::Test {
 protected:
  // A copy that has begun.
  std::unique_ptr<CopyMark> Begin(int64_t step) {
    auto mark = CopyMark::Make(&store_, CopyOf(step), clock_);
    EXPECT_TRUE(mark.ok()) << mark.status();
    Leave(step);
    return *std::move(mark);
  }
  void Leave(int64_t step) {
    const std::string name = ckpt::AttemptName(CopyOf(step));
    ASSERT_TRUE(store_.MakeDirectory(name).ok());
    ASSERT_TRUE(store_.Put(name + "/file", "bytes").ok());
  }
  bool IsThere(int64_t step) const {
    return *store::Exists(store_, ckpt::AttemptName(CopyOf(step)));
  }
  std::vector<std::string> Marks() const {
    std::vector<std::string> names;
    const auto entries = store_.List(ckpt::kPinsFolder);
    for (const store::ListedEntry& entry : entries.value_or(std::vector<store::ListedEntry>())) {
      names.push_back(entry.name);
    }
    return names;
  }
  // The mark of a process that is no more: `change` gets its lines.
  template <typename Change>
  void PutMark(int64_t step, const Change& change) {
    const std::unique_ptr<CopyMark> mark = Begin(step);
    const std::string path = absl::StrCat("pins/", Marks().back());
    std::vector<std::string> lines = absl::StrSplit(*store::ReadFile(store_, path, 4096), '\n');
    ASSERT_EQ(lines.size(), 5u);
    change(lines);
    ASSERT_TRUE(
        store_.Put(absl::StrReplaceAll(path, {{"copy-", "copy-0"}}), absl::StrJoin(lines, "\n"))
            .ok());
  }
  std::vector<std::string> Remove(const std::string& own = "") {
    const auto removed = RemoveDeadCopies(store_, clock_.WallMs(), own);
    EXPECT_TRUE(removed.ok()) << removed.status();
    return removed.value_or(std::vector<std::string>());
  }

  testing::FakeClock clock_;
  MemoryStore store_;
};

TEST_F(CopyMarksTest, ACopyThatIsUnderWayStaysAndItsMarkGoesWithIt) {
  {
    const auto copy = Begin(10);
    EXPECT_THAT(Remove(), IsEmpty());
    EXPECT_TRUE(IsThere(10));
  }
  EXPECT_THAT(Marks(), IsEmpty());
  EXPECT_THAT(Remove(), IsEmpty()) << "it was interrupted, and may go on";
  EXPECT_TRUE(IsThere(10));
}

TEST_F(CopyMarksTest, WhatAKilledProcessLeftGoesAtOnce) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  PutMark(10, [&](std::vector<std::string>& lines) { lines[2] = std::to_string(child); });
  const auto other = Begin(20);
  EXPECT_THAT(Remove(), ElementsAre(ckpt::AttemptName(CopyOf(10))));
  EXPECT_FALSE(IsThere(10));
  EXPECT_TRUE(IsThere(20));
  EXPECT_EQ(Marks().size(), 1u);
}

TEST_F(CopyMarksTest, AProcessOfAnotherHostIsBelievedUntilItsMarkRunsOut) {
  PutMark(10, [](std::vector<std::string>& lines) {
    lines[1] = "another boot";
    lines[2] = "1";
  });
  clock_.AdvanceMs((kCopyMarkSeconds - 1) * 1000);
  EXPECT_THAT(Remove(), IsEmpty());
  clock_.AdvanceMs(2000);
  EXPECT_THAT(Remove(ckpt::AttemptName(CopyOf(10))), IsEmpty()) << "the caller goes on with it";
  EXPECT_TRUE(IsThere(10));
  EXPECT_THAT(Marks(), IsEmpty()) << "the caller has a mark of its own";
  PutMark(20, [](std::vector<std::string>& lines) { lines[1] = "another boot"; });
  clock_.AdvanceMs((kCopyMarkSeconds + 1) * 1000);
  EXPECT_THAT(Remove(), ElementsAre(ckpt::AttemptName(CopyOf(20))));
}

TEST_F(CopyMarksTest, AProcessWhoseNumberIsAnothersNowIsGone) {
  PutMark(10, [](std::vector<std::string>& lines) { lines[3] = "1"; });
  EXPECT_THAT(Remove(), ElementsAre(ckpt::AttemptName(CopyOf(10))));
  EXPECT_THAT(Marks(), IsEmpty());
}

TEST_F(CopyMarksTest, ALaunchAndRetentionOfAJobLeaveACopyOfItsStepsAlone) {
  const auto copy = Begin(10);
  EXPECT_THAT(*CleanAttempts(store_, 0xbeef), IsEmpty());
  EXPECT_THAT(*RemoveOldLeftovers(store_, "0000beef-uid", clock_.WallMs(), 0), IsEmpty());
  EXPECT_TRUE(IsThere(10));
  const auto leftovers = *ListLeftovers(store_, "uid");
  ASSERT_EQ(leftovers.size(), 1u);
  EXPECT_EQ(LeftoverKindName(leftovers[0].kind), "unfinished copy");
  EXPECT_FALSE(leftovers[0].removable);
}

TEST_F(CopyMarksTest, RetentionRemovesWhatAKilledCopyLeftWhateverJobItIsOf) {
  PutMark(10, [](std::vector<std::string>& lines) { lines[3] = "1"; });
  EXPECT_THAT(*RemoveOldLeftovers(store_, "uid", clock_.WallMs()),
              ElementsAre(ckpt::AttemptName(CopyOf(10))));
}

// A renewed mark has another name.
TEST_F(CopyMarksTest, AMarkThatIsRenewedWhileMarksAreReadIsReadAgain) {
  PutMark(10, [](std::vector<std::string>& lines) { lines[3] = "1"; });
  const auto copy = Begin(20);
  int renewals = 1;
  testing::WatchedStore watched(&store_, [&](testing::StoreCall call, std::string_view path) {
    if (call == testing::StoreCall::kOpen && path.starts_with("pins/step-0000000020") &&
        renewals > 0) {
      --renewals;
      const std::string text = *store::ReadFile(store_, path, 4096);
      const std::string holder(path.substr(0, path.rfind('x') + 1));
      EXPECT_TRUE(store_.Put(absl::StrCat(holder, 9'000'000'000 + renewals), text).ok());
      EXPECT_TRUE(store_.Withdraw(path).ok());
    }
    return absl::OkStatus();
  });
  const auto removed = RemoveDeadCopies(watched, clock_.WallMs());
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_THAT(*removed, ElementsAre(ckpt::AttemptName(CopyOf(10))));
  EXPECT_TRUE(IsThere(20));
  PutMark(10, [](std::vector<std::string>& lines) { lines[3] = "1"; });
  renewals = 1000;
  const absl::Status restless = RemoveDeadCopies(watched, clock_.WallMs()).status();
  EXPECT_TRUE(absl::IsUnavailable(restless))
      << "NotFound is a success to who deletes: " << restless;
  EXPECT_TRUE(IsThere(10));
}

// A withdrawal renames first, so that a copy that goes on meanwhile finds it whole or gone.
TEST_F(CopyMarksTest, ARemovalThatWasCutOffIsFinished) {
  ckpt::AttemptKey removed = CopyOf(10);
  removed.attempt += ckpt::kRemovedAttempt;
  ASSERT_TRUE(store_.MakeDirectory(ckpt::AttemptName(removed)).ok());
  EXPECT_THAT(Remove(), ElementsAre(ckpt::AttemptName(removed)));
}

}  // namespace
}  // namespace ravel::coordinator
