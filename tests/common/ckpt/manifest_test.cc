#include "common/ckpt/manifest.h"

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/crc32c.h"
#include "proto/manifest.pb.h"

namespace ravel::ckpt {
namespace {

using ::testing::HasSubstr;

void SetStateDigest(Manifest& manifest) {
  std::vector<TensorDigest> digests;
  for (const TensorRecord& tensor : manifest.tensors) {
    digests.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.digest64});
  }
  manifest.state_digest = StateDigest(digests);
}

// Two files of two writers, a matrix cut by rows, a scalar, a small file.
Manifest SomeManifest() {
  Manifest manifest;
  manifest.job = "job-1";
  manifest.step = 20;
  manifest.save_id = {1, 2, 3};
  manifest.epoch = 7;
  manifest.attempt = 2;
  manifest.created_ns = 123456789;
  manifest.build = "build";
  manifest.numerics = "f32";
  manifest.virtual_ranks = 8;
  manifest.mesh = {{"shard", 2}};
  manifest.files = {
      {.path = "hf/config.json", .size = 10, .crc32c = 5},
      {.path = "model/a.safetensors", .size = 4096 + 24 + 4, .header_bytes = 4096, .crc32c = 6},
      {.path = "model/b.safetensors",
       .size = 4096 + 12,
       .header_bytes = 4096,
       .crc32c = 7,
       .writer = 1}};
  TensorRecord scalar = {.name = "state.w.step", .role = TensorRole::kStep, .of_param = "w"};
  scalar.chunks = {{.file = 1,
                    .data_offset = 4096 + 24,
                    .bytes = 4,
                    .box = {},
                    .crc32c = 1,
                    .block_crc32c = {1}}};
  scalar.digest64 = 11;
  TensorRecord matrix = {.name = "w", .shape = {3, 3}};
  matrix.chunks = {{.file = 1,
                    .data_offset = 4096,
                    .bytes = 24,
                    .box = {{0, 0}, {2, 3}},
                    .crc32c = 2,
                    .block_crc32c = {2}},
                   {.file = 2,
                    .data_offset = 4096,
                    .bytes = 12,
                    .box = {{2, 0}, {1, 3}},
                    .crc32c = 3,
                    .block_crc32c = {3}}};
  matrix.digest64 = 12;
  manifest.tensors = {scalar, matrix};
  manifest.blobs = {{"data", "cursor"}, {"rng", std::string("\0\1", 2)}};
  SetStateDigest(manifest);
  return manifest;
}

TEST(ManifestTest, RoundTripKeepsEverything) {
  const Manifest manifest = SomeManifest();
  ASSERT_TRUE(ValidateManifest(manifest).ok()) << ValidateManifest(manifest);
  const auto decoded = DecodeManifest(EncodeManifest(manifest));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(*decoded == manifest);
  EXPECT_EQ(EncodeManifest(*decoded), EncodeManifest(manifest));
}

TEST(ManifestTest, EveryFlippedBitIsNoticed) {
  const std::string bytes = EncodeManifest(SomeManifest());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] =
        static_cast<char>(static_cast<unsigned char>(damaged[bit / 8]) ^ (1u << (bit % 8)));
    EXPECT_FALSE(DecodeManifest(damaged).ok()) << bit;
  }
}

TEST(ManifestTest, EveryTruncationAndExtensionIsNoticed) {
  const std::string bytes = EncodeManifest(SomeManifest());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeManifest(bytes.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(DecodeManifest(bytes + "x").ok());
}

TEST(ManifestTest, AnotherVersionIsRefusedNamingBoth) {
  std::string bytes = EncodeManifest(SomeManifest());
  bytes[8] = 2;
  const auto decoded = DecodeManifest(bytes);
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded.status()));
  EXPECT_THAT(std::string(decoded.status().message()),
              HasSubstr("format version 2; this program reads version 1"));
}

