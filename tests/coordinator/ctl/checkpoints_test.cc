#include "coordinator/ctl/checkpoints.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/store/file_store.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints_copy.h"
#include "coordinator/ctl/checkpoints_export.h"
#include "coordinator/ctl/checkpoints_verify.h"
#include "coordinator/ctl/held_folder.h"
#include "tests/testing/saved_state.h"
#include "worker/checkpoint/loader.h"

namespace ravel::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

plan::ModelConfig TinyLlama(bool tied) {
  plan::ModelConfig config;
  config.vocab_size = 67;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 3;
  config.num_key_value_heads = 1;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.rms_norm_eps = 1e-5;
  config.tie_word_embeddings = tied;
  return config;
}

// On 3 ranks, or where a tensor axis cuts the model on 2 x `tensor_ranks`.
testing::SavedWorld LlamaWorld(bool tied, DType moments = DType::kF32, int64_t tensor_ranks = 1) {
  plan::ModelConfig config = TinyLlama(tied);
  if (tensor_ranks > 1) {
    config.num_attention_heads = 4;
    config.num_key_value_heads = 2;
  }
  const plan::ModelInventory inventory =
      plan::BuildInventory(config,
                           {.sequences = 1, .sequence_tokens = 8},
                           plan::RecomputePolicy::kNone,
                           {.parts = tensor_ranks, .degree = tensor_ranks});
  testing::SavedWorld saved =
      tensor_ranks > 1 ? testing::SaveOf(testing::CutWorld(inventory, 2, tensor_ranks), 1, moments)
                       : testing::MakeWorld(inventory, 3, 1, moments);
  saved.state = testing::PlainState(inventory, 20);
  if (moments != DType::kF32) {
    testing::NarrowMoments(saved.state);
  }
  saved.config_json = plan::WriteHuggingFaceConfig(config);
  return saved;
}

class CheckpointsTest : public ::testing::Test {
 protected:
  CheckpointsTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ravel-ctl-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    store_ = std::make_unique<store::FileStore>(directory_ + "/job");
    EXPECT_TRUE(store_->MakeRoot().ok());
    saved_ = LlamaWorld(false);
    for (const int64_t step : {10, 20}) {
      const auto committed =
          testing::Save(*store_, saved_, {.step = step, .epoch = 1, .attempt = 1});
      EXPECT_TRUE(committed.ok()) << committed.status();
    }
  }
  ~CheckpointsTest() override {
    std::error_code error;
    std::filesystem::remove_all(directory_, error);
  }
  CheckpointsTest(const CheckpointsTest&) = delete;
  CheckpointsTest& operator=(const CheckpointsTest&) = delete;

  std::string Job() const { return directory_ + "/job"; }
  std::string Step() const { return Job() + "/step-0000000020"; }
  void Flip(const std::string& file, int64_t byte) const {
    std::fstream stream(Step() + "/" + file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(byte);
    const int value = stream.get();
    stream.seekp(byte);
    stream.put(static_cast<char>(value ^ 4));
  }

  std::string directory_;
  std::unique_ptr<store::FileStore> store_;
  testing::SavedWorld saved_;
  std::ostringstream out_;
};

TEST_F(CheckpointsTest, ListShowsStepsAndWhatIsNotOne) {
  ASSERT_TRUE(testing::WriteAllRanks(*store_, saved_, {.step = 30, .epoch = 2, .attempt = 1}).ok());
  ASSERT_TRUE(coordinator::MarkBad(*store_, 10, "model/x: tensor y, block 1").ok());
  std::filesystem::create_directory(Job() + "/step-0000000005");
  const int64_t now_ms = 1'700'000'000'000 + 90'000;
  ASSERT_TRUE(ListCheckpoints({.folder = "file://" + Job(), .now_ms = now_ms}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("STEP"));
  EXPECT_THAT(out_.str(), HasSubstr("20    1m30s"));
  EXPECT_THAT(out_.str(), HasSubstr("shard 3  ok\n10"));
  EXPECT_THAT(out_.str(), HasSubstr("BAD\nstep-0000000010: model/x: tensor y, block 1\n"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000005: DAMAGED: COMMIT is missing\n"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000030.e2.a1.tmp: unfinished save\n"));
}

TEST_F(CheckpointsTest, ListAsJson) {
  ASSERT_TRUE(ListCheckpoints({.folder = Job(), .format = Format::kJson}, out_).ok());
  const auto document = json::Parse(out_.str());
  ASSERT_TRUE(document.ok()) << document.status();
  const json::Array& items = document->Find("items")->AsArray();
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].Find("step")->AsInt(), 20);
  EXPECT_EQ(items[0].Find("path")->AsString(), Step());
  EXPECT_FALSE(items[0].Find("bad")->AsBool());
  EXPECT_TRUE(document->Find("unfinished")->AsArray().empty());
}

