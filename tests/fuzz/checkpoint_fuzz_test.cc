// Files of checkpoints and of training data: what other programs, older releases and damaged disks
// leave there.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/ckpt/safetensors.h"
#include "common/ckpt/step_layout.h"
#include "common/crc32c.h"
#include "common/megatron_index.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "common/store/step_verifier.h"
#include "common/token_check.h"
#include "common/token_file.h"
#include "coordinator/saves/checkpoint_owner.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

// The last four bytes become the sum of those before.
void RepairSum(std::string& input) {
  if (input.size() >= 4) {
    const uint32_t sum = Crc32c(0, input.data(), input.size() - 4);
    std::memcpy(input.data() + input.size() - 4, &sum, sizeof(sum));
  }
}

// Two files of two writers, a matrix cut by rows, a scalar, a small file, codes of a weight.
ckpt::Manifest FuzzedManifest() {
  ckpt::Manifest manifest;
  manifest.job = "job-1";
  manifest.step = 20;
  manifest.save_id = {1, 2, 3};
  manifest.epoch = 7;
  manifest.attempt = 2;
  manifest.build = "build";
  manifest.numerics = "f32";
  manifest.virtual_ranks = 8;
  manifest.mesh = {{"replicate", 1}, {"shard", 2}};
  manifest.files = {
      {.path = "hf/config.json", .size = 10, .crc32c = 5},
      {.path = "model/a.safetensors", .size = 4096 + 24 + 4, .header_bytes = 4096, .crc32c = 6},
      {.path = "model/b.safetensors",
       .size = 4096 + 12,
       .header_bytes = 4096,
       .crc32c = 7,
       .writer = 1}};
  ckpt::TensorRecord scalar = {
      .name = "state.w.step", .role = ckpt::TensorRole::kStep, .of_param = "w"};
  scalar.chunks = {{.file = 1, .data_offset = 4120, .bytes = 4, .crc32c = 1, .block_crc32c = {1}}};
  ckpt::TensorRecord matrix = {.name = "w", .shape = {3, 3}};
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
  manifest.tensors = {scalar, matrix};
  manifest.blobs = {{"data", "cursor"}, {"rng", std::string("\0\1", 2)}};
  manifest.state_digest =
      ckpt::StateDigest({{"state.w.step", DType::kF32, {}, 0}, {"w", DType::kF32, {3, 3}, 0}});
  return manifest;
}

TEST(FuzzCheckpoint, Manifests) {
  const ckpt::Manifest plain = FuzzedManifest();
  ckpt::Manifest quantized = plain;
  quantized.quant = {.recipe = "mxfp8",
                     .rounding = ckpt::kRoundsMainWeights,
                     .tensors = {{.name = "w", .site = 3, .digest64 = 9}}};
  Fuzz({.name = "manifest",
        .seeds = {ckpt::EncodeManifest(plain), ckpt::EncodeManifest(quantized)},
        .repair = RepairSum},
       [](std::string_view input) {
         const absl::StatusOr<ckpt::Manifest> manifest = ckpt::DecodeManifest(input);
         if (!manifest.ok()) {
           return Refused();
         }
         const absl::StatusOr<ckpt::Manifest> again =
             ckpt::DecodeManifest(ckpt::EncodeManifest(*manifest));
         (void)manifest->total_bytes();
         (void)manifest->ranks();
         return AcceptedIf(again.ok() && *again == *manifest);
       });
}

TEST(FuzzCheckpoint, Seals) {
  const ckpt::Manifest manifest = FuzzedManifest();
  ckpt::Seal seal;
  seal.step = 20;
  seal.writer = 1;
  seal.files = manifest.files;
  for (const ckpt::TensorRecord& tensor : manifest.tensors) {
    seal.tensors.push_back({tensor.name, 17});
    for (const ckpt::ChunkRecord& chunk : tensor.chunks) {
      seal.chunks.push_back({tensor.name, chunk});
    }
  }
  seal.blobs = manifest.blobs;
  seal.quantized = {{"w", 3}};
  Fuzz({.name = "seal", .seeds = {ckpt::EncodeSeal(seal)}, .repair = RepairSum},
       [](std::string_view input) {
         const absl::StatusOr<ckpt::Seal> parsed = ckpt::DecodeSeal(input);
         if (!parsed.ok()) {
           return Refused();
         }
         const std::string bytes = ckpt::EncodeSeal(*parsed);
         const absl::StatusOr<ckpt::Seal> again = ckpt::DecodeSeal(bytes);
         return AcceptedIf(again.ok() && ckpt::EncodeSeal(*again) == bytes);
       });
}

