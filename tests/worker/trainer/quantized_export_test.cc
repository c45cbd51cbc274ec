// Exports of quantized weights have the codes that were trained with, in the layout that readers of
// such files know, and a deep look at a checkpoint casts them again.

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/json.h"
#include "common/model/recipes.h"
#include "common/signed_size.h"
#include "coordinator/ctl/checkpoints_export.h"
#include "coordinator/ctl/checkpoints_verify.h"
#include "kernels/quantize.h"
#include "tests/testing/recipe_cases.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;
using ::testing::HasSubstr;

struct Exported {
  DType dtype = DType::kF32;
  Shape shape;
  std::string bytes;
};
std::map<std::string, Exported> ReadExport(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(stream)), {});
  const int64_t header =
      8 + ckpt::SafetensorsJsonBytes(content.substr(0, 8), std::ssize(content)).value();
  const auto parsed =
      ckpt::ParseSafetensorsHeader(content.substr(0, Size(header)), std::ssize(content));
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  std::map<std::string, Exported> tensors;
  for (const ckpt::SafetensorsEntry& entry : parsed->entries) {
    EXPECT_EQ(entry.begin % DTypeBytes(entry.dtype), 0) << entry.key << " is not aligned";
    tensors[entry.key] = {
        entry.dtype,
        entry.shape,
        content.substr(Size(header + entry.begin), Size(entry.end - entry.begin))};
  }
  return tensors;
}

// A weight as a trainer of one rank has it.
struct Trained {
  std::string codes;
  std::vector<float> values;  // decoded
};
std::map<std::string, Trained> TrainedWeights(const plan::JobSpec& spec) {
  std::map<std::string, Trained> weights;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < kResumeSteps; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
    }
    kernels::CpuStream stream;
    for (const shard::ParameterGroup& group : engine.groups()) {
      for (const quant::QuantPiece& piece : group.quant_pieces()) {
        Trained& weight = weights[engine.tensor(piece.tensor).name];
        weight.codes.assign(piece.codes.As<char>(),
                            Size(piece.codes.size[0] * piece.codes.size[1]));
        const int64_t columns = piece.main_weight.size[1];
        std::vector<uint16_t> decoded(Size(piece.main_weight.size[0] * columns));
        TensorView to = MatrixView(nullptr, piece.main_weight.size[0], columns);
        to.dtype = DType::kBF16;
        to.data = decoded.data();
        float whole = 0;
        kernels::DecodeWeight(stream,
                              {.codes = piece.codes,
                               .scales = engine.quant()->ScalesOf(piece.tensor, false).weight,
                               .to = to,
                               .scale = VectorView(&whole, 1)});
        for (const uint16_t value : decoded) {
          weight.values.push_back(Bf16ToFloat(value) * whole);
        }
      }
    }
    return absl::OkStatus();
  };
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 1, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
  return weights;
}

float E2M1(uint32_t code) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return (code & 8u) != 0 ? -kMagnitudes[code & 7u] : kMagnitudes[code & 7u];
}

// A weight decoded from the export alone: code * scale_inv, and * global_scale where there is one.
std::vector<float> Decoded(const std::map<std::string, Exported>& tensors,
                           const std::string& name) {
  const Exported& codes = tensors.at(name);
  const Exported& scales = tensors.at(name + "_scale_inv");
  const bool packed = codes.dtype == DType::kU8;
  const int64_t rows = codes.shape[0];
  const int64_t columns = codes.shape[1] * (packed ? 2 : 1);
  float whole = 1;
  if (packed) {
    std::memcpy(&whole, tensors.at(name + "_global_scale").bytes.data(), sizeof(whole));
  }
  const auto scale_at = [&](int64_t row, int64_t column) {
    const bool one = scales.shape.empty();
    const int64_t at =
        one ? 0
            : row * scales.shape[0] / rows * scales.shape[1] + column * scales.shape[1] / columns;
    const char* byte = scales.bytes.data() + at;
    if (scales.dtype == DType::kF32) {
      float value = 0;
      std::memcpy(&value, scales.bytes.data() + at * 4, sizeof(value));
      return value;
    }
    return scales.dtype == DType::kU8 ? std::ldexp(1.0f, static_cast<uint8_t>(*byte) - 127)
                                      : Fp8E4M3ToFloat(static_cast<uint8_t>(*byte));
  };
  std::vector<float> values;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const auto code = static_cast<uint8_t>(codes.bytes[Size(packed ? i / 2 : i)]);
    const float value = packed ? E2M1(i % 2 == 0 ? code & 15u : code >> 4u) : Fp8E4M3ToFloat(code);
    values.push_back(value * scale_at(i / columns, i % columns) * whole);
  }
  return values;
}

