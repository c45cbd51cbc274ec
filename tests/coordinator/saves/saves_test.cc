#include "coordinator/saves/saves.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/memory_store.h"
#include "common/store/step_verifier.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/step_inspection.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {
namespace {

using store::MemoryStore;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20240607;
constexpr ckpt::AttemptKey kOld = {.step = 10, .epoch = 1, .attempt = 1};
constexpr ckpt::AttemptKey kNew = {.step = 20, .epoch = 1, .attempt = 1};

testing::SavedWorld SmallWorld(int64_t ranks = 2) {
  return testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), ranks, kSeed);
}

// Steps that a restore may use, each of which must verify byte for byte.
std::set<int64_t> LoadableSteps(const MemoryStore& store) {
  std::set<int64_t> steps;
  const absl::StatusOr<StepListing> listing = ListSteps(store);
  EXPECT_TRUE(listing.ok()) << listing.status();
  for (const CommittedStepInfo& info : listing->steps) {
    const store::VerifyReport report =
        store::VerifyStep(store, info.directory, store::VerifyDepth::kDeep);
    EXPECT_TRUE(report.ok()) << info.directory << ": " << report.problems.front().Text();
    steps.insert(info.step);
  }
  EXPECT_TRUE(listing->damaged.empty());
  return steps;
}

TEST(SavesTest, ACommittedStepIsListedAndItsAttemptGone) {
  MemoryStore store;
  const auto committed = testing::Save(store, SmallWorld(), kNew);
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->directory, "step-0000000020");
  EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{20});
  EXPECT_TRUE(ListAttempts(store)->empty());
  EXPECT_FALSE(*store::Exists(store, "step-0000000020/seals"));
  const absl::StatusOr<std::vector<store::ListedEntry>> entries = store.List("step-0000000020");
  EXPECT_EQ(entries->size(), 5u);  // COMMIT, manifest.pb, model, optim, hf
}

TEST(SavesTest, CommittingTwiceIsTheSameStep) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  const auto seals = testing::WriteAllRanks(store, saved, kNew);
  const SaveContext context = testing::ContextOf(saved, kNew);
  const auto first = CommitSave(store, saved.save_plan, context, *seals);
  const auto second = CommitSave(store, saved.save_plan, context, *seals);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(first->commit, second->commit);
}

TEST(SavesTest, ASecondSaveOfAStepLoses) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
  const auto lost = testing::Save(store, saved, {.step = 20, .epoch = 2, .attempt = 1});
  EXPECT_TRUE(absl::IsAlreadyExists(lost.status()));
  EXPECT_THAT(std::string(lost.status().message()),
              HasSubstr("step-0000000020 is committed already, by epoch 1"));
  EXPECT_EQ(ListSteps(store)->steps.front().commit.epoch, 1);
}

TEST(SavesTest, TheSaveOfAnotherJobIsNotTakenForOurs) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
  // The same step, epoch and attempt: another job in the same folder.
  const auto seals = testing::WriteAllRanks(store, saved, kNew);
  SaveContext context = testing::ContextOf(saved, kNew);
  context.job = "another";
  EXPECT_TRUE(absl::IsAlreadyExists(CommitSave(store, saved.save_plan, context, *seals).status()));
  const auto settled = SettleAttempt(store, saved.save_plan, context);
  ASSERT_TRUE(settled.ok()) << settled.status();
  EXPECT_NE(settled->state, SettledState::kCommitted);
}

TEST(SavesTest, TwoCoordinatorsOfOneAttemptDescribeOneStep) {
  // The second starts at every operation of the first, which then goes on.
  const testing::SavedWorld saved = SmallWorld();
  MemoryStore counting;
  const auto counted = testing::WriteAllRanks(counting, saved, kNew);
  const int64_t begin = counting.operations();
  SaveContext first = testing::ContextOf(saved, kNew);
  SaveContext second = first;
  second.created_ns += 1000;
  ASSERT_TRUE(CommitSave(counting, saved.save_plan, first, *counted).ok());
  const int64_t operations = counting.operations() - begin;
  ASSERT_GT(operations, 10);
  for (int64_t at = 0; at < operations; ++at) {
    SCOPED_TRACE(at);
    MemoryStore store;
    const auto seals = testing::WriteAllRanks(store, saved, kNew);
    store.FailFrom(store.operations() + at, absl::UnavailableError("stopped here"));
    EXPECT_FALSE(CommitSave(store, saved.save_plan, first, *seals).ok());
    store.FailFrom(-1, absl::OkStatus());
    const auto by_second = CommitSave(store, saved.save_plan, second, *seals);
    ASSERT_TRUE(by_second.ok()) << by_second.status();
    const auto by_first = CommitSave(store, saved.save_plan, first, *seals);
    ASSERT_TRUE(by_first.ok()) << by_first.status();
    EXPECT_EQ(by_first->commit, by_second->commit);
    EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{20});
  }
}

