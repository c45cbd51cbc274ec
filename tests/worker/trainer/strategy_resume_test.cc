// Checkpoints between strategies, and the files that diagnostics write, with whole trainers.

#include <bit>
#include <filesystem>
#include <fstream>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/trace.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

class StrategyFiles : public ::testing::Test {
 protected:
  StrategyFiles()
      : folder_(OwnFolder(
            absl::StrCat("ravel_strategy_files_",
                         ::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    std::filesystem::remove_all(folder_);
  }
  ~StrategyFiles() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch(const StrategyCase& tested, int64_t epoch) const {
    EpochArgs args;
    args.spec = JobOf(tested, "bundled_rope_scaling", folder_);
    args.spec.steps = 6;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 1;
    args.ranks = tested.ranks();
    args.epoch = epoch;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch);
    return args;
  }

  const std::string folder_;
};

std::vector<uint32_t> ResumedLossBits(const std::vector<StepReport>& steps, size_t from = 0) {
  std::vector<uint32_t> bits;
  for (size_t i = from; i < steps.size(); ++i) {
    bits.push_back(std::bit_cast<uint32_t>(steps[i].loss));
  }
  return bits;
}

void ExpectEpochOk(const EpochOutcome& outcome) {
  for (const absl::Status& result : outcome.results) {
    EXPECT_TRUE(result.ok()) << result;
  }
  for (const absl::Status& error : outcome.commit_errors) {
    ADD_FAILURE() << error;
  }
}

// The checkpoint has no strategy: what one writes, every other reads, at any step. Fails when
// replicas write twice, or not all, or when digests count what several ranks read.
TEST_F(StrategyFiles, ACheckpointOfOneStrategyGoesOnUnderAnother) {
  const std::vector<StrategyCase> cases = {{.strategy = "ZeRO3", .width = 3},
                                           {.strategy = "ZeRO0", .width = 2},
                                           {.strategy = "HFSDP", .width = 2},
                                           {.strategy = "ZeRO1", .width = 4},
                                           {.strategy = "HSDP", .width = 1},
                                           {.strategy = "ZeRO2", .width = 2}};
  int64_t epoch = 1;
  const EpochOutcome reference = RunEpoch(Epoch({.width = 1}, epoch++));
  ExpectEpochOk(reference);
  ASSERT_EQ(reference.steps.size(), 6u);
  for (size_t i = 0; i < cases.size(); ++i) {
    const EpochOutcome whole = RunEpoch(Epoch(cases[i], epoch++));
    ExpectEpochOk(whole);
    EXPECT_EQ(ResumedLossBits(whole.steps), ResumedLossBits(reference.steps)) << cases[i].name();
    const int64_t step = 1 + static_cast<int64_t>(i) % 5;
    const StrategyCase& next = cases[(i + 1) % cases.size()];
    EpochArgs args = Epoch(next, epoch++);
    args.restore_path = whole.committed.at(step);
    args.first_step = step;
    const EpochOutcome resumed = RunEpoch(args);
    ExpectEpochOk(resumed);
    EXPECT_EQ(ResumedLossBits(resumed.steps),
              ResumedLossBits(reference.steps, static_cast<size_t>(step)))
        << cases[i].name() << ", then " << next.name();
  }
}

TEST_F(StrategyFiles, TracesOfAllRanksMergeAndNormsAreReadableByName) {
  EpochArgs args = Epoch({.strategy = "HSDP", .width = 2}, 1);
  args.spec.trace_directory = folder_ + "/traces";
  args.spec.trace_first_step = 2;
  args.spec.trace_last_step = 3;
  args.spec.norms_every = 2;
  ExpectEpochOk(RunEpoch(args));
  std::vector<std::string> paths;
  int memory_reports = 0;
  for (const auto& entry : std::filesystem::directory_iterator(args.spec.trace_directory)) {
    const std::string name = entry.path().filename();
    if (absl::EndsWith(name, ".trace.json")) {
      paths.push_back(entry.path());
    }
    memory_reports += absl::EndsWith(name, ".memory.json") ? 1 : 0;
  }
  ASSERT_EQ(paths.size(), 4u);
  EXPECT_EQ(memory_reports, 4);
  const auto merged = trace::MergeChromeTraces(paths);
  ASSERT_TRUE(merged.ok()) << merged.status();
  const auto gantt = trace::TextGantt(*merged, 3, 80);
  ASSERT_TRUE(gantt.ok()) << gantt.status();
  EXPECT_NE(gantt->find('F'), std::string::npos) << *gantt;
  EXPECT_FALSE(trace::TextGantt(*merged, 4, 80).ok());
  std::ifstream norms(args.spec.trace_directory + "/norms.jsonl");
  std::string line;
  std::vector<int64_t> steps;
  while (std::getline(norms, line)) {
    const auto value = json::Parse(line);
    ASSERT_TRUE(value.ok()) << value.status();
    const json::Value* tensors = value->Find("tensors");
    ASSERT_NE(tensors, nullptr);
    EXPECT_NE(tensors->Find("model.norm.weight"), nullptr) << line;
    steps.push_back(value->Find("step")->AsInt());
  }
  // Those of the last step, 6, travel with nothing else.
  EXPECT_EQ(steps, (std::vector<int64_t>{2, 4, 6}));
}

}  // namespace
}  // namespace ravel::trainer
