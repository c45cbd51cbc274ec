#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/safetensors.h"
#include "tests/testing/saved_state.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

using ::testing::HasSubstr;

struct FileTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::string data;
};

std::string Encode(const std::vector<float>& values, DType dtype) {
  std::string data;
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint16_t narrow = FloatToBf16(value);
    const auto* bytes = dtype == DType::kBF16 ? reinterpret_cast<const char*>(&narrow)
                                              : reinterpret_cast<const char*>(&bits);
    data.append(bytes, static_cast<size_t>(DTypeBytes(dtype)));
  }
  return data;
}

class HuggingFaceLoaderTest : public ::testing::Test {
 protected:
  HuggingFaceLoaderTest()
      : inventory_(testing::InventoryOf({{3, 4}, {5}, {2, 2}})),
        state_(testing::PlainState(inventory_, 0)) {
    std::string pattern = (std::filesystem::temp_directory_path() / "ravel-hf-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~HuggingFaceLoaderTest() override {
    std::error_code error;
    std::filesystem::remove_all(directory_, error);
  }
  HuggingFaceLoaderTest(const HuggingFaceLoaderTest&) = delete;
  HuggingFaceLoaderTest& operator=(const HuggingFaceLoaderTest&) = delete;

  FileTensor Of(size_t tensor, DType dtype = DType::kF32) const {
    const plan::TensorSpec& spec = inventory_.tensors[tensor];
    return {spec.name, dtype, spec.shape, Encode(state_.values[0][tensor], dtype)};
  }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ + "/" + name, std::ios::binary) << text;
  }
  void WriteTensors(const std::string& name, const std::vector<FileTensor>& tensors) const {
    std::vector<ckpt::SafetensorsEntry> entries;
    std::string data;
    for (const FileTensor& tensor : tensors) {
      entries.push_back(
          {.key = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .saved_offset = {}});
      data += tensor.data;
    }
    ckpt::PlaceSafetensorsEntries(entries);
    Write(name, ckpt::SafetensorsExportHeader(entries) + data);
  }
  // Tensor `tensor` as it is loaded in two uneven pieces.
  std::vector<float> Loaded(size_t tensor) const {
    auto loader = HuggingFaceLoader::Open(directory_, &inventory_);
    EXPECT_TRUE(loader.ok()) << loader.status();
    const int64_t elements = ElementCount(inventory_.tensors[tensor].shape);
    std::vector<float> shard(static_cast<size_t>(elements) + 2, -1.0f);
    const int index = static_cast<int>(tensor);
    const Box whole = WholeBox(inventory_.tensors[tensor].shape);
    const std::vector<plan::OwnedPiece> pieces = {
        {.tensor = index, .item = whole, .range = {0, 1}, .shard_offset = 1},
        {.tensor = index, .item = whole, .range = {1, elements}, .shard_offset = 2}};
    EXPECT_TRUE(loader->ReadPieces(pieces, shard).ok());
    EXPECT_EQ(shard.front(), -1.0f);
    EXPECT_EQ(shard.back(), -1.0f);
    return {shard.begin() + 1, shard.end() - 1};
  }
  std::string Refusal() const {
    const auto loader = HuggingFaceLoader::Open(directory_, &inventory_);
    EXPECT_FALSE(loader.ok());
    return std::string(loader.status().message());
  }

  plan::ModelInventory inventory_;
  testing::TrainingState state_;
  std::string directory_;
};

TEST_F(HuggingFaceLoaderTest, OneFileIsReadPieceByPiece) {
  WriteTensors("model.safetensors", {Of(2), Of(0), Of(1)});
  for (size_t tensor = 0; tensor < 3; ++tensor) {
    EXPECT_EQ(Loaded(tensor), state_.values[0][tensor]);
  }
}

