// States of the optimizer in every type: the same bits on any number of ranks and under every
// strategy, and saves that go on elsewhere with the codes and scales that they hold.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/step_layout.h"
#include "common/crc32c.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

// Its tensors are cut between ranks, and have rows that are no multiple of a group.
constexpr char kStatesModel[] = "bundled_rope_scaling";

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void WriteAll(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// Gives a committed step another manifest, and the COMMIT of that one.
void PutManifest(const std::string& step, ckpt::Manifest manifest) {
  std::vector<ckpt::TensorDigest> digests;
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    digests.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.digest64});
  }
  manifest.state_digest = ckpt::StateDigest(std::move(digests));
  const std::string encoded = ckpt::EncodeManifest(manifest);
  const std::string commit = absl::StrCat(step, "/", std::string(ckpt::kCommitFile));
  const std::string prefix = ckpt::ParseCommit(ReadAll(commit)).value().prefix;
  WriteAll(absl::StrCat(step, "/", prefix, "/", std::string(ckpt::kManifestFile)), encoded);
  ckpt::CommitRecord made = ckpt::MakeCommitRecord(manifest, encoded);
  made.prefix = prefix;
  WriteAll(commit, ckpt::EncodeCommit(made));
}

// Writes a byte into a tensor of a committed step, with the checksums that it then has.
void PutByte(const std::string& step, const std::string& tensor, int64_t at, uint8_t value) {
  ckpt::Manifest manifest = ManifestOf(step);
  const auto record = std::find_if(manifest.tensors.begin(),
                                   manifest.tensors.end(),
                                   [&](const auto& candidate) { return candidate.name == tensor; });
  ASSERT_NE(record, manifest.tensors.end());
  ckpt::ChunkRecord& chunk = record->chunks.front();
  ASSERT_LT(at, chunk.bytes);
  ASSERT_LE(chunk.bytes, ckpt::kBlockBytes);
  ckpt::FileRecord& file = manifest.files.at(static_cast<size_t>(chunk.file));
  const std::string path = absl::StrCat(step, "/", file.path);
  std::string content = ReadAll(path);
  content.at(static_cast<size_t>(chunk.data_offset + at)) = static_cast<char>(value);
  WriteAll(path, content);
  chunk.crc32c = Crc32c(0, content.data() + chunk.data_offset, static_cast<size_t>(chunk.bytes));
  chunk.block_crc32c = {chunk.crc32c};
  file.crc32c = Crc32c(0, content.data(), content.size());
  PutManifest(step, manifest);
}

class StateTypes : public ::testing::TestWithParam<const char*> {
 protected:
  StateTypes() { std::filesystem::remove_all(folder_); }
  ~StateTypes() override { std::filesystem::remove_all(folder_); }

  static plan::StateTypes types() { return plan::ParseStateTypes(GetParam()).value(); }
  plan::JobSpec Job() const {
    plan::JobSpec spec = CaseJob(kStatesModel, folder_);
    spec.optimizer.state_types = types();
    return spec;
  }
  EpochArgs Epoch(int ranks) { return runs_.Whole(Job(), ranks); }

  const std::string folder_ =
      OwnFolder(absl::StrCat("ravel_state_types_", absl::StrReplaceAll(GetParam(), {{",", "_"}})));
  ResumeRuns runs_{folder_};
};
INSTANTIATE_TEST_SUITE_P(Forms,
                         StateTypes,
                         ::testing::Values("bf16", "fp8", "fp8,bf16", "bf16,fp8", "fp32,fp8"),
                         [](const auto& tested) {
                           return absl::StrReplaceAll(tested.param, {{",", "_"}});
                         });

TEST_P(StateTypes, OneToFourRanksGiveTheSameBits) {
  const Recording one = Record({.spec = Job(), .ranks = 1, .last_step = 8});
  plan::JobSpec wide = Job();
  wide.optimizer.state_types = {};
  const Recording fp32 = Record({.spec = wide, .ranks = 1, .last_step = 8});
  EXPECT_NE(FirstDifference(one, fp32), "");
  EXPECT_NEAR(one.steps.back().loss, fp32.steps.back().loss, 0.01 * fp32.steps.back().loss);
  for (const int ranks : {2, 3, 4}) {
    EXPECT_EQ(FirstDifference(one, Record({.spec = Job(), .ranks = ranks, .last_step = 8})), "")
        << ranks << " ranks";
  }
}

TEST_P(StateTypes, EveryStrategyGivesTheSameBits) {
  const auto run = [&](const StrategyCase& tested) {
    plan::JobSpec spec = JobOf(tested, kStatesModel, folder_);
    spec.optimizer = Job().optimizer;
    RecordArgs args = ArgsOf(tested, spec);
    args.last_step = 3;
    return Record(args);
  };
  const Recording one = run({.width = 1});
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    const StrategyCase tested = {.strategy = strategy.name, .width = 2};
    EXPECT_EQ(FirstDifference(one, run(tested)), "") << tested.name();
  }
}

