// ravelctl plan, on the example jobs and without any device.

#include <cctype>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/json.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/plan_verbs.h"

namespace ravel::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Ran {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Ran PlanWith(const PlanOptions& options, Format format = Format::kTable) {
  CommonOptions common;
  common.format = format;
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Ran ran;
  ran.exit_code = RunPlan(common, options);
  ran.out = ::testing::internal::GetCapturedStdout();
  ran.err = ::testing::internal::GetCapturedStderr();
  return ran;
}

std::string Example(const std::string& name) {
  return std::string(RAVEL_EXAMPLES) + "/" + name;
}

struct Case {
  const char* file;
  const char* devices;
  int64_t parameters;
  int64_t of_one_device = 0;  // where devices share layers
};
class Examples : public ::testing::TestWithParam<Case> {};

TEST_P(Examples, FitTheirDevices) {
  const Ran ran =
      PlanWith({.file = Example(GetParam().file), .devices = GetParam().devices}, Format::kJson);
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.err;
  const absl::StatusOr<json::Value> plan = json::Parse(ran.out);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->Find("parameters")->AsInt(), GetParam().parameters);
  EXPECT_EQ(plan->Find("weightElementBytes")->AsInt(), 2);
  EXPECT_EQ(plan->Find("types")->Find("compute")->AsString(), "bf16");
  EXPECT_EQ(plan->Find("types")->Find("mainWeight")->AsString(), "fp32");
  EXPECT_EQ(plan->Find("digest")->AsString().size(), 64u);
  const json::Value& fit = *plan->Find("fit");
  EXPECT_TRUE(fit.Find("fits")->AsBool());
  EXPECT_LE(fit.Find("peakBytes")->AsInt(), fit.Find("usableBytes")->AsInt());
  // Every element is in one group, with little padding.
  int64_t elements = 0;
  for (const json::Value& group : plan->Find("groups")->AsArray()) {
    elements += group.Find("elements")->AsInt();
  }
  EXPECT_EQ(elements,
            GetParam().of_one_device > 0 ? GetParam().of_one_device : GetParam().parameters);
  EXPECT_LE(plan->Find("paddingElements")->AsInt(), elements / 100);
  EXPECT_FALSE(plan->Find("timeline")->Find("instructions")->AsArray().empty());
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  std::string name = std::string(info.param.file) + "_" + info.param.devices;
  for (char& c : name) {
    c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return name;
}
// Eight devices share all but the 161 norms.
constexpr int64_t kAllOf70b = 70553706496;
constexpr int64_t kNormsOf70b = 161 * 8192;
constexpr int64_t kPartOf70b = (kAllOf70b - kNormsOf70b) / 8 + kNormsOf70b;

// Parameter counts are those of the published models.
INSTANTIATE_TEST_SUITE_P(
    Jobs,
    Examples,
    ::testing::Values(Case{"llama3-8b.yaml", "64xH100-80G", 8030261248},
                      Case{"llama3-8b.yaml", "16xH200-141G", 8030261248},
                      Case{"llama3-70b.yaml", "512xH100-80G", kAllOf70b, kPartOf70b},
                      Case{"qwen3-0.6b.yaml", "8xH100-80G", 596049920}),
    CaseName);

TEST(PlanVerb, TextHasTheTables) {
  const Ran ran = PlanWith({.file = Example("llama3-8b.yaml"), .devices = "64xH100-80G"});
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.err;
  for (const char* part : {"8030261248 parameters in 34 units",
                           "wire per rank and step",
                           "memory per rank",
                           "persistent",
                           "windows",
                           "activations",
                           "workspace",
                           "predicted peak",
                           "layers.1 .. layers.30 (30)",
                           "timeline of one step",
                           "compute",
                           "bf16 weights and activations; fp32 main weights",
                           "usable on H100-80G",
                           ": fits",
                           "plan "}) {
    EXPECT_THAT(ran.out, HasSubstr(part));
  }
  const Ran again = PlanWith({.file = Example("llama3-8b.yaml"), .devices = "64xH100-80G"});
  EXPECT_EQ(again.out, ran.out) << "a pure function of the job and the devices";
}

TEST(PlanVerb, ANameThatIsNotKnownIsPlannedWithAWord) {
  const Ran ran = PlanWith({.file = Example("llama3-8b.yaml"), .devices = "64xH10-80G"});
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("the device is not known; known are A100, H100, H200"));
}