enum class Crash { kProcess, kPowerDurableOnly, kPowerEntriesKept };

void Apply(MemoryStore& store, Crash crash) {
  store.FailFrom(-1, absl::OkStatus());
  if (crash == Crash::kPowerDurableOnly) {
    store.LosePower(MemoryStore::PowerLoss::kDurableOnly);
  } else if (crash == Crash::kPowerEntriesKept) {
    store.LosePower(MemoryStore::PowerLoss::kEntriesKept);
  }
}

class CrashTest : public ::testing::TestWithParam<Crash> {};

INSTANTIATE_TEST_SUITE_P(Kinds,
                         CrashTest,
                         ::testing::Values(Crash::kProcess,
                                           Crash::kPowerDurableOnly,
                                           Crash::kPowerEntriesKept));

TEST_P(CrashTest, AtEveryOperationOfASaveOldOrOldAndNewIsLoadable) {
  const testing::SavedWorld saved = SmallWorld();
  MemoryStore counting;
  ASSERT_TRUE(testing::Save(counting, saved, kOld).ok());
  const int64_t begin = counting.operations();
  ASSERT_TRUE(testing::Save(counting, saved, kNew).ok());
  const int64_t end = counting.operations();
  int64_t settled = 0;
  for (int64_t at = begin; at <= end; ++at) {
    SCOPED_TRACE(at);
    MemoryStore store;
    ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
    store.FailFrom(at, absl::UnavailableError("crashed"));
    const bool finished = testing::Save(store, saved, kNew).ok();
    Apply(store, GetParam());
    const std::set<int64_t> loadable = LoadableSteps(store);
    EXPECT_TRUE(loadable == std::set<int64_t>{10} || loadable == (std::set<int64_t>{10, 20}));
    EXPECT_TRUE(!finished || loadable.size() == 2) << "a reported commit is there";
    // What a restarted coordinator finds: the save ends or is cleaned away; the next one works.
    const auto result = SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, kNew));
    ASSERT_TRUE(result.ok()) << result.status();
    const bool committed = result->state == SettledState::kCommitted;
    EXPECT_TRUE(committed || loadable.size() == 1) << result->reason;
    settled += committed && loadable.size() == 1 ? 1 : 0;
    ASSERT_TRUE(CleanAttempts(store, std::nullopt).ok());
    EXPECT_EQ(LoadableSteps(store).size(), committed ? 2u : 1u);
    const auto retried = testing::Save(store, saved, {.step = 20, .epoch = 2, .attempt = 1});
    EXPECT_TRUE(committed ? absl::IsAlreadyExists(retried.status()) : retried.ok())
        << retried.status();
    EXPECT_EQ(LoadableSteps(store).size(), 2u);
  }
  EXPECT_GT(settled, 3) << "sealed saves are finished after a restart";
}

TEST_P(CrashTest, AtEveryOperationOfSettlingAndItIsRepeated) {
  const testing::SavedWorld saved = SmallWorld();
  for (int64_t at = 0; at < 60; ++at) {
    SCOPED_TRACE(at);
    MemoryStore store;
    ASSERT_TRUE(testing::WriteAllRanks(store, saved, kNew).ok());
    store.FailFrom(store.operations() + at, absl::UnavailableError("crashed"));
    const auto first = SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, kNew));
    Apply(store, GetParam());
    const auto second = SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, kNew));
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(second->state, SettledState::kCommitted) << second->reason;
    EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{20});
    if (first.ok()) {
      EXPECT_GT(at, 10);
      return;  // all operations have been tried
    }
  }
  FAIL() << "settling has more operations than were tried";
}