TEST(FuzzCheckpoint, Commits) {
  const ckpt::Manifest manifest = FuzzedManifest();
  Fuzz({.name = "commit",
        .form = FuzzForm::kText,
        .seeds = {ckpt::EncodeCommit(
            ckpt::MakeCommitRecord(manifest, ckpt::EncodeManifest(manifest)))}},
       [](std::string_view input) {
         const absl::StatusOr<ckpt::CommitRecord> commit = ckpt::ParseCommit(input);
         if (!commit.ok()) {
           return Refused();
         }
         const absl::StatusOr<ckpt::CommitRecord> again =
             ckpt::ParseCommit(ckpt::EncodeCommit(*commit));
         return AcceptedIf(again.ok() && *again == *commit);
       });
}

TEST(FuzzCheckpoint, Owners) {
  const std::string seed = coordinator::EncodeOwner(
      {.cluster_id = "c", .job_uid = "u", .job_name = "default/tiny", .created_ms = 5});
  Fuzz({.name = "owner", .form = FuzzForm::kText, .seeds = {seed}}, [](std::string_view input) {
    const absl::StatusOr<coordinator::OwnerRecord> owner = coordinator::ParseOwner(input);
    if (!owner.ok()) {
      return Refused();
    }
    const auto again = coordinator::ParseOwner(coordinator::EncodeOwner(*owner));
    return AcceptedIf(again.ok() && *again == *owner);
  });
}

TEST(FuzzCheckpoint, Names) {
  Fuzz({.name = "checkpoint_name",
        .form = FuzzForm::kText,
        .seeds = {"step-0000000020",
                  "step-0000000020.e3.a1.tmp",
                  "step-0000000020.e3.a1.0000007b.tmp",
                  "step-0000000020.holder",
                  "step-0000000020.holder.x1700000000"}},
       [](std::string_view input) {
         const auto step = ckpt::ParseStepName(input);
         const auto attempt = ckpt::ParseAttemptName(input);
         const auto pin = ckpt::ParsePinName(input);
         if (!step && !attempt && !pin) {
           return Refused();
         }
         return AcceptedIf((!step || ckpt::StepName(*step) == input) &&
                           (!attempt || ckpt::AttemptName(*attempt) == input) &&
                           (!pin || ckpt::PinFileName(*pin) == input));
       });
}

std::vector<ckpt::SafetensorsEntry> SomeEntries() {
  std::vector<ckpt::SafetensorsEntry> entries = {
      {.key = "a", .dtype = DType::kF32, .shape = {2, 3}, .saved_offset = {4, 0}},
      {.key = "b", .dtype = DType::kBF16, .shape = {5}, .saved_offset = {0}},
      {.key = "empty", .dtype = DType::kBF16, .shape = {0, 7}, .saved_offset = {3, 0}},
      {.key = "scalar \"quoted\"", .dtype = DType::kU8, .shape = {}, .saved_offset = {}}};
  ckpt::PlaceSafetensorsEntries(entries);
  return entries;
}

// N of the header becomes what is there.
void RepairLength(std::string& input) {
  if (input.size() > 8) {
    const uint64_t bytes = input.size() - 8;
    std::memcpy(input.data(), &bytes, sizeof(bytes));
  }
}

using ComparedEntry = std::tuple<int64_t, int64_t, std::string, DType, Shape, Shape>;
std::set<ComparedEntry> Comparable(const std::vector<ckpt::SafetensorsEntry>& entries) {
  std::set<ComparedEntry> all;
  for (const ckpt::SafetensorsEntry& entry : entries) {
    all.emplace(entry.begin, entry.end, entry.key, entry.dtype, entry.shape, entry.saved_offset);
  }
  return all;
}

TEST(FuzzCheckpoint, SafetensorsHeaders) {
  const std::vector<ckpt::SafetensorsEntry> entries = SomeEntries();
  const int64_t data = entries.back().end;
  Fuzz({.name = "safetensors",
        .form = FuzzForm::kText,
        .seeds = {ckpt::SafetensorsHeader(entries), ckpt::SafetensorsExportHeader(entries)},
        .repair = RepairLength},
       [&](std::string_view input) {
         const int64_t file_bytes = static_cast<int64_t>(input.size()) + data;
         (void)ckpt::SafetensorsJsonBytes(input, file_bytes);
         (void)ckpt::ParseSafetensorsHeader(input, INT64_MAX);
         const auto file = ckpt::ParseSafetensorsHeader(input, file_bytes);
         if (!file.ok()) {
           return Refused();
         }
         const std::string written = ckpt::SafetensorsHeader(file->entries);
         const auto again =
             ckpt::ParseSafetensorsHeader(written, static_cast<int64_t>(written.size()) + data);
         return AcceptedIf(again.ok() && Comparable(again->entries) == Comparable(file->entries));
       });
}