TEST(ManifestTest, TheMeshAndTheNumericsOfAJobAreKept) {
  Manifest manifest = SomeManifest();
  EXPECT_EQ(manifest.ranks(), 2) << "as older releases wrote it: one axis";
  manifest.mesh = {{"replicate", 2}, {"shard", 3}};
  manifest.numerics = "compute=bf16 virtualRanks=8";
  const auto decoded = DecodeManifest(EncodeManifest(manifest));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->mesh, manifest.mesh);
  EXPECT_EQ(decoded->numerics, manifest.numerics);
  EXPECT_EQ(decoded->ranks(), 6);
  manifest.mesh.clear();
  EXPECT_TRUE(ValidateManifest(manifest).ok());
  EXPECT_EQ(manifest.ranks(), 0);
}

TEST(ManifestTest, DigestsOfCodesAreOfMatricesOfTheStep) {
  Manifest manifest = SomeManifest();
  manifest.quant = {.recipe = "mxfp8",
                    .rounding = kRoundsMainWeights,
                    .tensors = {{.name = "w", .domain = "qkv", .site = 3, .digest64 = 9}}};
  const auto decoded = DecodeManifest(EncodeManifest(manifest));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->quant, manifest.quant);
  const auto refusal = [&](const std::function<void(QuantRecord&)>& change) {
    Manifest changed = manifest;
    change(changed.quant);
    return std::string(ValidateManifest(changed).message());
  };
  EXPECT_THAT(refusal([](QuantRecord& quant) { quant.recipe.clear(); }), HasSubstr("a recipe"));
  EXPECT_THAT(refusal([](QuantRecord& quant) { quant.tensors.clear(); }), HasSubstr("a recipe"));
  EXPECT_THAT(refusal([](QuantRecord& quant) { quant.tensors[0].name = "state.w.step"; }),
              HasSubstr("state.w.step: expected a matrix of the step"));
  EXPECT_THAT(refusal([](QuantRecord& quant) { quant.tensors.push_back(quant.tensors[0]); }),
              HasSubstr("w: expected a matrix of the step, named once"));
  EXPECT_THAT(refusal([](QuantRecord& quant) { quant.tensors[0].site = -1; }),
              HasSubstr("expected a matrix"));
}