TEST_P(CrashTest, AtEveryOperationOfDeletingTheOtherStepsStay) {
  const testing::SavedWorld saved = SmallWorld();
  for (int64_t at = 0; at < 60; ++at) {
    SCOPED_TRACE(at);
    MemoryStore store;
    ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
    ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
    store.FailFrom(store.operations() + at, absl::UnavailableError("crashed"));
    const auto first = ApplyRetention(store, {.keep_last = 1}, {});
    Apply(store, GetParam());
    const absl::StatusOr<StepListing> listing = ListSteps(store);
    ASSERT_TRUE(listing.ok());
    for (const CommittedStepInfo& info : listing->steps) {
      EXPECT_TRUE(store::VerifyStep(store, info.directory, store::VerifyDepth::kDeep).ok())
          << info.directory;
    }
    ASSERT_FALSE(listing->steps.empty());
    EXPECT_EQ(listing->steps.front().step, 20);
    ASSERT_TRUE(ApplyRetention(store, {.keep_last = 1}, {}).ok());
    EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{20});
    EXPECT_FALSE(*store::Exists(store, "step-0000000010"));
    if (first.ok()) {
      EXPECT_GT(at, 5);
      return;
    }
  }
  FAIL() << "deleting has more operations than were tried";
}

TEST(SavesTest, AnIncompleteAttemptSaysWhoseSealIsMissing) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld(3);
  ASSERT_TRUE(testing::WriteRank(store, saved, kNew, 0).ok());
  ASSERT_TRUE(testing::WriteRank(store, saved, kNew, 2).ok());
  const auto result = SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, kNew));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->state, SettledState::kIncomplete);
  EXPECT_EQ(result->reason, "seal of writer 1 is missing");
  ASSERT_TRUE(testing::WriteRank(store, saved, kNew, 1).ok());
  EXPECT_EQ(SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, kNew))->state,
            SettledState::kCommitted);
}

TEST(SavesTest, ADescribedAttemptNeedsNoPlan) {
  const testing::SavedWorld saved = SmallWorld();
  MemoryStore store;
  const auto seals = testing::WriteAllRanks(store, saved, kNew);
  // The last operations are the rename and its sync.
  MemoryStore counting;
  const auto counted = testing::WriteAllRanks(counting, saved, kNew);
  const int64_t begin = counting.operations();
  ASSERT_TRUE(
      CommitSave(counting, saved.save_plan, testing::ContextOf(saved, kNew), *counted).ok());
  store.FailFrom(store.operations() + counting.operations() - begin - 2,
                 absl::UnavailableError("crashed"));
  ASSERT_FALSE(CommitSave(store, saved.save_plan, testing::ContextOf(saved, kNew), *seals).ok());
  store.FailFrom(-1, absl::OkStatus());
  EXPECT_TRUE(LoadableSteps(store).empty());
  const auto result = SettleDescribedAttempt(store, testing::ContextOf(saved, kNew).job, kNew);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->state, SettledState::kCommitted) << result->reason;
  EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{20});
}

struct BadSeal {
  const char* name;
  std::function<void(std::vector<ckpt::Seal>&)> change;
  const char* message;
};
void PrintTo(const BadSeal& value, std::ostream* out) {
  *out << value.name;
}

class BadSealTest : public ::testing::TestWithParam<BadSeal> {};

TEST_P(BadSealTest, IsRefusedAndNothingIsCommitted) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  auto seals = testing::WriteAllRanks(store, saved, kNew);
  ASSERT_TRUE(seals.ok());
  GetParam().change(*seals);
  const auto committed =
      CommitSave(store, saved.save_plan, testing::ContextOf(saved, kNew), *seals);
  ASSERT_FALSE(committed.ok());
  EXPECT_THAT(std::string(committed.status().message()), HasSubstr(GetParam().message));
  EXPECT_TRUE(LoadableSteps(store).empty());
}

