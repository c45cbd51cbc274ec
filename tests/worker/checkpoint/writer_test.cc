#include "worker/checkpoint/writer.h"

#include <atomic>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mutex.h"
#include "common/store/file_store.h"
#include "common/store/memory_store.h"
#include "common/store/step_verifier.h"
#include "coordinator/saves/retention.h"
#include "tests/testing/eventually.h"
#include "tests/testing/required.h"
#include "tests/testing/saved_state.h"

namespace ravel::checkpoint {
namespace {

using ::testing::HasSubstr;

constexpr ckpt::AttemptKey kKey = {.step = 3, .epoch = 2, .attempt = 1};

SaveRequest RequestOf(const ckpt::AttemptKey& key) {
  return {.step = key.step,
          .epoch = key.epoch,
          .attempt = key.attempt,
          .sequence = 9,
          .optimizer_step = 3,
          .blobs = {}};
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ravel-writer-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A world of one rank whose shard can be written to.
class WriterTest : public ::testing::Test {
 protected:
  WriterTest() : saved_(testing::MakeWorld(testing::InventoryOf({{64, 64}}), 1, 1)) {
    for (size_t role = 0; role < shards_.size(); ++role) {
      shards_[role] = testing::ShardOf(saved_.state, saved_.world, 0, 0, role);
    }
  }
  ShardBytes Source() {
    return [this](plan::GroupId, plan::StateRole role) {
      const size_t index = role == plan::StateRole::kParam    ? 0
                           : role == plan::StateRole::kExpAvg ? 1
                                                              : 2;
      return std::as_bytes(std::span<const float>(shards_[index]));
    };
  }

  testing::SavedWorld saved_;
  std::array<std::vector<float>, 3> shards_;
  store::MemoryStore store_;
};

TEST_F(WriterTest, TrainingMayChangeTheShardAfterTheSnapshot) {
  saved_.state.optimizer_step = 3;
  CheckpointWriter writer(&store_, &saved_.save_plan, {});
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  for (std::vector<float>& shard : shards_) {
    std::fill(shard.begin(), shard.end(), 42.0f);
  }
  const auto seal = writer.Wait();
  ASSERT_TRUE(seal.ok()) << seal.status();
  EXPECT_EQ(seal->sequence, 9);
  const std::vector<ckpt::Seal> seals = {*seal};
  ASSERT_TRUE(
      coordinator::CommitSave(store_, saved_.save_plan, testing::ContextOf(saved_, kKey), seals)
          .ok());
  const auto loaded = testing::Load(store_, "step-0000000003", saved_.world.inventory, 1);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->SameAs(saved_.state));
}

TEST_F(WriterTest, OneSaveIsInFlight) {
  CheckpointWriter writer(&store_, &saved_.save_plan, {});
  EXPECT_FALSE(writer.busy());
  EXPECT_FALSE(writer.Poll().has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(writer.Wait().status()));
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  EXPECT_TRUE(writer.busy());
  const absl::Status second = writer.Snapshot(RequestOf({4, 2, 1}), Source());
  EXPECT_TRUE(absl::IsFailedPrecondition(second));
  EXPECT_THAT(std::string(second.message()), HasSubstr("step 4 is not saved"));
  ASSERT_TRUE(testing::Eventually(std::chrono::seconds(10), [&] {
    const auto result = writer.Poll();
    return result.has_value() && result->ok();
  }));
  EXPECT_FALSE(writer.busy());
  ASSERT_TRUE(writer.Snapshot(RequestOf({4, 2, 1}), Source()).ok());
  EXPECT_TRUE(writer.Wait().ok());
}

TEST_F(WriterTest, TheArenaIsWhatWasPredicted) {
  CheckpointWriter writer(&store_, &saved_.save_plan, {});
  EXPECT_EQ(writer.arena_bytes(), CheckpointWriter::ArenaBytes(saved_.save_plan, 0));
  int64_t bytes = 0;
  for (const plan::SaveFile& file : saved_.save_plan.files) {
    bytes += file.size;
  }
  EXPECT_GE(writer.arena_bytes(), bytes);
  EXPECT_LT(writer.arena_bytes(),
            bytes + 4096 * static_cast<int64_t>(saved_.save_plan.files.size()));
  EXPECT_EQ(CheckpointWriter::ArenaBytes(saved_.save_plan, 1), 0);
}

TEST_F(WriterTest, EveryFailedOperationIsAnErrorAndTheNextSaveWorks) {
  CheckpointWriter writer(
      &store_, &saved_.save_plan, {.rank = 0, .hugging_face_files = {{"config.json", "{}"}}});
  ASSERT_TRUE(writer.Snapshot(RequestOf({0, 1, 1}), Source()).ok());
  ASSERT_TRUE(writer.Wait().ok());
  const int64_t operations = store_.operations();
  ASSERT_GT(operations, 15);
  for (int64_t at = 0; at < operations; ++at) {
    SCOPED_TRACE(at);
    store_.FailOnce(store_.operations() + at, absl::ResourceExhaustedError("no space left"));
    ASSERT_TRUE(writer.Snapshot(RequestOf({at + 1, 1, 1}), Source()).ok());
    const auto seal = writer.Wait();
    EXPECT_TRUE(absl::IsResourceExhausted(seal.status())) << seal.status();
    EXPECT_TRUE(coordinator::ReadSeals(store_, {at + 1, 1, 1})->empty() || at >= operations - 1)
        << "sealed though it failed";
    store_.FailOnce(-1, absl::OkStatus());
    ASSERT_TRUE(writer.Snapshot(RequestOf({at + 1, 1, 2}), Source()).ok());
    EXPECT_TRUE(writer.Wait().ok());
  }
}

TEST_F(WriterTest, AnAttemptIsNeverWrittenTwice) {
  CheckpointWriter writer(&store_, &saved_.save_plan, {});
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  ASSERT_TRUE(writer.Wait().ok());
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(writer.Wait().status()));
}

TEST_F(WriterTest, ItMayBeDestroyedWhileASaveIsInFlight) {
  for (int i = 0; i < 20; ++i) {
    CheckpointWriter writer(&store_, &saved_.save_plan, {});
    ASSERT_TRUE(writer.Snapshot(RequestOf({i, 1, 1}), Source()).ok());
  }
}

TEST(FullDiskTest, TheSaveFailsByNameAndTheOldStepStays) {
  const TemporaryDirectory directory;
  if (::mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=2m") != 0) {
    testing::SkipWithout("mounts", "mounting a small tmpfs needs CAP_SYS_ADMIN");
    return;
  }
  {
    store::FileStore store(directory.path());
    const testing::SavedWorld saved =
        testing::MakeWorld(testing::InventoryOf({{256, 300}}), 2, 1);  // 0.9 MB a step
    ASSERT_TRUE(testing::Save(store, saved, {.step = 1, .epoch = 1, .attempt = 1}).ok());
    absl::Status status;
    for (int64_t step = 2; step < 5 && status.ok(); ++step) {
      status = testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1}).status();
    }
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(directory.path()));
    EXPECT_THAT(std::string(status.message()), HasSubstr("No space left on device"));
    EXPECT_TRUE(store::VerifyStep(store, "step-0000000001", store::VerifyDepth::kDeep).ok());
    ASSERT_TRUE(coordinator::CleanAttempts(store, {}).ok());
    EXPECT_TRUE(testing::Load(store, "step-0000000001", saved.world.inventory, 3).ok());
  }
  ::umount(directory.path().c_str());
}