// Columns of a tensor, of rows that lie so close that they are read together, and of longer ones
// that are read alone. Fails when the range of an item is read as one of the tensor, or when the
// bytes between far rows are read as well.
TEST_F(HuggingFaceLoaderTest, StridedBoxesAreReadWithFewBytesBetween) {
  for (const int64_t columns : {64, 16384}) {
    inventory_ = testing::InventoryOf({{12, columns}});
    state_ = testing::PlainState(inventory_, 0);
    const std::vector<float>& values = state_.values[0][0];
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      WriteTensors("model.safetensors", {Of(0, dtype)});
      const plan::OwnedPiece piece = {.tensor = 0,
                                      .item = {{2, columns / 4}, {9, columns / 8}},
                                      .range = {3, 8 * columns / 8 + 1},
                                      .shard_offset = 1};
      std::vector<float> shard(static_cast<size_t>(piece.elements()) + 2, -1.0f);
      auto loader = HuggingFaceLoader::Open(directory_, &inventory_);
      ASSERT_TRUE(loader.ok()) << loader.status();
      ASSERT_TRUE(loader->ReadPieces({&piece, 1}, shard).ok());
      EXPECT_EQ(shard.front(), -1.0f);
      EXPECT_EQ(shard.back(), -1.0f);
      for (int64_t i = 0; i < piece.elements(); ++i) {
        const int64_t row = 2 + (i + 3) / (columns / 8);
        const int64_t column = columns / 4 + (i + 3) % (columns / 8);
        const float value = values[static_cast<size_t>(row * columns + column)];
        ASSERT_EQ(shard[static_cast<size_t>(i) + 1],
                  dtype == DType::kF32 ? value : Bf16ToFloat(FloatToBf16(value)));
      }
      const int64_t span =
          piece.IndexOf({12, columns}, piece.elements() - 1) - piece.IndexOf({12, columns}, 0) + 1;
      EXPECT_EQ(loader->bytes_read(),
                DTypeBytes(dtype) * (columns == 64 ? span : piece.elements()));
    }
  }
}

TEST_F(HuggingFaceLoaderTest, Bf16AndF16BecomeF32) {
  FileTensor half = Of(1);
  half.dtype = DType::kF16;
  half.data =
      std::string("\x00\x3c\x00\xc0\x01\x00\x00\x00\xff\x7b", 10);  // 1, -2, 2^-24, 0, 65504
  WriteTensors("model.safetensors", {Of(0, DType::kBF16), half, Of(2)});
  EXPECT_EQ(Loaded(1), (std::vector<float>{1.0f, -2.0f, 0x1p-24f, 0.0f, 65504.0f}));
  const std::vector<float> loaded = Loaded(0);
  for (size_t i = 0; i < loaded.size(); ++i) {
    EXPECT_EQ(loaded[i], Bf16ToFloat(FloatToBf16(state_.values[0][0][i])));
  }
}

TEST_F(HuggingFaceLoaderTest, ShardedFilesAreFoundThroughTheIndex) {
  WriteTensors("model-00001-of-00002.safetensors", {Of(0)});
  WriteTensors("model-00002-of-00002.safetensors", {Of(1), Of(2)});
  Write("model.safetensors.index.json",
        absl::StrCat(R"({"metadata":{"total_size":1},"weight_map":{")",
                     inventory_.tensors[0].name,
                     R"(":"model-00001-of-00002.safetensors",")",
                     inventory_.tensors[1].name,
                     R"(":"model-00002-of-00002.safetensors",")",
                     inventory_.tensors[2].name,
                     R"(":"model-00002-of-00002.safetensors"}})"));
  for (size_t tensor = 0; tensor < 3; ++tensor) {
    EXPECT_EQ(Loaded(tensor), state_.values[0][tensor]);
  }
}