TEST_F(CheckpointsTest, ShowDescribesAStep) {
  ASSERT_TRUE(ShowCheckpoint({.step = Step(), .tensors = "model.layers.1.*norm*"}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("step          20\n"));
  EXPECT_THAT(out_.str(), HasSubstr("job           job-1\n"));
  EXPECT_THAT(out_.str(), HasSubstr("state digest  "));
  EXPECT_THAT(out_.str(), HasSubstr("model.layers.1.input_layernorm.weight"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("model.layers.0.input_layernorm.weight")));
}

TEST_F(CheckpointsTest, ShowHasNoTableWithoutTensors) {
  ASSERT_TRUE(ShowCheckpoint({.step = Step()}, out_).ok());
  EXPECT_THAT(out_.str(), Not(HasSubstr("CHUNKS")));
  EXPECT_THAT(out_.str(), HasSubstr("HuggingFaceStorageReader"));
  ASSERT_TRUE(ShowCheckpoint({.step = Step(), .tensors = "nothing*"}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("no tensor matches nothing*"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("CHUNKS")));
}

TEST_F(CheckpointsTest, ShowAsJsonListsTensorsOfTheGlob) {
  ASSERT_TRUE(
      ShowCheckpoint({.step = Job(), .tensors = "model.norm.weight", .format = Format::kJson}, out_)
          .ok());
  const auto document = json::Parse(out_.str());
  ASSERT_TRUE(document.ok());
  EXPECT_EQ(document->Find("step")->AsInt(), 20) << "a folder means its newest good step";
  ASSERT_EQ(document->Find("tensors")->AsArray().size(), 1u);
  EXPECT_EQ(document->Find("tensors")->AsArray()[0].Find("dtype")->AsString(), "F32");
}

TEST_F(CheckpointsTest, VerifyAcceptsAWholeStep) {
  for (const auto depth : {store::VerifyDepth::kQuick, store::VerifyDepth::kDeep}) {
    EXPECT_TRUE(VerifyCheckpoint({.step = Step(), .depth = depth}, out_).ok());
  }
  EXPECT_THAT(out_.str(), HasSubstr(": ok (deep): "));
}

TEST_F(CheckpointsTest, VerifyNamesFileTensorAndBlock) {
  const std::string file = "model/shard-00001-model-00001-of-00001.safetensors";
  Flip(file, 20000);
  EXPECT_TRUE(VerifyCheckpoint({.step = Step(), .depth = store::VerifyDepth::kQuick}, out_).ok());
  const absl::Status status = VerifyCheckpoint({.step = Step()}, out_);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(out_.str(), HasSubstr("BAD   " + file + ": tensor "));
  EXPECT_THAT(out_.str(), HasSubstr(", block 0: crc32c "));
  EXPECT_THAT(out_.str(), HasSubstr("NOT WHOLE (deep)"));
}

TEST_F(CheckpointsTest, VerifyAsJsonNamesTheProblem) {
  std::filesystem::remove(Step() + "/hf/config.json");
  EXPECT_FALSE(VerifyCheckpoint({.step = Step(), .format = Format::kJson}, out_).ok());
  const auto document = json::Parse(out_.str());
  ASSERT_TRUE(document.ok());
  EXPECT_FALSE(document->Find("ok")->AsBool());
  const json::Value& problem = document->Find("problems")->AsArray().front();
  EXPECT_EQ(problem.Find("file")->AsString(), "hf/config.json");
  EXPECT_EQ(problem.Find("what")->AsString(), "missing");
}

TEST_F(CheckpointsTest, Bf16MomentsAreShownVerifiedAndLeftOutOfExports) {
  const testing::SavedWorld narrow = LlamaWorld(false, DType::kBF16);
  const auto committed = testing::Save(*store_, narrow, {.step = 30, .epoch = 1, .attempt = 1});
  ASSERT_TRUE(committed.ok()) << committed.status();
  const std::string step = Job() + "/step-0000000030";
  const std::string moment = "state.model.norm.weight.exp_avg";
  ASSERT_TRUE(
      ShowCheckpoint({.step = step, .tensors = moment, .format = Format::kJson}, out_).ok());
  const auto document = json::Parse(out_.str());
  ASSERT_TRUE(document.ok());
  EXPECT_EQ(document->Find("tensors")->AsArray().front().Find("dtype")->AsString(), "BF16");
  out_.str("");
  ASSERT_TRUE(ShowCheckpoint({.step = step, .tensors = moment}, out_).ok());
  EXPECT_THAT(out_.str(), ::testing::ContainsRegex(moment + " +BF16 "));
  int64_t parameters = 0;
  for (const plan::TensorSpec& tensor : narrow.world.inventory.tensors) {
    parameters += ElementCount(tensor.shape);
  }
  EXPECT_THAT(out_.str(), HasSubstr("exp_avg (" + FormatBytes(2 * parameters) + ")"));
  for (const auto depth : {store::VerifyDepth::kQuick, store::VerifyDepth::kDeep}) {
    EXPECT_TRUE(VerifyCheckpoint({.step = step, .depth = depth}, out_).ok()) << out_.str();
  }
  std::vector<std::string> exported;
  for (const std::string& path : {step, Step()}) {
    ASSERT_TRUE(ExportCheckpoint({.step = path, .output = directory_ + "/export"}, out_).ok());
    exported.push_back(
        *store::ReadFile(store::FileStore(directory_ + "/export"), "model.safetensors", 1 << 30));
    std::filesystem::remove_all(directory_ + "/export");
  }
  EXPECT_EQ(exported[0], exported[1]);
}

// What a header says of a tensor against what the manifest says.
TEST_F(CheckpointsTest, VerifyOfAFolderIsOfItsNewestStepUnlessAnotherIsAsked) {
  EXPECT_TRUE(VerifyCheckpoint({.step = Job()}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000020: ok"));
  EXPECT_TRUE(VerifyCheckpoint({.step = Job(), .step_number = 10}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000010: ok"));
  const absl::Status none = VerifyCheckpoint({.step = Job(), .step_number = 11}, out_);
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("--step"));
}

TEST_F(CheckpointsTest, VerifyOfAllStepsHasALineForEachAndTheWorstResult) {
  EXPECT_TRUE(VerifyCheckpoint({.step = Job(), .all = true}, out_).ok());
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000010: ok (deep)"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000020: ok (deep)"));

  Flip("model/shard-00001-model-00001-of-00001.safetensors", 20000);
  std::filesystem::create_directory(Job() + "/step-0000000005");
  out_.str("");
  const absl::Status status = VerifyCheckpoint({.step = Job(), .all = true}, out_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 of 3 steps are not whole"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000020: NOT WHOLE"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000010: ok"));
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000005: NOT WHOLE"));

  // What is known to be bad is said, and is no new finding.
  ASSERT_TRUE(coordinator::MarkBad(*store_, 20, "tensor y").ok());
  std::filesystem::remove(Job() + "/step-0000000005");
  out_.str("");
  EXPECT_TRUE(VerifyCheckpoint({.step = Job(), .all = true}, out_).ok()) << out_.str();
  EXPECT_THAT(out_.str(), HasSubstr("step-0000000020: marked BAD, skipped: tensor y"));
  EXPECT_TRUE(absl::IsDataLoss(VerifyCheckpoint({.step = Job(), .step_number = 20}, out_)));
}

TEST_F(CheckpointsTest, VerifyOfAllStepsIsAListInDocuments) {
  EXPECT_TRUE(VerifyCheckpoint({.step = Job(), .all = true, .format = Format::kJson}, out_).ok());
  const absl::StatusOr<json::Value> document = json::Parse(out_.str());
  ASSERT_TRUE(document.ok()) << document.status();
  ASSERT_EQ(document->Find("items")->AsArray().size(), 2U);
  EXPECT_EQ(document->Find("items")->AsArray()[1].Find("step")->AsInt(), 10);
  EXPECT_TRUE(document->Find("items")->AsArray()[1].Find("ok")->AsBool());
  EXPECT_TRUE(absl::IsNotFound(VerifyCheckpoint({.step = directory_, .all = true}, out_)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      VerifyCheckpoint({.step = Job(), .step_number = 10, .all = true}, out_)));
}

TEST_F(CheckpointsTest, VerifyNamesATensorWhoseTypeIsAnother) {
  const testing::SavedWorld narrow = LlamaWorld(false, DType::kBF16);
  ASSERT_TRUE(testing::Save(*store_, narrow, {.step = 40, .epoch = 1, .attempt = 1}).ok());
  const std::string file = "optim/shard-00001-model-00001-of-00001.safetensors";
  const std::string path = Job() + "/step-0000000040/" + file;
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const size_t at = text.find("BF16");
  ASSERT_LT(at, size_t{4096} * 8);
  const size_t key = text.rfind("state.", at);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put('F');
  stream.close();
  EXPECT_TRUE(absl::IsDataLoss(VerifyCheckpoint(
      {.step = Job() + "/step-0000000040", .depth = store::VerifyDepth::kQuick}, out_)));
  EXPECT_THAT(out_.str(), HasSubstr(file));
  EXPECT_THAT(out_.str(), HasSubstr(text.substr(key, text.find('"', key) - key)));
  EXPECT_THAT(out_.str(), HasSubstr("dtype \"FF16\" is not supported"));
}

TEST_F(CheckpointsTest, WhatIsNotThereSaysSo) {
  EXPECT_TRUE(absl::IsNotFound(ShowCheckpoint({.step = Job() + "/step-0000000099"}, out_)));
  EXPECT_TRUE(absl::IsNotFound(ListCheckpoints({.folder = directory_ + "/absent"}, out_)));
  EXPECT_TRUE(absl::IsNotFound(VerifyCheckpoint({.step = directory_}, out_)));
  EXPECT_TRUE(absl::IsInvalidArgument(ShowCheckpoint({.step = "ftp://host/x"}, out_)));
}

TEST_F(CheckpointsTest, ExportIsTheModelThatWasSaved) {
  const std::string output = directory_ + "/export";
  const absl::Status status = ExportCheckpoint({.step = Step(), .output = output}, out_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(std::filesystem::exists(output + "/config.json"));
  EXPECT_FALSE(std::filesystem::exists(output + ".part"));
  auto loader = checkpoint::HuggingFaceLoader::Open(output, &saved_.world.inventory);
  ASSERT_TRUE(loader.ok()) << loader.status();
  for (size_t t = 0; t < saved_.world.inventory.tensors.size(); ++t) {
    const std::vector<float>& expected = saved_.state.values[0][t];
    std::vector<float> values(expected.size());
    const std::vector<plan::OwnedPiece> whole = {
        plan::WholePiece(static_cast<int>(t), saved_.world.inventory.tensors[t].shape)};
    ASSERT_TRUE(loader->ReadPieces(whole, values).ok());
    EXPECT_EQ(values, expected) << saved_.world.inventory.tensors[t].name;
  }
}

TEST_F(CheckpointsTest, Bf16ExportInSeveralFilesHasAnIndexAndItsDType) {
  const std::string output = directory_ + "/export";
  const absl::Status status = ExportCheckpoint(
      {.step = Step(), .output = output, .dtype = DType::kBF16, .max_file_bytes = 8000}, out_);
  ASSERT_TRUE(status.ok()) << status;
  std::stringstream config;
  config << std::ifstream(output + "/config.json").rdbuf();
  EXPECT_THAT(config.str(), HasSubstr("\"torch_dtype\": \"bfloat16\""));
  EXPECT_THAT(config.str(), HasSubstr("\"dtype\": \"bfloat16\""));
  EXPECT_TRUE(std::filesystem::exists(output + "/model.safetensors.index.json"));
  EXPECT_FALSE(std::filesystem::exists(output + "/model.safetensors"));
  auto loader = checkpoint::HuggingFaceLoader::Open(output, &saved_.world.inventory);
  ASSERT_TRUE(loader.ok()) << loader.status();
  std::vector<float> values(saved_.state.values[0][0].size());
  const std::vector<plan::OwnedPiece> whole = {
      plan::WholePiece(0, saved_.world.inventory.tensors[size_t{0}].shape)};
  ASSERT_TRUE(loader->ReadPieces(whole, values).ok());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i], Bf16ToFloat(FloatToBf16(saved_.state.values[0][0][i])));
  }
}

// Boxes of rows and of columns, from 2 x 2 ranks, are the same export as slices of 3.
TEST_F(CheckpointsTest, ExportDoesNotDependOnTheMesh) {
  std::vector<std::string> files;
  for (const int64_t tensor_ranks : {1, 2}) {
    testing::SavedWorld saved = LlamaWorld(false, DType::kF32, 2);
    if (tensor_ranks == 1) {
      saved = testing::SaveOf(testing::CutWorld(saved.world.inventory, 3, 1), saved.state);
      saved.config_json = LlamaWorld(false, DType::kF32, 2).config_json;
    }
    const int64_t step = 50 + tensor_ranks;
    ASSERT_TRUE(testing::Save(*store_, saved, {.step = step, .epoch = 1, .attempt = 1}).ok());
    const std::string output = directory_ + "/export" + std::to_string(step);
    const absl::Status status = ExportCheckpoint(
        {.step = Job() + "/step-00000000" + std::to_string(step), .output = output}, out_);
    ASSERT_TRUE(status.ok()) << status;
    std::stringstream content;
    content << std::ifstream(output + "/model.safetensors", std::ios::binary).rdbuf();
    files.push_back(content.str());
  }
  EXPECT_FALSE(files[0].empty());
  EXPECT_EQ(files[0], files[1]);
}

TEST_F(CheckpointsTest, ExportRemovesWhatAKilledOneLeftAndNothingElse) {
  const std::string output = directory_ + "/export";
  const std::string part = output + ".part";
  const auto running = HeldFolder::Make(part);
  ASSERT_TRUE(running.ok()) << running.status();
  const absl::Status refused = ExportCheckpoint({.step = Step(), .output = output}, out_);
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another process writes it"));

  ASSERT_TRUE((*running)->TakeMarkOut().ok());  // a folder of somebody else
  std::ofstream(part + "/mine") << "mine";
  EXPECT_TRUE(absl::IsAlreadyExists(ExportCheckpoint({.step = Step(), .output = output}, out_)));
  EXPECT_TRUE(std::filesystem::exists(part + "/mine"));

  std::filesystem::remove_all(part);
  ASSERT_TRUE(HeldFolder::Make(part).ok());  // which ends at once
  std::ofstream(part + "/model.safetensors") << "half";
  const absl::Status status = ExportCheckpoint({.step = Step(), .output = output}, out_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_FALSE(std::filesystem::exists(part));
  for (const auto& entry : std::filesystem::directory_iterator(output)) {
    EXPECT_NE(entry.path().filename().string()[0], '.') << entry.path();
  }
}

TEST_F(CheckpointsTest, AnExportThatIsInterruptedLeavesNothing) {
  const absl::Status status = ExportCheckpoint(
      {.step = Step(), .output = directory_ + "/export", .cancelled = [] { return true; }}, out_);
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/export.part"));
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/export"));
}

TEST_F(CheckpointsTest, ACopyThatWasCutOffGoesOnWithoutItsLeftovers) {
  const std::string to = directory_ + "/copy";
  const auto parts = [&to] {
    int count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(to)) {
      count += entry.path().extension() == ".part" ? 1 : 0;
    }
    return count;
  };
  int blocks = 0;
  const absl::Status cut = CopyCheckpoint(
      {.from = Step(), .to = to, .cancelled = [&blocks] { return ++blocks == 3; }}, out_);
  EXPECT_TRUE(absl::IsCancelled(cut)) << cut;
  EXPECT_THAT(std::string(cut.message()), HasSubstr("the same command goes on"));
  EXPECT_EQ(parts(), 0);
  // As a kill leaves it.
  std::string attempt;
  for (const auto& entry : std::filesystem::directory_iterator(to)) {
    attempt = entry.path().extension() == ".tmp" ? entry.path().string() : attempt;
  }
  ASSERT_NE(attempt, "");
  std::ofstream(attempt + "/model/x.safetensors.0123456789abcdef.part") << "half";
  const absl::Status status = CopyCheckpoint({.from = Step(), .to = to}, out_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(parts(), 0);
  EXPECT_TRUE(VerifyCheckpoint({.step = to}, out_).ok());
}

TEST_F(CheckpointsTest, ExportNeverOverwrites) {
  const std::string output = directory_ + "/export";
  std::filesystem::create_directory(output);
  EXPECT_TRUE(absl::IsAlreadyExists(ExportCheckpoint({.step = Step(), .output = output}, out_)));
  EXPECT_TRUE(std::filesystem::is_empty(output));
  std::filesystem::remove(output);
  std::filesystem::create_directory(output + ".part");
  EXPECT_TRUE(absl::IsAlreadyExists(ExportCheckpoint({.step = Step(), .output = output}, out_)));
}

TEST_F(CheckpointsTest, ExportOfADamagedStepLeavesNothing) {
  Flip("model/shard-00001-model-00001-of-00001.safetensors", 20000);
  const std::string output = directory_ + "/export";
  const absl::Status status = ExportCheckpoint({.step = Step(), .output = output}, out_);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("block 0"));
  EXPECT_FALSE(std::filesystem::exists(output));
  EXPECT_FALSE(std::filesystem::exists(output + ".part"));
}

TEST_F(CheckpointsTest, ExportRefusesAConfigOfAnotherModel) {
  testing::SavedWorld other = LlamaWorld(true);
  other.config_json = saved_.config_json;  // untied: wants lm_head.weight
  ASSERT_TRUE(testing::Save(*store_, other, {.step = 40, .epoch = 1, .attempt = 1}).ok());
  const absl::Status status = ExportCheckpoint(
      {.step = Job() + "/step-0000000040", .output = directory_ + "/export"}, out_);
  EXPECT_THAT(std::string(status.message()), HasSubstr("hf/config.json: describes"));
}

TEST_F(CheckpointsTest, ExportOptionsAreChecked) {
  EXPECT_TRUE(absl::IsInvalidArgument(
      ExportCheckpoint({.step = Step(), .format = "gguf", .output = "/x"}, out_)));
  EXPECT_TRUE(absl::IsInvalidArgument(ExportCheckpoint({.step = Step(), .output = ""}, out_)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      ExportCheckpoint({.step = Step(), .output = "/x", .dtype = DType::kF16}, out_)));
  EXPECT_TRUE(absl::IsNotFound(
      ExportCheckpoint({.step = Step(), .output = directory_ + "/no/export"}, out_)));
}

TEST(GlobTest, MatchesLikeAShell) {
  EXPECT_TRUE(MatchesGlob("*", ""));
  EXPECT_TRUE(MatchesGlob("a*c", "abc"));
  EXPECT_TRUE(MatchesGlob("*.weight", "model.norm.weight"));
  EXPECT_TRUE(MatchesGlob("a*b*c", "aXbYbZc"));
  EXPECT_TRUE(MatchesGlob("a?c", "abc"));
  EXPECT_FALSE(MatchesGlob("a?c", "ac"));
  EXPECT_FALSE(MatchesGlob("a*c", "abcd"));
  EXPECT_FALSE(MatchesGlob("", "a"));
}

// For tests/interop/checkpoint_readers.py: steps of two small models for other programs to read,
// of one with bf16 moments, and of one that a mesh of 2 x 2 with a tensor axis saved.
TEST(InteropTest, WritesStepsWhereItIsAsked) {
  const char* root = std::getenv("RAVEL_INTEROP_STORE");
  if (root == nullptr) {
    GTEST_SKIP() << "RAVEL_INTEROP_STORE is not set";
  }
  struct Case {
    const char* folder;
    bool tied;
    DType moments;
    int64_t tensor_ranks;
  };
  for (const Case& written : {Case{"/untied", false, DType::kF32, 1},
                              Case{"/tied", true, DType::kF32, 1},
                              Case{"/bf16_moments", false, DType::kBF16, 1},
                              Case{"/mesh_2x2", false, DType::kF32, 2}}) {
    store::FileStore store(std::string(root) + written.folder);
    ASSERT_TRUE(store.MakeRoot().ok());
    const auto committed =
        testing::Save(store,
                      LlamaWorld(written.tied, written.moments, written.tensor_ranks),
                      {.step = 20, .epoch = 1, .attempt = 1});
    ASSERT_TRUE(committed.ok()) << committed.status();
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      CheckpointExportOptions options = {.step = store.Locate(committed->directory),
                                         .dtype = dtype};
      options.output = store.Locate(dtype == DType::kF32 ? "export-f32" : "export-bf16");
      options.max_file_bytes = dtype == DType::kF32 ? options.max_file_bytes : 8000;
      const absl::Status status = ExportCheckpoint(options, std::cout);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
}

}  // namespace
}  // namespace ravel::ctl