// A memory store whose bytes arrive only when the test lets them.
class HungStore : public store::MemoryStore {
 public:
  absl::StatusOr<std::unique_ptr<store::FileWriter>> Create(std::string_view path,
                                                            int64_t bytes) override {
    {
      const MutexLock lock(mutex_);
      ++waiting_;
      while (hung_) {
        changed_.Wait(mutex_);
      }
    }
    return MemoryStore::Create(path, bytes);
  }
  void Hang(bool hung) {
    const MutexLock lock(mutex_);
    hung_ = hung;
    changed_.NotifyAll();
  }
  int waiting() {
    const MutexLock lock(mutex_);
    return waiting_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool hung_ ABSL_GUARDED_BY(mutex_) = true;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_F(WriterTest, AHungStoreHoldsNeitherTheStepThreadNorTheExit) {
  const auto store = std::make_shared<HungStore>();
  const auto plan = std::make_shared<plan::SavePlan>(saved_.save_plan);
  const auto owner =
      std::make_shared<std::pair<std::shared_ptr<HungStore>, std::shared_ptr<plan::SavePlan>>>(
          store, plan);
  std::atomic<int> results = 0;
  const int before = WritersLeftBehind();
  {
    WriterOptions options;
    options.owner = owner;
    options.exit_wait = std::chrono::milliseconds(20);
    options.on_result = [&results](const SaveRequest&, const absl::StatusOr<ckpt::Seal>&) {
      ++results;
    };
    CheckpointWriter writer(store.get(), plan.get(), std::move(options));
    ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
    ASSERT_TRUE(
        testing::Eventually(std::chrono::seconds(10), [&] { return store->waiting() == 1; }));
    EXPECT_FALSE(writer.Poll().has_value());
  }
  EXPECT_EQ(WritersLeftBehind(), before + 1);
  store->Hang(false);  // what was left behind ends by itself, and says nothing any more
  EXPECT_TRUE(
      testing::Eventually(std::chrono::seconds(10), [&] { return owner.use_count() == 1; }));
  EXPECT_EQ(results, 0);
  EXPECT_TRUE(coordinator::ReadSeals(*store, kKey)->empty());
}

TEST_F(WriterTest, ASaveThatNobodyWantsAnyMoreEndsAndLeavesNoBytes) {
  std::atomic<bool> refused = true;
  WriterOptions options;
  options.abandoned = [&refused](int64_t step) { return refused && step == kKey.step; };
  CheckpointWriter writer(&store_, &saved_.save_plan, std::move(options));
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  EXPECT_TRUE(absl::IsCancelled(writer.Wait().status()));
  EXPECT_TRUE(store_.List("")->empty());
  refused = false;
  ASSERT_TRUE(writer.Snapshot(RequestOf({4, 2, 1}), Source()).ok());
  EXPECT_TRUE(writer.Wait().ok());
}

TEST_F(WriterTest, ResultsAreToldOnTheWritersThreadWithoutAPoll) {
  std::atomic<int> sealed = 0;
  WriterOptions options;
  options.on_result = [&sealed](const SaveRequest&, const absl::StatusOr<ckpt::Seal>& result) {
    sealed += result.ok() ? 1 : 0;
  };
  CheckpointWriter writer(&store_, &saved_.save_plan, std::move(options));
  ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
  EXPECT_TRUE(testing::Eventually(std::chrono::seconds(10), [&] { return sealed == 1; }));
  EXPECT_TRUE(writer.busy());
}

TEST_F(WriterTest, ASaveThatNobodyAnswersIsRemovedForNewerOnesAndTold) {
  std::atomic<int64_t> removed = 0;
  WriterOptions options;
  options.most_unanswered = 1;
  options.answered_step = [] { return int64_t{-1}; };
  options.on_removed = [&removed](const ckpt::AttemptKey& key, const std::string& message) {
    EXPECT_NE(message.find(absl::StrCat("step ", key.step)), std::string::npos) << message;
    removed = removed * 100 + key.step;
  };
  CheckpointWriter writer(&store_, &saved_.save_plan, std::move(options));
  for (const int64_t step : {3, 4, 5}) {
    ASSERT_TRUE(writer.Snapshot(RequestOf({step, 2, 1}), Source()).ok());
    ASSERT_TRUE(writer.Wait().ok());
  }
  EXPECT_TRUE(testing::Eventually(std::chrono::seconds(10), [&] { return removed == 304; }))
      << removed;
}

TEST_F(WriterTest, AFailedSaveLeavesNoFilesOfItsOwn) {
  {
    CheckpointWriter writer(&store_, &saved_.save_plan, {});
    ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
    ASSERT_TRUE(writer.Wait().ok());
  }
  const int64_t operations = store_.operations();
  for (int64_t at = 0; at < operations; ++at) {
    SCOPED_TRACE(at);
    store::MemoryStore store;
    CheckpointWriter writer(&store, &saved_.save_plan, {});
    store.FailOnce(at, absl::ResourceExhaustedError("no space left"));
    ASSERT_TRUE(writer.Snapshot(RequestOf(kKey), Source()).ok());
    ASSERT_FALSE(writer.Wait().ok());
    for (const std::string_view folder : {ckpt::kModelFolder, ckpt::kOptimizerFolder}) {
      const auto left = store.List(store::JoinPath(ckpt::AttemptName(kKey), folder));
      EXPECT_TRUE(!left.ok() || left->empty());
    }
    EXPECT_TRUE(coordinator::ReadSeals(store, kKey)->empty()) << "a seal without its files";
  }
}

// Saves step after step until it is killed.
[[noreturn]] void SaveForever(const std::string& root, const testing::SavedWorld& saved) {
  store::FileStore store(root);
  for (int64_t step = 0;; ++step) {
    if (!testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1}).ok()) {
      ::_exit(1);
    }
  }
}