INSTANTIATE_TEST_SUITE_P(
    Corpus,
    BadSealTest,
    ::testing::Values(
        BadSeal{"missing", [](auto& s) { s.pop_back(); }, "seal of writer 1 is missing"},
        BadSeal{"twice", [](auto& s) { s[1] = s[0]; }, "writer 0: appears twice"},
        BadSeal{"unknown writer", [](auto& s) { s[1].writer = 5; }, "the save has writers 0 to 1"},
        BadSeal{"epoch",
                [](auto& s) { s[1].epoch = 9; },
                "is of step-0000000020.e9.a1.tmp, expected step-0000000020.e1.a1.tmp"},
        BadSeal{"step", [](auto& s) { s[0].step = 19; }, "is of step-0000000019"},
        BadSeal{"plan",
                [](auto& s) { s[1].save_plan_hash[0] ^= 1; },
                "writer 1: was made with another save plan"},
        BadSeal{"file missing", [](auto& s) { s[1].files.pop_back(); }, "writer 1: "},
        BadSeal{"file size",
                [](auto& s) { s[1].files[0].size += 4; },
                "the plan says model/shard-00002"},
        BadSeal{"foreign file",
                [](auto& s) { s[1].files.push_back({.path = "hf/config.json", .size = 2}); },
                "writer 1: hf/config.json is not in the plan"},
        BadSeal{"nested file",
                [](auto& s) { s[0].files.back().path = "hf/../x"; },
                "writer 0: hf/../x is not in the plan"},
        BadSeal{"chunk missing", [](auto& s) { s[1].chunks.pop_back(); }, "a chunk is missing"},
        BadSeal{"chunk moved",
                [](auto& s) { s[1].chunks[0].chunk.data_offset += 4; },
                "is not the plan's chunk"},
        BadSeal{"chunk renamed",
                [](auto& s) { s[1].chunks[0].tensor = "x"; },
                "tensor x is not the plan's chunk"},
        BadSeal{"block sums",
                [](auto& s) { s[1].chunks[0].chunk.block_crc32c.push_back(1); },
                "is not the plan's chunk"},
        BadSeal{"extra chunk",
                [](auto& s) { s[1].chunks.push_back(s[1].chunks[0]); },
                "is not in the plan"},
        BadSeal{"digest missing", [](auto& s) { s[1].tensors.pop_back(); }, "is missing"},
        BadSeal{"foreign digest",
                [](auto& s) {
                  s[1].tensors.push_back({"x", 1});
                },
                "digest of x, which it did not write"},
        BadSeal{"foreign blob",
                [](auto& s) {
                  s[1].blobs.push_back({"rng", "x"});
                },
                "blob \"rng\" is not from writer 0"},
        BadSeal{"repeated blob",
                [](auto& s) { s[0].blobs.push_back(s[0].blobs[0]); },
                "blob \"data\""}));

TEST(SavesTest, AFileThatVanishedBeforeTheCommitIsNamed) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  const auto seals = testing::WriteAllRanks(store, saved, kNew);
  const std::string path = (*seals)[1].files[0].path;
  ASSERT_TRUE(store.Truncate(store::JoinPath(ckpt::AttemptName(kNew), path), 100).ok());
  const auto committed =
      CommitSave(store, saved.save_plan, testing::ContextOf(saved, kNew), *seals);
  EXPECT_THAT(std::string(committed.status().message()),
              HasSubstr(path + ": 100 bytes, sealed with"));
  EXPECT_TRUE(LoadableSteps(store).empty());
}

// As the record of the job of testing::ContextOf has it.
absl::StatusOr<RestoreChoice> Choose(MemoryStore& store, int64_t committed_step) {
  return ChooseRestore(
      store,
      {.job_uid = "job-1", .committed_step = committed_step, .has_commit = committed_step >= 0});
}

TEST(SavesTest, ASaveThatMadeRoomForANewerOneIsToldSo) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  const auto seals = testing::WriteAllRanks(store, saved, kOld);
  ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
  ASSERT_TRUE(store.Withdraw(ckpt::AttemptName(kOld)).ok());
  const absl::Status late =
      CommitSave(store, saved.save_plan, testing::ContextOf(saved, kOld), *seals).status();
  EXPECT_TRUE(absl::IsDataLoss(late)) << late;
  EXPECT_THAT(std::string(late.message()),
              HasSubstr("it was removed, because a newer checkpoint is kept: step-0000000020"));
}

// As when trainers removed it, because newer ones were whole: no step says so yet.
TEST(SavesTest, ASaveThatIsGoneWithoutANewerStepIsNotFound) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  const auto seals = testing::WriteAllRanks(store, saved, kOld);
  ASSERT_TRUE(store.Withdraw(ckpt::AttemptName(kOld)).ok());
  const absl::Status late =
      CommitSave(store, saved.save_plan, testing::ContextOf(saved, kOld), *seals).status();
  EXPECT_TRUE(absl::IsNotFound(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("it was removed before it was committed"));
}

