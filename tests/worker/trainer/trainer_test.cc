// The life of trainers from assignment to end, with saves, stops and restores on other numbers of
// ranks.

#include "worker/trainer/trainer.h"

#include <bit>
#include <filesystem>
#include <fstream>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/fault_point.h"
#include "common/version.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/training_cases.h"
#include "worker/trainer/generator.h"

namespace ravel::trainer {
namespace {

class TrainerLife : public ::testing::Test {
 protected:
  TrainerLife()
      : folder_(OwnFolder(absl::StrCat(
            "ravel_trainer_", ::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    std::filesystem::remove_all(folder_);
  }
  ~TrainerLife() override { std::filesystem::remove_all(folder_); }

  plan::JobSpec Job(const std::string& name) const {
    plan::JobSpec spec = CaseJob(name, folder_);
    spec.steps = 12;
    spec.evaluation_every = 5;
    spec.checkpoint.every_steps = 4;
    return spec;
  }
  EpochArgs Epoch(const plan::JobSpec& spec, int ranks, int64_t epoch) const {
    EpochArgs args;
    args.spec = spec;
    args.ranks = ranks;
    args.epoch = epoch;
    args.checkpoint_root = folder_ + "/store";
    return args;
  }

  const std::string folder_;
};

void ExpectAllOk(const EpochOutcome& outcome) {
  for (const absl::Status& result : outcome.results) {
    EXPECT_TRUE(result.ok()) << result;
  }
  for (const absl::Status& error : outcome.commit_errors) {
    ADD_FAILURE() << error;
  }
}

std::vector<uint32_t> LossBits(const std::vector<StepReport>& steps) {
  std::vector<uint32_t> bits;
  for (const StepReport& step : steps) {
    bits.push_back(std::bit_cast<uint32_t>(step.loss));
  }
  return bits;
}

TEST_F(TrainerLife, ReportsEveryStepAndSavesWhereTheJobSays) {
  EpochArgs args = Epoch(Job("odd_untied"), 2, 1);
  args.save_at_start = true;
  const EpochOutcome outcome = RunEpoch(args);
  ExpectAllOk(outcome);
  EXPECT_EQ(outcome.done, 2);
  ASSERT_EQ(outcome.steps.size(), 12u);
  for (size_t i = 0; i < outcome.steps.size(); ++i) {
    const StepReport& step = outcome.steps[i];
    EXPECT_EQ(step.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(step.tokens, 8 * 17);
    EXPECT_EQ(step.has_validation_loss, step.step % 5 == 0 || step.step == 12);
    EXPECT_GT(step.planned_bytes, 0);
    EXPECT_GE(step.measured_bytes, step.planned_bytes);
    EXPECT_LE(step.measured_bytes, step.planned_bytes + RankEngine::kMostMeasuredSlack);
  }
  EXPECT_EQ(outcome.saves_started, (std::vector<int64_t>{0, 4, 8, 12}));
  std::vector<int64_t> committed;
  for (const auto& [step, directory] : outcome.committed) {
    committed.push_back(step);
  }
  EXPECT_EQ(committed, outcome.saves_started);
}

TEST_F(TrainerLife, ASaveThatFindsTheOneBeforeUnfinishedIsSkippedOnAllRanks) {
  ASSERT_TRUE(fault::Configure("save.write@1:stall=2s").ok());  // on one of the ranks
  EpochArgs args = Epoch(Job("odd_untied"), 2, 1);
  args.wait_for_saves = false;
  const EpochOutcome outcome = RunEpoch(args);
  ASSERT_TRUE(fault::Configure("").ok());
  ExpectAllOk(outcome);
  EXPECT_EQ(outcome.saves_started, (std::vector<int64_t>{4, 12})) << "the last one waits";
  ASSERT_FALSE(outcome.save_failures.empty());
  for (const SaveFailed& failure : outcome.save_failures) {
    EXPECT_TRUE(failure.skipped);
    EXPECT_EQ(failure.reason, "SaveSkipped");
    EXPECT_EQ(failure.step, 8);
  }
  EXPECT_TRUE(outcome.committed.contains(4));
  EXPECT_TRUE(outcome.committed.contains(12));
}

TEST_F(TrainerLife, AFailedSaveIsToldAndTheNextOneWorks) {
  ASSERT_TRUE(fault::Configure("save.write@1:error=disk full").ok());
  const EpochOutcome outcome = RunEpoch(Epoch(Job("odd_untied"), 2, 1));
  ASSERT_TRUE(fault::Configure("").ok());
  ExpectAllOk(outcome);
  ASSERT_EQ(outcome.save_failures.size(), 1u);
  const SaveFailed& failure = outcome.save_failures.front();
  EXPECT_EQ(failure.step, 4);
  EXPECT_EQ(failure.attempt, 1);
  EXPECT_EQ(failure.reason, "StoreFull");
  EXPECT_NE(failure.message.find("disk full"), std::string::npos);
  EXPECT_FALSE(failure.skipped);
  EXPECT_FALSE(outcome.committed.contains(4));
  EXPECT_TRUE(outcome.committed.contains(8));
  EXPECT_TRUE(outcome.committed.contains(12));
}

TEST_F(TrainerLife, RestoreOnOtherNumbersOfRanksContinuesWithTheSameBits) {
  for (const char* name : {"odd_tied", "bundled_rope_scaling"}) {
    std::filesystem::remove_all(folder_);
    const plan::JobSpec spec = Job(name);
    const EpochOutcome whole = RunEpoch(Epoch(spec, 3, 1));
    ExpectAllOk(whole);
    int64_t epoch = 2;
    for (const int ranks : {1, 2, 4}) {
      EpochArgs args = Epoch(spec, ranks, epoch++);
      args.restore_path = whole.committed.at(4);
      args.first_step = 4;
      args.checkpoint_root = absl::StrCat(folder_, "/store-", ranks);
      const EpochOutcome resumed = RunEpoch(args);
      ExpectAllOk(resumed);
      EXPECT_EQ(LossBits(resumed.steps), LossBits({whole.steps.begin() + 4, whole.steps.end()}))
          << name << " on " << ranks << " ranks";
    }
  }
}

TEST_F(TrainerLife, StopsAfterASaveWhenOneRankHasHeardOfIt) {
  EpochArgs args = Epoch(Job("odd_untied"), 3, 1);
  args.spec.checkpoint.every_steps = 0;
  args.stop_after_step = 5;
  const EpochOutcome outcome = RunEpoch(args);
  for (const absl::Status& result : outcome.results) {
    EXPECT_EQ(CodeOf(result), ExitCode::kStopped) << result;
  }
  ASSERT_EQ(outcome.committed.size(), 1u);
  const int64_t step = outcome.committed.begin()->first;
  EXPECT_EQ(outcome.steps.back().step, step);
  EXPECT_GE(step, 6);
  EXPECT_LT(step, 12);
}

TEST_F(TrainerLife, AnIdOutsideTheVocabularyEndsTheJobWithDataError) {
  EpochArgs args = Epoch(Job("odd_untied"), 2, 1);
  const std::string path = args.spec.data.train[0].path;
  std::vector<uint16_t> ids(4001, 61);  // one more than the largest id
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(ids.data()), 2 * 4001);
  const EpochOutcome outcome = RunEpoch(args);
  int data_errors = 0;
  for (const absl::Status& result : outcome.results) {
    if (CodeOf(result) == ExitCode::kData) {
      ++data_errors;
      EXPECT_EQ(ReasonOf(result), "DataError");
      EXPECT_THAT(std::string(result.message()), ::testing::HasSubstr(path));
      EXPECT_THAT(std::string(result.message()),
                  ::testing::HasSubstr("has id 61, expected 0 to 60"));
    }
  }
  EXPECT_GE(data_errors, 1);
  EXPECT_TRUE(outcome.steps.empty());
}

TEST_F(TrainerLife, ACheckpointOfAnotherModelIsRefused) {
  const EpochOutcome other = RunEpoch(Epoch(Job("odd_tied"), 1, 1));
  ExpectAllOk(other);
  EpochArgs args = Epoch(Job("odd_untied"), 1, 2);
  args.restore_path = other.committed.at(4);
  args.first_step = 4;
  const EpochOutcome outcome = RunEpoch(args);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kPlanMismatch) << outcome.results[0];
}

TEST_F(TrainerLife, ADaemonOfAnotherReleaseIsToldAndNothingBegins) {
  EpochArgs args = Epoch(Job("odd_untied"), 1, 1);
  args.release = "0.0.9";
  const EpochOutcome outcome = RunEpoch(args);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kRelease);
  EXPECT_NE(std::string(outcome.results[0].message()).find("its daemon of release 0.0.9"),
            std::string::npos)
      << outcome.results[0];
  EXPECT_TRUE(outcome.steps.empty());
  args.release = kVersion;
  ExpectAllOk(RunEpoch(args));
}

TEST_F(TrainerLife, ASavePlanThatTheCoordinatorDoesNotMakeBeginsNoStep) {
  EpochArgs args = Epoch(Job("odd_untied"), 1, 1);
  const Sha256Digest other = Sha256("another layout");
  args.save_plan_hash = std::string(reinterpret_cast<const char*>(other.data()), other.size());
  const EpochOutcome outcome = RunEpoch(args);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kRelease);
  EXPECT_NE(std::string(outcome.results[0].message()).find("save_plan_hash"), std::string::npos)
      << outcome.results[0];
  EXPECT_TRUE(outcome.steps.empty());
}

TEST_F(TrainerLife, ADamagedCheckpointIsNamed) {
  const plan::JobSpec spec = Job("odd_untied");
  const EpochOutcome whole = RunEpoch(Epoch(spec, 2, 1));
  ExpectAllOk(whole);
  std::string damaged;
  for (const auto& entry : std::filesystem::directory_iterator(whole.committed.at(8) + "/model")) {
    damaged = entry.path();
  }
  std::fstream file(damaged, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-3, std::ios::end);
  file.put('\x55');
  file.close();
  EpochArgs args = Epoch(spec, 3, 2);
  args.restore_path = whole.committed.at(8);
  args.first_step = 8;
  const EpochOutcome outcome = RunEpoch(args);
  int named = 0;
  for (const absl::Status& result : outcome.results) {
    named += CodeOf(result) == ExitCode::kStore && ReasonOf(result) == "CheckpointCorrupt" ? 1 : 0;
  }
  EXPECT_GE(named, 1);
}

TEST_F(TrainerLife, TheGeneratorContinuesThePatternThatWasLearnt) {
  plan::JobSpec spec = Job("odd_untied");
  spec.steps = kGoldenSteps;
  spec.checkpoint.every_steps = 0;
  const EpochOutcome outcome = RunEpoch(Epoch(spec, 2, 1));
  ExpectAllOk(outcome);
  const auto generator = Generator::Open(outcome.committed.at(kGoldenSteps));
  ASSERT_TRUE(generator.ok()) << generator.status();
  const auto request =
      ParseGenerateRequest(R"({"tokens":[3,22],"maxNewTokens":5,"temperature":0})");
  ASSERT_TRUE(request.ok()) << request.status();
  const auto made = (*generator)->Generate(*request);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(made->tokens.size(), 5u);
  EXPECT_EQ(made->tokens[0], (5 * 22 + 7) % 61);  // the rule of the token file
  EXPECT_EQ(made->end, TextEnd::kMaxNewTokens);
  EXPECT_EQ((*generator)->Generate(*request)->tokens, made->tokens);
  GenerateRequest stops = *request;
  stops.stop_token = made->tokens[1];
  EXPECT_EQ((*generator)->Generate(stops)->end, TextEnd::kStopToken);
  // The last token needs no position of its own.
  GenerateRequest fits = *request;
  fits.max_new_tokens = made->positions - 2 + 1;
  EXPECT_EQ((*generator)->Generate(fits)->end, TextEnd::kMaxNewTokens);
  GenerateRequest longer = fits;
  ++longer.max_new_tokens;
  const auto cut = (*generator)->Generate(longer);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->end, TextEnd::kPositions);
  EXPECT_EQ(std::ssize(cut->tokens), fits.max_new_tokens);
}

}  // namespace
}  // namespace ravel::trainer