TEST(PlanVerb, ChoosesTheFractionThatIsOffloaded) {
  const std::string path = ::testing::TempDir() + "/automatic_offload.yaml";
  std::ifstream example(Example("llama3-8b.yaml"));
  std::string job((std::istreambuf_iterator<char>(example)), {});
  const size_t at = job.find("optimizer: {");
  ASSERT_NE(at, std::string::npos);
  job.insert(at + std::string("optimizer: {").size(), "offload: {fraction: auto}, ");
  std::ofstream(path) << job;
  const Ran four = PlanWith({.file = path, .devices = "4xH100-80G"});
  EXPECT_EQ(four.exit_code, kExitOk) << four.out << four.err;
  EXPECT_THAT(four.out, HasSubstr("training.optimizer.offload.fraction: auto, here 0."));
  EXPECT_THAT(four.out, HasSubstr("the least that fits"));
  const Ran many = PlanWith({.file = path, .devices = "64xH100-80G"});
  EXPECT_THAT(many.out, HasSubstr("training.optimizer.offload.fraction: auto, here 0, "));
}

TEST(PlanVerb, WhatDoesNotFitIsRefusedWithWhatWouldFit) {
  const Ran ran =
      PlanWith({.file = Example("llama3-8b.yaml"), .devices = "2xA100-40G"}, Format::kJson);
  EXPECT_EQ(ran.exit_code, kExitConflict);
  EXPECT_THAT(ran.err, HasSubstr("does not fit: needs "));
  EXPECT_THAT(ran.err, HasSubstr("at size 2"));
  EXPECT_THAT(ran.err, HasSubstr("; fits with devices.count: "));
  const absl::StatusOr<json::Value> plan = json::Parse(ran.out);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->Find("fit")->Find("fits")->AsBool());
  const json::Value& fit = *plan->Find("fit");
  int64_t narrower = 0;
  for (const json::Value& remedy : fit.Find("remedies")->AsArray()) {
    if (remedy.Find("error") == nullptr) {
      EXPECT_EQ(remedy.Find("savedBytes")->AsInt(),
                fit.Find("peakBytes")->AsInt() - remedy.Find("peakBytes")->AsInt());
    }
    narrower += remedy.Find("change")->AsString().find("bf16") != std::string::npos ? 1 : 0;
  }
  EXPECT_GE(narrower, 3) << "main weights, moments, and both";
}

TEST(PlanVerb, NamesTheTensorAxisAndWhatItMoves) {
  const Ran text = PlanWith({.file = Example("llama3-70b.yaml"), .devices = "512xH100-80G"});
  ASSERT_EQ(text.exit_code, kExitOk) << text.err;
  for (const char* part : {"shard 64 x tensor 8", "tensor axis: reduces ", "rank 0 tensor  T"}) {
    EXPECT_THAT(text.out, HasSubstr(part));
  }
  const Ran ran =
      PlanWith({.file = Example("llama3-70b.yaml"), .devices = "512xH100-80G"}, Format::kJson);
  const absl::StatusOr<json::Value> plan = json::Parse(ran.out);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const json::Value& tensor = *plan->Find("wireBytesPerStep")->Find("tensor");
  const int64_t bytes = tensor.Find("gathers")->AsInt() + tensor.Find("reduces")->AsInt();
  EXPECT_GT(bytes, int64_t{1} << 40) << ran.out.substr(0, 2000);
}

