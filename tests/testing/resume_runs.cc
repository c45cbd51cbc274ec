#include "tests/testing/resume_runs.h"

#include <bit>
#include <filesystem>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "common/store/step_verifier.h"

namespace ravel::trainer {
namespace {

void ExpectSameState(const ckpt::Manifest& state, const ckpt::Manifest& expected) {
  EXPECT_EQ(state.state_digest, expected.state_digest);
  EXPECT_EQ(state.quant, expected.quant);
}

}  // namespace

EpochArgs ResumeRuns::Whole(const plan::JobSpec& spec, int ranks) {
  EpochArgs args;
  args.spec = spec;
  args.spec.steps = kResumeSteps;
  args.spec.evaluation_every = 0;
  args.spec.checkpoint.every_steps = kResumeStep;
  args.ranks = ranks;
  args.epoch = ++epoch_;
  args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
  return args;
}

EpochArgs ResumeRuns::From(const EpochOutcome& from, EpochArgs args) {
  args.restore_path = from.committed.at(kResumeStep);
  args.first_step = kResumeStep;
  return args;
}

EpochArgs ResumeRuns::ReadBack(const EpochOutcome& from, EpochArgs args) {
  args = From(from, std::move(args));
  args.first_step = 0;
  args.save_at_start = true;
  return args;
}

EpochOutcome RunWell(const EpochArgs& args) {
  EpochOutcome outcome = RunEpoch(args);
  for (const absl::Status& result : outcome.results) {
    EXPECT_TRUE(result.ok()) << result;
  }
  EXPECT_TRUE(outcome.commit_errors.empty());
  return outcome;
}

ckpt::Manifest ManifestOf(const std::string& step_directory) {
  const std::filesystem::path path(step_directory);
  const store::FileStore store(path.parent_path().string());
  return store::CommittedStep::Open(&store, path.filename().string()).value().manifest();
}

void ExpectVerifies(const std::string& step_directory) {
  const std::filesystem::path path(step_directory);
  const store::FileStore store(path.parent_path().string());
  EXPECT_TRUE(store::VerifyStep(store, path.filename().string(), store::VerifyDepth::kDeep).ok());
}

void ExpectSameEnd(const EpochOutcome& resumed, const EpochOutcome& whole) {
  ASSERT_EQ(whole.steps.size(), static_cast<size_t>(kResumeSteps));
  ASSERT_EQ(resumed.steps.size(), static_cast<size_t>(kResumeSteps - kResumeStep));
  for (size_t i = 0; i < resumed.steps.size(); ++i) {
    const StepReport& step = whole.steps[i + kResumeStep];
    EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss), std::bit_cast<uint32_t>(step.loss));
    EXPECT_EQ(resumed.steps[i].grad_norm, step.grad_norm);
  }
  ExpectSameState(ManifestOf(resumed.committed.at(kResumeSteps)),
                  ManifestOf(whole.committed.at(kResumeSteps)));
}

void ExpectSameStart(const EpochOutcome& read, const EpochOutcome& whole) {
  ExpectSameState(ManifestOf(read.committed.at(0)), ManifestOf(whole.committed.at(kResumeStep)));
}

}  // namespace ravel::trainer