TEST(SavesTest, RestoreTakesTheNewestGoodStep) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  EXPECT_EQ(Choose(store, -1)->step, -1) << "nothing yet, and nothing recorded";
  for (const int64_t step : {10, 20, 30}) {
    ASSERT_TRUE(testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1}).ok());
  }
  EXPECT_EQ(Choose(store, -1)->step, 30) << "committed, though the record of it was lost";
  EXPECT_EQ(Choose(store, 30)->fallback_reason, "");
  ASSERT_TRUE(MarkBad(store, 30, "model/x: tensor y, block 3").ok());
  ASSERT_TRUE(MarkBad(store, 30, "another reason").ok());
  EXPECT_EQ(Choose(store, 30)->step, 20);
  EXPECT_EQ(Choose(store, 30)->fallback_reason, "step 30: model/x: tensor y, block 3");
  EXPECT_EQ(ListSteps(store)->steps.front().bad_reason, "model/x: tensor y, block 3");
  ASSERT_TRUE(UnmarkBad(store, 30).ok());
  EXPECT_EQ(Choose(store, 30)->step, 30);
  EXPECT_TRUE(absl::IsNotFound(UnmarkBad(store, 30)));
}

TEST(SavesTest, StepsOfAnotherJobAreNotTaken) {
  MemoryStore store;
  ASSERT_TRUE(testing::Save(store, SmallWorld(), kNew).ok());
  const auto choice =
      ChooseRestore(store, {.job_uid = "another", .committed_step = -1, .has_commit = false});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->step, -1);
  // But for those that its record says it began from.
  EXPECT_EQ(
      ChooseRestore(store, {.job_uid = "another", .committed_step = 20, .has_commit = true})->step,
      20);
}

constexpr const char* kModelFile =
    "step-0000000020/model/shard-00001-model-00001-of-00001.safetensors";

TEST(SavesTest, ProvenDamageIsMarkedAndThePreviousStepUsed) {
  const std::vector<std::function<void(MemoryStore&)>> damages = {
      [&](MemoryStore& store) { ASSERT_TRUE(store.FlipBit(kModelFile, 30, 1).ok()); },
      [&](MemoryStore& store) {
        ASSERT_TRUE(store.FlipBit("step-0000000020/manifest.pb", 50, 1).ok());
      },
      [&](MemoryStore& store) {
        ASSERT_TRUE(store.Overwrite("step-0000000020/COMMIT", "{\"format\": 1}\n").ok());
      }};
  for (const auto& damage : damages) {
    MemoryStore store;
    const testing::SavedWorld saved = SmallWorld();
    ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
    ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
    damage(store);
    const auto choice = Choose(store, 20);
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->step, 10);
    EXPECT_THAT(choice->fallback_reason, HasSubstr("step 20: "));
    EXPECT_TRUE(*store::Exists(store, "bad/step-0000000020"));
  }
}

TEST(SavesTest, WhatCannotBeReadIsNeverTakenForDamage) {
  const std::vector<std::function<void(MemoryStore&)>> losses = {
      [&](MemoryStore& store) { ASSERT_TRUE(store.Withdraw(kModelFile).ok()); },
      [&](MemoryStore& store) { ASSERT_TRUE(store.Truncate(kModelFile, 4100).ok()); },
      [&](MemoryStore& store) {
        ASSERT_TRUE(store.Truncate("step-0000000020/manifest.pb", 20).ok());
      },
      [&](MemoryStore& store) { ASSERT_TRUE(store.Truncate("step-0000000020/COMMIT", 9).ok()); },
      [&](MemoryStore& store) { ASSERT_TRUE(store.Withdraw("step-0000000020/COMMIT").ok()); },
      [&](MemoryStore& store) { ASSERT_TRUE(store.Withdraw("step-0000000020").ok()); }};
  for (const auto& lose : losses) {
    MemoryStore store;
    const testing::SavedWorld saved = SmallWorld();
    ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
    ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
    lose(store);
    const auto choice = Choose(store, 20);
    EXPECT_TRUE(absl::IsUnavailable(choice.status())) << choice.status();
    EXPECT_THAT(std::string(choice.status().message()), HasSubstr("step-0000000020"));
    EXPECT_FALSE(*store::Exists(store, "bad/step-0000000020")) << "nobody is condemned";
  }
}

TEST(SavesTest, WithoutAnyGoodStepEachIsNamedWithItsReason) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
  ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
  ASSERT_TRUE(store.FlipBit("step-0000000010/manifest.pb", 50, 1).ok());
  ASSERT_TRUE(store.FlipBit(kModelFile, 30, 1).ok());
  const auto choice = Choose(store, 20);
  ASSERT_TRUE(absl::IsDataLoss(choice.status())) << choice.status();
  EXPECT_THAT(std::string(choice.status().message()),
              HasSubstr("step 10: manifest.pb: checksum is not COMMIT's"));
  EXPECT_THAT(std::string(choice.status().message()), HasSubstr("step 20: model/shard-"));
}

