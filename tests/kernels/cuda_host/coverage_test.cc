// Every op of the contract headers has both backends, and a row here: a new op fails until it does.

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::kernels {
namespace {

namespace fs = std::filesystem;

std::string TextOf(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> OpsOf(const std::string& text) {
  const std::regex declaration(R"((?:^|\n)(?:void|uint64_t) (\w+)\(Stream& stream)");
  std::set<std::string> ops;
  for (std::sregex_iterator i(text.begin(), text.end(), declaration), end; i != end; ++i) {
    ops.insert((*i)[1]);
  }
  return ops;
}

std::set<std::string> OpsOfContracts() {
  std::set<std::string> ops;
  for (const fs::directory_entry& entry : fs::directory_iterator(RAVEL_KERNELS_FOLDER)) {
    if (entry.path().extension() == ".h") {
      ops.merge(OpsOf(TextOf(entry.path())));
    }
  }
  return ops;
}

const std::set<std::string> kOps = {"AdamWUpdate",
                                    "AddBias",
                                    "AddDigest",
                                    "AddInPlace",
                                    "AddPositions",
                                    "AttentionBackward",
                                    "AttentionForward",
                                    "BiasGradient",
                                    "BlockAmax",
                                    "BuildRopeTable",
                                    "Cast",
                                    "CopyBytes",
                                    "CountFlags",
                                    "DecideUpdate",
                                    "DecodeWeight",
                                    "DigestRange",
                                    "EmbeddingBackward",
                                    "EmbeddingForward",
                                    "GeluBackward",
                                    "GeluForward",
                                    "Gemm",
                                    "GroupedUpdate",
                                    "HeadNormBackward",
                                    "HeadNormForward",
                                    "InitNormal",
                                    "LargestWords",
                                    "LayerNormBackward",
                                    "LayerNormForward",
                                    "LinearCrossEntropyForward",
                                    "LinearCrossEntropyTrain",
                                    "ElementUpdate",
                                    "PositionGradient",
                                    "PlaceScales",
                                    "QuantizeActivation",
                                    "QuantizeBlocks",
                                    "QuantizeCodes",
                                    "QuantizeWeight",
                                    "ReduceAdd",
                                    "RmsNormBackward",
                                    "RmsNormForward",
                                    "Rope",
                                    "RowSumSquares",
                                    "SumLoss",
                                    "SumParts",
                                    "SumRowNodes",
                                    "SwiGluBackward",
                                    "SwiGluForward",
                                    "TransposeCodes",
                                    "TransposeMatrix",
                                    "TreeAdd",
                                    "TreeSum",
                                    "UpdateDelayedScales",
                                    "VocabularyGradient",
                                    "VocabularyLoss",
                                    "VocabularyStatistics",
                                    "WeightUpdate"};

TEST(OpCoverage, TheListIsThatOfTheContractHeaders) {
  EXPECT_EQ(OpsOfContracts(), kOps);
}

TEST(OpCoverage, EveryOpIsDeclaredForCuda) {
  EXPECT_EQ(OpsOf(TextOf(fs::path(RAVEL_KERNELS_FOLDER) / "cuda_host" / "ops.h")), kOps);
}

TEST(OpCoverage, EveryOpIsDispatchedToBothBackends) {
  const fs::path folder = RAVEL_KERNELS_FOLDER;
  const std::string dispatch =
      TextOf(folder / "dispatch.cc") + TextOf(folder / "dispatch_norm.cc") +
      TextOf(folder / "dispatch_mixed.cc") + TextOf(folder / "dispatch_parts.cc") +
      TextOf(folder / "dispatch_quantize.cc");
  for (const std::string& op : kOps) {
    const size_t body = dispatch.find(" " + op + "(Stream& stream");
    ASSERT_NE(body, std::string::npos) << op;
    const std::string text = dispatch.substr(body, dispatch.find("\n}\n", body) - body);
    EXPECT_THAT(text, ::testing::HasSubstr("cuda::" + op + "(stream"));
    EXPECT_THAT(text, ::testing::HasSubstr("cpu::"));
  }
}

}  // namespace
}  // namespace ravel::kernels