class QuantizedExport : public ::testing::TestWithParam<RecipeForm> {
 protected:
  QuantizedExport() { std::filesystem::remove_all(folder_); }
  ~QuantizedExport() override { std::filesystem::remove_all(folder_); }
  EpochArgs Epoch(const std::string& model, int ranks) {
    plan::JobSpec spec = CaseJob(model, folder_);
    UseRecipe(GetParam().recipe, spec);
    return runs_.Whole(spec, ranks);
  }

  const std::string folder_ = OwnFolder(absl::StrCat("ravel_export_", GetParam().name));
  ResumeRuns runs_{folder_};
  std::ostringstream out_;
};
INSTANTIATE_TEST_SUITE_P(Five,
                         QuantizedExport,
                         ::testing::ValuesIn(kRecipeForms),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(QuantizedExport, HasTheCodesThatWereTrainedWith) {
  const EpochArgs args = Epoch("recipes", 3);
  const EpochOutcome saved = RunWell(args);
  const std::string output = folder_ + "/out";
  const absl::Status exported = ctl::ExportCheckpoint({.step = saved.committed.at(kResumeSteps),
                                                       .output = output,
                                                       .dtype = DType::kBF16,
                                                       .quantized = true},
                                                      out_);
  ASSERT_TRUE(exported.ok()) << exported;
  const std::map<std::string, Exported> tensors = ReadExport(output + "/model.safetensors");
  const std::map<std::string, Trained> trained = TrainedWeights(args.spec);
  ASSERT_EQ(trained.size(), 14u);
  for (const auto& [name, weight] : trained) {
    ASSERT_EQ(tensors.count(name), 1u) << name;
    EXPECT_EQ(tensors.at(name).dtype, plan::CodeType(GetParam().recipe)) << name;
    EXPECT_EQ(tensors.at(name).bytes, weight.codes) << name;
    const std::vector<float> decoded = Decoded(tensors, name);
    for (size_t i = 0; i < decoded.size(); ++i) {
      ASSERT_NEAR(decoded[i], weight.values[i], 1e-6 * std::fabs(weight.values[i])) << name << i;
    }
  }
  EXPECT_EQ(tensors.at("model.embed_tokens.weight").dtype, DType::kBF16);
  EXPECT_EQ(tensors.count("model.embed_tokens.weight_scale_inv"), 0u);
}

// vLLM's name for one scale, with the same bytes, and no other name beside it.
TEST_P(QuantizedExport, ScalesHaveTheNamesOfTheirReader) {
  const EpochOutcome saved = RunWell(Epoch("recipes", 2));
  const auto export_to = [&](const std::string& output, bool quantized, bool for_vllm) {
    return ctl::ExportCheckpoint({.step = saved.committed.at(kResumeSteps),
                                  .output = folder_ + output,
                                  .quantized = quantized,
                                  .for_vllm = for_vllm},
                                 out_);
  };
  EXPECT_THAT(std::string(export_to("/plain", false, true).message()), HasSubstr("--quantized"));
  const absl::Status exported = export_to("/vllm", true, true);
  const Recipe recipe = GetParam().recipe;
  if (recipe == Recipe::kMxFp8 || recipe == Recipe::kNvFp4) {
    EXPECT_THAT(std::string(exported.message()), HasSubstr("--reader vllm: expected codes of"));
    return;
  }
  ASSERT_TRUE(exported.ok()) << exported;
  ASSERT_TRUE(export_to("/transformers", true, false).ok());
  const auto ours = ReadExport(folder_ + "/transformers/model.safetensors");
  const auto theirs = ReadExport(folder_ + "/vllm/model.safetensors");
  EXPECT_EQ(theirs.size(), ours.size());
  std::ifstream config(folder_ + "/vllm/config.json");
  EXPECT_THAT(std::string((std::istreambuf_iterator<char>(config)), {}),
              HasSubstr("ignored_layers"));
  for (const auto& [name, tensor] : ours) {
    const bool renamed = name.ends_with("_scale_inv") && plan::BlockEdge(recipe) == 0;
    const std::string other = renamed ? name.substr(0, name.size() - 4) : name;
    ASSERT_EQ(theirs.count(other), 1u) << other;
    EXPECT_EQ(theirs.at(other).bytes, tensor.bytes) << other;
  }
}

TEST_P(QuantizedExport, DescribesItselfToReaders) {
  EpochArgs args = Epoch("recipes", 2);
  args.spec.recipe.keep_bf16 = {"model.layers.1.self_attn.o_proj.weight"};
  const EpochOutcome saved = RunWell(args);
  const std::string output = folder_ + "/out";
  ASSERT_TRUE(ctl::ExportCheckpoint({.step = saved.committed.at(kResumeSteps),
                                     .output = output,
                                     .max_file_bytes = 100'000,
                                     .quantized = true},
                                    out_)
                  .ok());
  std::ifstream stream(output + "/config.json");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  const auto config = json::Parse(text);
  ASSERT_TRUE(config.ok()) << config.status();
  const json::Value* quantization = config->Find("quantization_config");
  ASSERT_NE(quantization, nullptr);
  const Recipe recipe = GetParam().recipe;
  EXPECT_EQ(quantization->Find("quant_method")->AsString(),
            recipe == Recipe::kMxFp8   ? "mxfp8"
            : recipe == Recipe::kNvFp4 ? "nvfp4"
                                       : "fp8");
  EXPECT_EQ(quantization->Find("activation_scheme")->AsString(), "dynamic");
  const json::Value* block = quantization->Find("weight_block_size");
  ASSERT_EQ(block == nullptr, plan::BlockEdge(recipe) == 0);
  if (block != nullptr) {
    EXPECT_EQ(block->AsArray()[0].AsInt(), recipe == Recipe::kFloat8Block ? 128 : 1);
    EXPECT_EQ(block->AsArray()[1].AsInt(), plan::BlockEdge(recipe));
  }
  const json::Array& kept = quantization->Find("modules_to_not_convert")->AsArray();
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0].AsString(), "lm_head");
  EXPECT_EQ(kept[1].AsString(), "model.layers.1.self_attn.o_proj");
  EXPECT_TRUE(std::filesystem::exists(output + "/model.safetensors.index.json"));
}