std::span<const uint8_t> Unsigned(std::string_view bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

TEST(FuzzCheckpoint, MegatronIndices) {
  const std::vector<int32_t> documents = {3, 0, 5, 1};
  Fuzz({.name = "megatron_index",
        .seeds = {MakeMegatronIndex(2, documents), MakeMegatronIndex(4, documents)}},
       [](std::string_view input) {
         const auto index = ReadMegatronIndex(Unsigned(input));
         if (!index.ok()) {
           return Refused();
         }
         const std::vector<int64_t>& offsets = index->document_offsets;
         return AcceptedIf(!offsets.empty() && offsets.front() == 0 &&
                               std::is_sorted(offsets.begin(), offsets.end()) &&
                               (index->id_bytes == 2 || index->id_bytes == 4),
                           "its documents do not rise");
       });
}

// A mapped file and a file that is read in blocks are refused in the same words.
TEST(FuzzCheckpoint, TokenFiles) {
  const ScratchFolder scratch;
  const std::string prefix = scratch.path() + "/data";
  const std::vector<int32_t> documents = {3, 0, 5, 1};
  WriteText(prefix + ".bin", std::string(18, '\1'));
  const auto same = [&](TokenFormat format) {
    const auto mapped = TokenFile::Open(prefix, format);
    const auto checked = CheckTokenFile(prefix, format, {.scanned_tokens = 100});
    if (mapped.status() != checked.status()) {
      return AcceptedIf(false, mapped.status().ToString() + " and " + checked.status().ToString());
    }
    if (!mapped.ok()) {
      return Refused();
    }
    std::vector<int32_t> ids(static_cast<size_t>((*mapped)->tokens()));
    (*mapped)->Read(0, ids);
    return AcceptedIf((*mapped)->tokens() == checked->tokens, "has two sizes");
  };
  Fuzz({.name = "token_pair", .seeds = {MakeMegatronIndex(2, documents)}},
       [&](std::string_view input) {
         WriteText(prefix + ".idx", std::string(input));
         return same(TokenFormat::kAuto);
       });
  Fuzz({.name = "token_flat", .seeds = {std::string(400, '\1')}, .part = 2},
       [&](std::string_view input) {
         WriteText(prefix, std::string(input));
         const FuzzAnswer small = same(TokenFormat::kFlatU16);
         return small.fault.empty() ? same(TokenFormat::kFlatU32) : small;
       });
}

// A step whose manifest says what it likes: COMMIT vouches for it.
TEST(FuzzCheckpoint, CommittedSteps) {
  const ScratchFolder scratch;
  const std::string step = scratch.path() + "/" + ckpt::StepName(20);
  std::filesystem::create_directories(step + "/model");
  WriteText(step + "/model/a.safetensors", std::string(4096 + 28, '\0'));
  WriteText(step + "/model/b.safetensors", std::string(4096 + 12, '\0'));
  const store::FileStore files(scratch.path());
  const ckpt::Manifest manifest = FuzzedManifest();
  Fuzz({.name = "committed_step",
        .seeds = {ckpt::EncodeManifest(manifest)},
        .repair = RepairSum,
        .part = 4},
       [&](std::string_view input) {
         const std::string bytes(input);
         WriteText(step + "/manifest.pb", bytes);
         WriteText(step + "/COMMIT", ckpt::EncodeCommit(ckpt::MakeCommitRecord(manifest, bytes)));
         (void)store::VerifyStep(files, ckpt::StepName(20), store::VerifyDepth::kDeep);
         auto opened = store::CommittedStep::Open(&files, ckpt::StepName(20));
         if (!opened.ok()) {
           return Refused();
         }
         for (const ckpt::TensorRecord& tensor : opened->manifest().tensors) {
           for (const ckpt::ChunkRecord& chunk : tensor.chunks) {
             (void)opened->VisitChunk(tensor, chunk, [](int64_t, std::span<const std::byte>) {
               return absl::OkStatus();
             });
           }
         }
         return Accepted();
       });
}

}  // namespace
}  // namespace ravel::testing