// The state digest covers every tensor in the type in which it lives, codes and scales, and no
// layout: fails where a code is decoded and made again.
TEST_P(StateTypes, StateCodesReshardUnchanged) {
  const EpochOutcome whole = RunWell(Epoch(4));
  for (const int ranks : {2, 1, 3}) {
    SCOPED_TRACE(ranks);
    ExpectSameStart(RunWell(ResumeRuns::ReadBack(whole, Epoch(ranks))), whole);
    ExpectSameEnd(RunWell(ResumeRuns::From(whole, Epoch(ranks))), whole);
  }
}

TEST_P(StateTypes, ASaveHasStatesAsTheyLiveAndTheirScales) {
  const EpochOutcome whole = RunWell(Epoch(2));
  const std::string directory = whole.committed.at(6);
  std::map<ckpt::TensorRole, int> of_role;
  for (const ckpt::TensorRecord& tensor : ManifestOf(directory).tensors) {
    ++of_role[tensor.role];
    if (tensor.role == ckpt::TensorRole::kExpAvg) {
      EXPECT_EQ(tensor.stored_dtype, types().mean) << tensor.name;
    } else if (tensor.role == ckpt::TensorRole::kExpAvgSq) {
      EXPECT_EQ(tensor.stored_dtype, types().square) << tensor.name;
    } else {
      EXPECT_EQ(tensor.stored_dtype, DType::kF32) << tensor.name;
    }
  }
  const auto count = [&](plan::StateRole role) {
    return of_role[static_cast<ckpt::TensorRole>(role)];
  };
  const int parameters = count(plan::StateRole::kParam);
  const auto scales = [&](DType type) { return plan::IsFp8State(type) ? parameters : 0; };
  EXPECT_EQ(count(plan::StateRole::kExpAvgScale), scales(types().mean));
  EXPECT_EQ(count(plan::StateRole::kExpAvgSqScale), scales(types().square));
  ExpectVerifies(directory);
}

// A code that is NaN in its format, in a save that is whole but for that.
TEST_P(StateTypes, CodesOfNanAreRefusedByTensorAndElement) {
  const EpochOutcome whole = RunWell(Epoch(1));
  const std::string step = whole.committed.at(kResumeStep);
  const std::string tensor = "state.model.embed_tokens.weight.";
  for (const auto& [name, type] :
       {std::pair{"exp_avg", types().mean}, std::pair{"exp_avg_sq", types().square}}) {
    if (!plan::IsFp8State(type)) {
      continue;
    }
    PutByte(step, tensor + name, 7, 0xFF);
    const EpochOutcome refused = RunEpoch(ResumeRuns::From(whole, Epoch(2)));
    ASSERT_FALSE(refused.results.empty());
    EXPECT_THAT(std::string(refused.results.front().message()),
                ::testing::HasSubstr(absl::StrCat(
                    tensor, name, ": the code of element 7 is NaN, which no state has")));
    PutByte(step, tensor + name, 7, 0x3A);
  }
}

// Older saves have roots in F8_E4M3 where squares are U8 now: no byte of them is read as a square.
TEST_P(StateTypes, SquaresOfAnotherFormatAreRefusedByName) {
  if (!plan::IsFp8State(types().square)) {
    return;
  }
  const EpochOutcome whole = RunWell(Epoch(1));
  const std::string step = whole.committed.at(kResumeStep);
  ckpt::Manifest manifest = ManifestOf(step);
  for (ckpt::TensorRecord& tensor : manifest.tensors) {
    if (tensor.role == ckpt::TensorRole::kExpAvgSq) {
      tensor.dtype = tensor.stored_dtype = DType::kF8E4M3;
    }
  }
  PutManifest(step, manifest);
  for (const bool wide : {false, true}) {
    EpochArgs args = ResumeRuns::From(whole, Epoch(2));
    args.spec.optimizer.state_types = wide ? plan::StateTypes{} : types();
    const EpochOutcome refused = RunEpoch(args);
    ASSERT_FALSE(refused.results.empty());
    EXPECT_THAT(std::string(refused.results.front().message()),
                ::testing::HasSubstr("state.model.embed_tokens.weight.exp_avg_sq: F8_E4M3 stored "
                                     "as F8_E4M3, expected F32, BF16 or U8"));
  }
}

TEST_P(StateTypes, AWiderJobOpensItAndAnFp8JobRefusesWhatItWouldRound) {
  const EpochOutcome narrow = RunWell(Epoch(2));
  EpochArgs wide = ResumeRuns::From(narrow, Epoch(3));
  wide.spec.optimizer.state_types = {};
  const EpochOutcome widened = RunWell(wide);
  ASSERT_EQ(widened.steps.size(), 3u);
  // The step after the save has its weights, and moments of the same values.
  EXPECT_EQ(widened.steps[0].loss, narrow.steps[3].loss);
  EXPECT_NEAR(widened.steps[2].loss, narrow.steps[5].loss, 0.01 * narrow.steps[5].loss);
  EpochArgs fp32 = Epoch(1);
  fp32.spec.optimizer.state_types = {};
  const EpochOutcome refused = RunEpoch(ResumeRuns::From(RunWell(fp32), Epoch(1)));
  ASSERT_FALSE(refused.results.empty());
  EXPECT_THAT(std::string(refused.results.front().message()),
              ::testing::HasSubstr("training.optimizer.stateDtype: expected fp32, got "));
}

}  // namespace
}  // namespace ravel::trainer
