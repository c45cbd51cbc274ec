#pragma once

// The names of things in a checkpoint folder, and COMMIT. Pure.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/ckpt/manifest.h"
#include "common/status.h"

namespace ravel::ckpt {

inline constexpr std::string_view kManifestFile = "manifest.pb";
inline constexpr std::string_view kCommitFile = "COMMIT";
inline constexpr std::string_view kDeletedFile =
    "DELETED";  // beside COMMIT once the step is withdrawn
inline constexpr std::string_view kSealsFolder = "seals";
inline constexpr std::string_view kModelFolder = "model";
inline constexpr std::string_view kOptimizerFolder = "optim";
inline constexpr std::string_view kHuggingFaceFolder = "hf";
inline constexpr std::string_view kPinsFolder = "pins";
inline constexpr std::string_view kBadFolder = "bad";
inline constexpr std::string_view kOwnerFile = "OWNER";
inline constexpr int64_t kMaxCommitBytes = 4096;

// "step-0000000020"; step >= 0.
std::string StepName(int64_t step);
// The inverse; empty for any other name.
std::optional<int64_t> ParseStepName(std::string_view name);

struct AttemptKey {
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;  // save attempt
  // JobTag of the job that writes; none in names of releases before 2.
  std::optional<uint32_t> job_tag = {};
  bool operator==(const AttemptKey&) const = default;
  // The same save, whether or not the name says whose it is.
  bool SameSave(const AttemptKey& other) const {
    return step == other.step && epoch == other.epoch && attempt == other.attempt;
  }
};
// The first 8 hexadecimal digits of a job's uid as a number; of a text that has none, a checksum.
uint32_t JobTag(std::string_view job_uid);
// "3f2a9c01"
std::string JobTagText(std::string_view job_uid);
// "step-0000000020.e7.a2.3f2a9c01.tmp", without a tag "step-0000000020.e7.a2.tmp"
std::string AttemptName(const AttemptKey& key);
std::optional<AttemptKey> ParseAttemptName(std::string_view name);
// Save attempts are below it. An attempt's folder is removed under the name of the attempt that is
// this much higher: still the name of an attempt, so that one whose removal was cut off is
// collected with the others, but of none that has valid seals.
inline constexpr int64_t kRemovedAttempt = 1'000'000;

// "model/shard-00001-model-00001-of-00002.safetensors"; writer and layer count from 1.
std::string ShardFileName(std::string_view folder, int writer, int layer, int layers);
// "seals/00001"
std::string SealFileName(int64_t writer);

// A mark that keeps a step from being deleted, pins/<name>: "step-0000000020" (a person's),
// "step-0000000020.HOLDER" or "step-0000000020.HOLDER.x1700000000", which counts until that second.
struct PinName {
  int64_t step = 0;
  std::string holder = {};  // lower-case letters, digits, '-'; empty: a person
  int64_t until_s = 0;      // Unix time; 0: for ever
  bool operator==(const PinName&) const = default;
  bool Expired(int64_t now_s) const { return until_s > 0 && until_s < now_s; }
};
std::string PinFileName(const PinName& pin);
std::optional<PinName> ParsePinName(std::string_view name);

// A save's identity: all ranks and a restarted coordinator compute the same without asking.
SaveId MakeSaveId(std::string_view job, const AttemptKey& key);

// The fields of COMMIT.
struct CommitRecord {
  std::string job;
  int64_t step = 0;
  SaveId save_id = {};
  int64_t epoch = 0;
  int64_t attempt = 0;
  std::string prefix = ".";
  int64_t files = 0;  // files[] of the manifest
  int64_t bytes = 0;  // of those files
  int64_t manifest_bytes = 0;
  uint32_t manifest_crc32c = 0;
  Sha256Digest manifest_sha256 = {};
  bool operator==(const CommitRecord&) const = default;
};
// The record for a manifest whose encoded bytes are `encoded`.
CommitRecord MakeCommitRecord(const Manifest& manifest, std::string_view encoded);
std::string EncodeCommit(const CommitRecord& record);
// Strict: every field present, of its type, in range. Errors name the field.
absl::StatusOr<CommitRecord> ParseCommit(std::string_view text);

}  // namespace ravel::ckpt