TEST_F(HuggingFaceLoaderTest, AllDifferencesAreListedAtOnce) {
  FileTensor misshapen = Of(0);
  misshapen.shape = {4, 3};
  FileTensor integers = Of(1);
  integers.dtype = DType::kI32;
  WriteTensors("model.safetensors",
               {misshapen, integers, {"surplus", DType::kF32, {1}, std::string(4, '\0')}});
  const std::string message = Refusal();
  EXPECT_THAT(message, HasSubstr("4 difference(s)"));
  EXPECT_THAT(message, HasSubstr("unit.0.tensor.0.weight: shape [4, 3], expected [3, 4]"));
  EXPECT_THAT(message, HasSubstr("unit.0.tensor.1.weight: dtype I32, expected F32, BF16 or F16"));
  EXPECT_THAT(message, HasSubstr("surplus: not a tensor of the model"));
  EXPECT_THAT(message, HasSubstr("unit.1.tensor.0.weight: missing"));
}

TEST_F(HuggingFaceLoaderTest, RotaryBuffersAndATiedHeadAreIgnored) {
  inventory_.config.tie_word_embeddings = true;
  const std::string four(4, '\0');
  WriteTensors("model.safetensors",
               {Of(0),
                Of(1),
                Of(2),
                {"lm_head.weight", DType::kF32, {1}, four},
                {"model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {1}, four}});
  EXPECT_EQ(Loaded(0), state_.values[0][0]);
  inventory_.config.tie_word_embeddings = false;
  EXPECT_THAT(Refusal(), HasSubstr("lm_head.weight: not a tensor of the model"));
}

TEST_F(HuggingFaceLoaderTest, BrokenDirectoriesAreRefusedByName) {
  EXPECT_THAT(Refusal(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  Write("model.safetensors", "short");
  EXPECT_THAT(Refusal(), HasSubstr("model.safetensors: safetensors header: the file has 5 bytes"));
  WriteTensors("model.safetensors", {Of(0), Of(1), Of(2)});
  std::filesystem::resize_file(directory_ + "/model.safetensors", 4100);
  EXPECT_THAT(Refusal(), HasSubstr("model.safetensors: safetensors header: entries end at"));
  Write("model.safetensors.index.json", R"({"weight_map":{"a":"../secret.safetensors"}})");
  EXPECT_THAT(Refusal(),
              HasSubstr("weight_map: a: expected the name of a .safetensors file beside it"));
  Write("model.safetensors.index.json", R"({"weight_map":{"a":"absent.safetensors"}})");
  EXPECT_THAT(Refusal(), HasSubstr("absent.safetensors"));
  Write("model.safetensors.index.json", "{}");
  EXPECT_THAT(Refusal(), HasSubstr("weight_map"));
  WriteTensors("x.safetensors", {Of(0)});
  Write("model.safetensors.index.json", R"({"weight_map":{"a":"x.safetensors"}})");
  EXPECT_THAT(Refusal(), HasSubstr("weight_map: a is not in x.safetensors"));
}

TEST_F(HuggingFaceLoaderTest, FilesOfABareModelLackThePrefixAndHoldBuffers) {
  inventory_.config.architecture = plan::ArchitectureKind::kGpt2;
  for (plan::TensorSpec& tensor : inventory_.tensors) {
    tensor.name = "transformer." + tensor.name;
  }
  std::vector<FileTensor> tensors = {Of(0), Of(1), Of(2)};
  for (FileTensor& tensor : tensors) {
    tensor.name = tensor.name.substr(std::string("transformer.").size());
  }
  FileTensor mask = tensors[1];
  mask.name = "h.0.attn.bias";
  tensors.push_back(mask);
  WriteTensors("model.safetensors", tensors);
  for (size_t tensor = 0; tensor < 3; ++tensor) {
    EXPECT_EQ(Loaded(tensor), state_.values[0][tensor]);
  }
  tensors.push_back(Of(2));
  WriteTensors("model.safetensors", tensors);
  EXPECT_THAT(Refusal(), HasSubstr("there with and without the base model's prefix"));
}

}  // namespace
}  // namespace ravel::checkpoint