TEST(PlanVerb, ATensorGroupLargerThanANodeIsRefused) {
  std::ifstream example(Example("llama3-70b.yaml"));
  std::string job((std::istreambuf_iterator<char>(example)), {});
  const std::string eight = "tensor: 8 ";
  ASSERT_NE(job.find(eight), std::string::npos);
  job.replace(job.find(eight), eight.size(), "tensor: 16");
  const std::string path = ::testing::TempDir() + "/tensor_16.yaml";
  std::ofstream(path) << job;
  const Ran refused = PlanWith({.file = path, .devices = "512xH100-80G"});
  EXPECT_EQ(refused.exit_code, kExitUsage) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("parallelism.tensor"));
  EXPECT_THAT(refused.err, HasSubstr("8 devices of a node"));
}

TEST(PlanVerb, SeventyBillionAtWidth512InTwoSeconds) {
  const std::clock_t begin = std::clock();  // of this process: other load does not count
  const Ran ran =
      PlanWith({.file = Example("llama3-70b.yaml"), .devices = "1024xH100-80G"}, Format::kName);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_LT(seconds, RAVEL_MOST_SECONDS);
}

class PlanFile : public ::testing::Test {
 protected:
  PlanFile() {
    std::string pattern = ::testing::TempDir() + "plan_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~PlanFile() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& more) {
    std::ofstream(folder_ + "/job.yaml") << R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: small}
spec:
  model:
    config: {vocabSize: 512, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2,
             numAttentionHeads: 4, maxPositionEmbeddings: 64}
  data: {train: [{path: /nowhere/train}]}
  training: {steps: 10, globalBatch: 16, optimizer: {lr: 1e-3}}
  devices: {kind: cpu, count: 2}
  checkpoint: {store: /nowhere/store}
)" << more;
    return folder_ + "/job.yaml";
  }
  std::string folder_;
};

TEST_F(PlanFile, CpuDevicesShareMemoryUnlessTold) {
  const std::string file = Write("");
  const Ran shared = PlanWith({.file = file, .devices = "4xcpu"});
  ASSERT_EQ(shared.exit_code, kExitOk) << shared.err;
  EXPECT_THAT(shared.out, HasSubstr("gathers in place"));
  EXPECT_THAT(shared.out, HasSubstr("fp32 throughout"));
  EXPECT_THAT(shared.out, HasSubstr("4 rank(s)"));
  const Ran apart = PlanWith({.file = file, .devices = "4xcpu", .shared_memory = false});
  EXPECT_THAT(apart.out, HasSubstr("gathers copied"));
  EXPECT_THAT(apart.out, Not(HasSubstr("symmetric 1")));
  const Ran own = PlanWith({.file = file});
  EXPECT_THAT(own.out, HasSubstr("2 rank(s)"));
}

TEST_F(PlanFile, VerboseShowsAddresses) {
  const Ran ran = PlanWith({.file = Write(""), .verbose = true});
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("main_weight/layers.1"));
  EXPECT_THAT(ran.out, HasSubstr("@"));
}

TEST_F(PlanFile, UnitsWithStrategiesOfTheirOwnAreNamed) {
  const Ran plain = PlanWith({.file = Write("")});
  EXPECT_THAT(plain.out, Not(HasSubstr("strategies of units")));
  const std::string file =
      Write("  parallelism: {replicas: 2, units: [{match: embed, strategy: zero1}]}\n");
  const Ran ran = PlanWith({.file = file});
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("embed                              optim, replicate no_shard"));
  EXPECT_THAT(ran.out, HasSubstr("layers.0 .. head (3)               optim_grads_params"));
  const Ran json = PlanWith({.file = file}, Format::kJson);
  EXPECT_THAT(json.out, HasSubstr("\"strategy\": \"optim\""));
  EXPECT_THAT(json.out, HasSubstr("\"replicateStrategy\": \"no_shard\""));
}