TEST(ManifestTest, AnImpossibleMeshOrNumericsIsDamage) {
  const std::vector<std::pair<std::vector<MeshAxisRecord>, const char*>> meshes = {
      {{{"shard", 0}}, "axis shard: impossible size 0"},
      {{{"shard", -1}}, "axis shard: impossible size -1"},
      {{{"replicate", int64_t{1} << 13}, {"shard", int64_t{1} << 12}}, "axis shard: impossible"},
      {{{"replicate", int64_t{1} << 62}, {"shard", int64_t{1} << 62}},
       "axis replicate: impossible"},
      {{{"", 1}}, "expected a plain name of its own"},
      {{{"a\nb", 1}}, "expected a plain name of its own"},
      {{{"shard", 1}, {"shard", 2}}, "expected a plain name of its own"}};
  for (const auto& [mesh, what] : meshes) {
    Manifest manifest = SomeManifest();
    manifest.mesh = mesh;
    const absl::Status status = ValidateManifest(manifest);
    EXPECT_TRUE(absl::IsDataLoss(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }
  for (const std::string& numerics : {std::string("a\x1b[2J"), std::string(5000, 'x')}) {
    Manifest manifest = SomeManifest();
    manifest.numerics = numerics;
    EXPECT_THAT(std::string(ValidateManifest(manifest).message()), HasSubstr("manifest: numerics"));
  }
}

TEST(ManifestTest, BytesOnDiskDoNotChange) {
  // A manifest of version 1, as it was first written: old steps must stay readable.
  const std::string bytes = EncodeManifest(SomeManifest());
  EXPECT_EQ(bytes.substr(0, 12), std::string("RVLMANIF\1\0\0\0", 12));
  EXPECT_EQ(bytes.size(), 395u);
  EXPECT_EQ(Crc32c(0, bytes.data(), bytes.size() - 4), 0xa53bd410u);
}

struct Broken {
  const char* name;
  std::function<void(Manifest&)> change;
  const char* message;
};
void PrintTo(const Broken& value, std::ostream* out) {
  *out << value.name;
}

class BrokenManifestTest : public ::testing::TestWithParam<Broken> {};

TEST_P(BrokenManifestTest, IsRefusedWithItsReason) {
  Manifest manifest = SomeManifest();
  GetParam().change(manifest);
  SetStateDigest(manifest);
  const absl::Status status = ValidateManifest(manifest);
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
  EXPECT_FALSE(DecodeManifest(EncodeManifest(manifest)).ok());
}

INSTANTIATE_TEST_SUITE_P(
    Corpus,
    BrokenManifestTest,
    ::testing::Values(
        Broken{"version", [](Manifest& m) { m.format_version = 3; }, "format version 3"},
        Broken{"dual", [](Manifest& m) { m.dual = true; }, "dual=on"},
        Broken{"path out of the step",
               [](Manifest& m) { m.files[0].path = "hf/../../x"; },
               "relative path"},
        Broken{
            "absolute path", [](Manifest& m) { m.files[0].path = "/etc/passwd"; }, "relative path"},
        Broken{"file order",
               [](Manifest& m) { std::swap(m.files[0].path, m.files[1].path); },
               "not in order"},
        Broken{"file size", [](Manifest& m) { m.files[1].size = 100; }, "impossible size"},
        Broken{"missing rows",
               [](Manifest& m) { m.tensors[1].chunks.pop_back(); },
               "tensor w: chunks hold 6 elements"},
        Broken{"overlap",
               [](Manifest& m) { m.tensors[1].chunks[1].box.offset[0] = 1; },
               "tensor w: chunks overlap"},
        Broken{"outside",
               [](Manifest& m) { m.tensors[1].chunks[1].box.offset[0] = 3; },
               "lies outside shape [3, 3]"},
        Broken{"dimensions",
               [](Manifest& m) { m.tensors[1].chunks[1].box.offset.pop_back(); },
               "dimensions"},
        Broken{"chunk order",
               [](Manifest& m) { std::swap(m.tensors[1].chunks[0], m.tensors[1].chunks[1]); },
               "order of their offsets"},
        Broken{"file index", [](Manifest& m) { m.tensors[1].chunks[1].file = 9; }, "file index 9"},
        Broken{"not a tensor file",
               [](Manifest& m) { m.tensors[1].chunks[1].file = 0; },
               "lies outside the data of hf/config.json"},
        Broken{"chunk bytes",
               [](Manifest& m) { m.tensors[1].chunks[1].bytes = 8; },
               "has 8 bytes, expected 12"},
        Broken{"chunk place",
               [](Manifest& m) { m.tensors[1].chunks[1].data_offset = 4100; },
               "outside the data of model/b"},
        Broken{"block sums",
               [](Manifest& m) { m.tensors[1].chunks[1].block_crc32c.clear(); },
               "0 block checksums"},
        Broken{"hole in a file",
               [](Manifest& m) { m.files[2].size += 4; },
               "file model/b.safetensors: chunks end at byte 4108 of 4112"},
        Broken{"two chunks at a place",
               [](Manifest& m) { m.tensors[0].chunks[0].data_offset = 4096; },
               "hole or overlap"},
        Broken{"tensor order",
               [](Manifest& m) { std::swap(m.tensors[0], m.tensors[1]); },
               "tensors are not in order"},
        Broken{"no name", [](Manifest& m) { m.tensors[0].name.clear(); }, "expected a name"},
        Broken{"huge shape",
               [](Manifest& m) {
                 m.tensors[1].shape = {int64_t{1} << 40, int64_t{1} << 40};
               },
               "impossible shape"},
        Broken{"tied to nothing", [](Manifest& m) { m.tensors[1].tied_to = "x"; }, "tied to x"},
        Broken{"repeated blob", [](Manifest& m) { m.blobs[1].name = "data"; }, "blob \"data\""},
        Broken{"large blob",
               [](Manifest& m) { m.blobs[0].content.assign(70000, 'x'); },
               "blob \"data\""}));

TEST(ManifestTest, StateDigestMustFit) {
  Manifest manifest = SomeManifest();
  manifest.tensors[0].digest64 ^= 1;
  EXPECT_THAT(std::string(ValidateManifest(manifest).message()), HasSubstr("state_digest"));
}

TEST(SealTest, RoundTripKeepsEverything) {
  Seal seal;
  seal.step = 20;
  seal.epoch = 7;
  seal.attempt = 2;
  seal.writer = 0;
  seal.sequence = 5;
  seal.save_plan_hash = Sha256("plan");
  const Manifest manifest = SomeManifest();
  seal.files = {manifest.files[1], manifest.files[0]};
  seal.chunks = {{"w", manifest.tensors[1].chunks[0]},
                 {"state.w.step", manifest.tensors[0].chunks[0]}};
  seal.chunks[0].chunk.file = 0;
  seal.chunks[1].chunk.file = 0;
  seal.tensors = {{"w", 1}, {"state.w.step", 2}};
  seal.blobs = manifest.blobs;
  seal.seconds = 0.5;
  seal.bytes = 99;
  const std::string bytes = EncodeSeal(seal);
  const auto decoded = DecodeSeal(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(EncodeSeal(*decoded), bytes);
  EXPECT_EQ(decoded->files, seal.files);
  EXPECT_EQ(decoded->chunks[1].chunk, seal.chunks[1].chunk);
  EXPECT_EQ(decoded->blobs, seal.blobs);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeSeal(bytes.substr(0, length)).ok()) << length;
  }
}

TEST(SealTest, ADamagedBlobIsNamed) {
  v1::Seal message;
  message.set_save_plan_hash(std::string(32, 'x'));
  message.add_blobs()->set_content("abc");
  message.add_blob_names("rng");
  EXPECT_THAT(std::string(SealFromProto(message).status().message()),
              HasSubstr("blob \"rng\": wrong crc32c"));
}

TEST(CoverTest, ExactCoversAreAccepted) {
  EXPECT_TRUE(ProveBoxCover({}, {Box{}}).ok());
  EXPECT_TRUE(ProveBoxCover({0, 4}, {}).ok());
  EXPECT_TRUE(ProveBoxCover({4, 4}, {{{0, 0}, {4, 2}}, {{0, 2}, {2, 2}}, {{2, 2}, {2, 2}}}).ok());
}

TEST(CoverTest, AnythingElseIsRefused) {
  EXPECT_FALSE(ProveBoxCover({}, {}).ok());
  EXPECT_FALSE(ProveBoxCover({}, {Box{}, Box{}}).ok());
  EXPECT_FALSE(
      ProveBoxCover({4}, {{{0}, {2}}, {{1}, {2}}}).ok());  // right volume, overlap and hole
  EXPECT_FALSE(ProveBoxCover({4}, {{{0}, {4}}, {{2}, {0}}}).ok());                 // an empty chunk
  EXPECT_FALSE(ProveBoxCover({2, 2}, {{{0, 0}, {1, 2}}, {{0, 1}, {2, 1}}}).ok());  // corner twice
  EXPECT_FALSE(ProveBoxCover({4}, {{{-1}, {4}}}).ok());
  EXPECT_FALSE(ProveBoxCover({int64_t{1} << 62, 8}, {{{0, 0}, {1, 1}}}).ok());
}

}  // namespace
}  // namespace ravel::ckpt