TEST(KilledWriterTest, AtAnyMomentCommittedStepsAreWholeAndTheRestIsNotTaken) {
  const testing::SavedWorld saved =
      testing::MakeWorld(testing::InventoryOf({{128, 65}, {300, 7}}), 2, 1);
  std::mt19937_64 random(20240607);
  for (int moment = 0; moment < 20; ++moment) {
    SCOPED_TRACE(moment);
    const TemporaryDirectory directory;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      SaveForever(directory.path(), saved);
    }
    store::FileStore store(directory.path());
    EXPECT_TRUE(testing::Eventually(std::chrono::seconds(60),
                                    [&] { return !coordinator::ListSteps(store)->steps.empty(); }));
    testing::PauseBetweenLooks(std::chrono::milliseconds(random() % 40));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    const coordinator::StepListing listing = *coordinator::ListSteps(store);
    EXPECT_TRUE(listing.damaged.empty());
    for (const coordinator::CommittedStepInfo& info : listing.steps) {
      const store::VerifyReport report =
          store::VerifyStep(store, info.directory, store::VerifyDepth::kDeep);
      EXPECT_TRUE(report.ok()) << info.directory << ": " << report.problems.front().Text();
    }
    const std::vector<ckpt::AttemptKey> attempts = *coordinator::ListAttempts(store);
    for (const ckpt::AttemptKey& key : attempts) {
      EXPECT_FALSE(
          store::VerifyStep(store, ckpt::AttemptName(key), store::VerifyDepth::kQuick).ok());
      const auto settled =
          coordinator::SettleAttempt(store, saved.save_plan, testing::ContextOf(saved, key));
      EXPECT_TRUE(settled.ok()) << settled.status();
    }
    const auto newest = coordinator::ListSteps(store);
    ASSERT_TRUE(newest.ok() && !newest->steps.empty());
    const auto loaded =
        testing::Load(store, newest->steps.front().directory, saved.world.inventory, 3);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->SameAs(saved.state));
  }
}

}  // namespace
}  // namespace ravel::checkpoint