TEST(SavesTest, AnEmptyFolderIsNotTakenForNoProgress) {
  MemoryStore store;
  EXPECT_TRUE(absl::IsUnavailable(Choose(store, 20).status()));
}

TEST(SavesTest, ADeepLookFindsAFlippedBitInTheData) {
  MemoryStore store;
  ASSERT_TRUE(testing::Save(store, SmallWorld(), kNew).ok());
  ASSERT_TRUE(store.FlipBit(kModelFile, 4096, 1).ok());
  EXPECT_EQ(InspectStep(store, 20).condition, StepCondition::kGood);
  const StepInspection deep = InspectStep(store, 20, InspectionDepth::kDeep);
  EXPECT_EQ(deep.condition, StepCondition::kDamaged);
  EXPECT_THAT(deep.reason, HasSubstr("crc32c"));
}

TEST(SavesTest, ABadStepMakesRoomForANewSaveOfItsNumber) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  ASSERT_TRUE(testing::Save(store, saved, kNew).ok());
  ASSERT_TRUE(MarkBad(store, 20, "flipped").ok());
  const auto again = testing::Save(store, saved, {.step = 20, .epoch = 2, .attempt = 1});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->commit.epoch, 2);
  EXPECT_FALSE(ListSteps(store)->steps.front().bad);
  EXPECT_TRUE(*store::Exists(store, "bad/step-0000000020.e2.a1.step/manifest.pb"))
      << "kept for inspection";
  EXPECT_EQ(*store::ReadFile(store, "bad/step-0000000020.e2.a1.reason", 100), "flipped");
}

TEST(SavesTest, AttemptsAreListedAndCleaned) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  const ckpt::AttemptKey other = {
      .step = 20, .epoch = 2, .attempt = 3, .job_tag = ckpt::JobTag("another")};
  ASSERT_TRUE(testing::WriteAllRanks(store, saved, kNew).ok());
  ASSERT_TRUE(testing::WriteAllRanks(store, saved, other).ok());
  ASSERT_TRUE(testing::Save(store, saved, kOld).ok());
  EXPECT_EQ(*ListAttempts(store), (std::vector<ckpt::AttemptKey>{kNew, other}));
  const std::vector<ckpt::AttemptKey> keep = {other};
  EXPECT_EQ(*CleanAttempts(store, std::nullopt), std::vector<ckpt::AttemptKey>{kNew});
  EXPECT_EQ(*ListAttempts(store), keep) << "of another job: its tag is not ours";
  EXPECT_EQ(LoadableSteps(store), std::set<int64_t>{10});
}

CommittedStepInfo Info(int64_t step, bool bad = false, bool pinned = false) {
  CommittedStepInfo info;
  info.step = step;
  info.bad = bad;
  info.pinned = pinned;
  return info;
}

TEST(RetentionTest, TheNewestGoodStepsStay) {
  const std::vector<CommittedStepInfo> steps = {
      Info(50, true), Info(40), Info(30), Info(20), Info(10), Info(0)};
  EXPECT_EQ(StepsToDelete(steps, {.keep_last = 2}, {}), (std::vector<int64_t>{0, 10, 20}));
  EXPECT_EQ(StepsToDelete(steps, {.keep_last = 2, .every_steps = 20}, {}),
            (std::vector<int64_t>{10}));
  EXPECT_EQ(StepsToDelete(steps, {.keep_last = 1}, {10, 30}), (std::vector<int64_t>{0, 20}));
  EXPECT_TRUE(StepsToDelete(steps, {.keep_last = 9}, {}).empty());
  EXPECT_TRUE(StepsToDelete({}, {.keep_last = 1}, {}).empty());
}

TEST(RetentionTest, PinnedAndBadStepsStay) {
  const std::vector<CommittedStepInfo> steps = {
      Info(40), Info(30, true), Info(20, false, true), Info(10)};
  EXPECT_EQ(StepsToDelete(steps, {.keep_last = 1}, {}), (std::vector<int64_t>{10}));
}

TEST(RetentionTest, OnlyTheLastStaysOnTheStore) {
  MemoryStore store;
  const testing::SavedWorld saved = SmallWorld();
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1}).ok());
  }
  EXPECT_EQ(*ApplyRetention(store, {.keep_last = 2}, {}), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(LoadableSteps(store), (std::set<int64_t>{3, 4}));
  EXPECT_TRUE(ApplyRetention(store, {.keep_last = 2}, {})->empty());
}

}  // namespace
}  // namespace ravel::coordinator