TEST_P(QuantizedExport, AVerificationCastsCodesAgain) {
  const EpochOutcome saved = RunWell(Epoch("recipes", 2));
  const std::string step = saved.committed.at(kResumeSteps);
  EXPECT_TRUE(ctl::VerifyCheckpoint({.step = step}, out_).ok()) << out_.str();
  ckpt::Manifest manifest = ManifestOf(step);
  manifest.quant.tensors[2].digest64 += 1;
  const std::string bytes = ckpt::EncodeManifest(manifest);
  std::ofstream(step + "/manifest.pb", std::ios::binary | std::ios::trunc) << bytes;
  std::ofstream(step + "/COMMIT", std::ios::binary | std::ios::trunc)
      << ckpt::EncodeCommit(ckpt::MakeCommitRecord(manifest, bytes));
  EXPECT_TRUE(
      ctl::VerifyCheckpoint({.step = step, .depth = store::VerifyDepth::kQuick}, out_).ok());
  const absl::Status verified = ctl::VerifyCheckpoint({.step = step}, out_);
  EXPECT_THAT(std::string(verified.message()),
              HasSubstr("tensor " + manifest.quant.tensors[2].name + ": its codes have digest64 "));
}

TEST_P(QuantizedExport, IsRefusedWhereNothingIsQuantizedOrNobodyReadsIt) {
  EpochArgs plain = Epoch("recipes", 1);
  plain.spec.recipe = {};
  const auto refusal = [&](const EpochOutcome& saved) {
    return std::string(ctl::ExportCheckpoint({.step = saved.committed.at(kResumeSteps),
                                              .output = folder_ + "/out",
                                              .quantized = true},
                                             out_)
                           .message());
  };
  EXPECT_THAT(refusal(RunWell(plain)), HasSubstr("the step has no quantized weights"));
  EXPECT_THAT(refusal(RunWell(Epoch("recipes_gpt2", 1))),
              HasSubstr("--quantized: expected matrices of [outputs, inputs]"));
}

}  // namespace
}  // namespace ravel::trainer