// Fails when a field of the job does not reach the plan.
TEST_F(PlanFile, LayersThatRunTwiceOrAreLeftOutAreNamed) {
  const std::string file = Write("");
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  std::ofstream(file) << absl::StrReplaceAll(
      text.str(),
      {{"numHiddenLayers: 2", "numHiddenLayers: 2, layerSharing: true"},
       {"globalBatch: 16", "globalBatch: 16, layerDrop: 0.25"}});
  const Ran ran = PlanWith({.file = file});
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("layerSharing: every layer runs twice in a row"));
  EXPECT_THAT(ran.out, HasSubstr("leaves out each layer with probability 0.25"));
}

TEST_F(PlanFile, ARecipeThatTheDevicesLackIsRefused) {
  const std::string mxfp8 = Write("  precision: {recipe: mxfp8}\n");
  const Ran hopper = PlanWith({.file = mxfp8, .devices = "2xH100-80G"});
  EXPECT_EQ(hopper.exit_code, kExitUsage);
  EXPECT_THAT(hopper.err,
              HasSubstr("precision.recipe: expected a recipe whose codes H100-80G (compute "
                        "capability 9.0) multiplies, which has the gemm paths fp8_tensor, "
                        "fp8_block, or precision.emulation: [dequant_bf16]"));
  EXPECT_EQ(PlanWith({.file = mxfp8, .devices = "2xB200-180G"}).exit_code, kExitOk);
  EXPECT_EQ(PlanWith({.file = mxfp8, .devices = "2xNext-1-48G"}).exit_code, kExitOk);
  EXPECT_EQ(PlanWith({.file = mxfp8, .devices = "2xcpu"}).exit_code, kExitOk);
  const std::string tensor = Write("  precision: {recipe: fp8_tensor}\n");
  EXPECT_EQ(PlanWith({.file = tensor, .devices = "2xA100-80G"}).exit_code, kExitUsage);
  EXPECT_EQ(PlanWith({.file = tensor, .devices = "2xH200-141G"}).exit_code, kExitOk);
  const std::string emulated =
      Write("  precision: {recipe: fp8_tensor, emulation: [dequant_bf16]}\n");
  EXPECT_EQ(PlanWith({.file = emulated, .devices = "2xA100-80G"}).exit_code, kExitOk);
}

TEST_F(PlanFile, MistakesAreNamed) {
  const std::string file = Write("");
  const Ran devices = PlanWith({.file = file, .devices = "4xH100"});
  EXPECT_EQ(devices.exit_code, kExitUsage);
  EXPECT_THAT(devices.err, HasSubstr("--devices: expected a count and a device"));
  EXPECT_THAT(devices.err, HasSubstr("known are A100, H100, H200, B200, GB200, L40S, each"));
  const Ran batch = PlanWith({.file = file, .devices = "32xcpu"});
  EXPECT_EQ(batch.exit_code, kExitUsage);
  EXPECT_THAT(batch.err, HasSubstr("spec.training.globalBatch"));
  EXPECT_THAT(batch.err, HasSubstr("--devices 32xcpu: ")) << "the file itself is right";
}

// Though the file is judged twice: with what the flag has changed of it, and as it is.
TEST_F(PlanFile, MistakesOfTheFileAreSaidOnce) {
  const Ran ran = PlanWith({.file = Write("  precison: {recipe: mxfp8}\n"), .devices = "2xcpu"});
  EXPECT_EQ(ran.exit_code, kExitUsage);
  const size_t first = ran.err.find("precison");
  ASSERT_NE(first, std::string::npos) << ran.err;
  EXPECT_EQ(ran.err.find("precison", ran.err.find('\n', first)), std::string::npos) << ran.err;
  EXPECT_THAT(ran.err, Not(HasSubstr("--devices 2xcpu: ")));
}

}  // namespace
}  // namespace ravel::ctl
