// Names in a checkpoint folder and the text of COMMIT. Parsing is strict and the inverse of naming:
// a name that would be written differently is not recognised, so foreign files are never taken for
// steps or attempts. Names sort as their numbers do, thanks to leading zeros.

#include "common/ckpt/step_layout.h"

#include <algorithm>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/json.h"

namespace ravel::ckpt {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kFormatName = "ravel-checkpoint";

// Takes decimal digits from the front of `text`; empty when there are none or too many.
std::optional<int64_t> TakeDigits(std::string_view& text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  int64_t value = 0;
  if (digits == 0 || digits > 18 ||
      !absl::SimpleAtoi(std::string(text.substr(0, digits)), &value)) {
    return std::nullopt;
  }
  text.remove_prefix(digits);
  return value;
}

bool TakeText(std::string_view& text, std::string_view expected) {
  if (text.substr(0, expected.size()) != expected) {
    return false;
  }
  text.remove_prefix(expected.size());
  return true;
}

absl::Status FieldError(std::string_view field, std::string_view expected) {
  return absl::DataLossError(
      absl::StrCat("COMMIT: ", std::string(field), ": expected ", std::string(expected)));
}

absl::StatusOr<int64_t> IntField(const json::Value& object, std::string_view field) {
  const json::Value* value = object.Find(field);
  if (value == nullptr || !value->is_int() || value->AsInt() < 0) {
    return FieldError(field, "a whole number");
  }
  return value->AsInt();
}

absl::StatusOr<std::string> StringField(const json::Value& object, std::string_view field) {
  const json::Value* value = object.Find(field);
  if (value == nullptr || !value->is_string()) {
    return FieldError(field, "a string");
  }
  return value->AsString();
}

template <size_t kSize>
absl::Status HexField(const json::Value& object,
                      std::string_view field,
                      std::array<uint8_t, kSize>& out) {
  ASSIGN_OR_RETURN(const std::string text, StringField(object, field));
  const bool digits = text.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (text.size() != 2 * kSize || !digits) {
    return FieldError(field, absl::StrCat(2 * kSize, " hexadecimal digits"));
  }
  const auto value = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (size_t i = 0; i < kSize; ++i) {
    out[i] = static_cast<uint8_t>(value(text[2 * i]) * 16 + value(text[2 * i + 1]));
  }
  return absl::OkStatus();
}

std::string_view View(const SaveId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

}  // namespace

std::string StepName(int64_t step) {
  CHECK_GE(step, 0);
  return absl::StrFormat("step-%010d", step);
}

std::optional<int64_t> ParseStepName(std::string_view name) {
  std::string_view rest = name;
  if (!TakeText(rest, kStepPrefix)) {
    return std::nullopt;
  }
  const std::optional<int64_t> step = TakeDigits(rest);
  return step && rest.empty() && StepName(*step) == name ? step : std::nullopt;
}

uint32_t JobTag(std::string_view job_uid) {
  uint32_t tag = 0;
  const std::string_view digits = job_uid.substr(0, 8);
  if (digits.size() < 8 || digits.find_first_not_of("0123456789abcdef") != digits.npos) {
    return Crc32c(0, job_uid.data(), job_uid.size());
  }
  for (const char c : digits) {
    tag = tag << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  return tag;
}

std::string JobTagText(std::string_view job_uid) {
  return absl::StrFormat("%08x", JobTag(job_uid));
}

std::string AttemptName(const AttemptKey& key) {
  return absl::StrCat(StepName(key.step),
                      ".e",
                      key.epoch,
                      ".a",
                      key.attempt,
                      key.job_tag ? absl::StrFormat(".%08x", *key.job_tag) : "",
                      ".tmp");
}

std::optional<AttemptKey> ParseAttemptName(std::string_view name) {
  std::string_view rest = name;
  if (!TakeText(rest, kStepPrefix)) {
    return std::nullopt;
  }
  const std::optional<int64_t> step = TakeDigits(rest);
  if (!step || !TakeText(rest, ".e")) {
    return std::nullopt;
  }
  const std::optional<int64_t> epoch = TakeDigits(rest);
  if (!epoch || !TakeText(rest, ".a")) {
    return std::nullopt;
  }
  const std::optional<int64_t> attempt = TakeDigits(rest);
  if (!attempt) {
    return std::nullopt;
  }
  AttemptKey key = {.step = *step, .epoch = *epoch, .attempt = *attempt, .job_tag = {}};
  if (rest.size() == 13 && rest.front() == '.') {  // ".3f2a9c01.tmp"
    key.job_tag = JobTag(rest.substr(1, 8));
  }
  return AttemptName(key) == name ? std::optional<AttemptKey>(key) : std::nullopt;
}

std::string ShardFileName(std::string_view folder, int writer, int layer, int layers) {
  return absl::StrFormat(
      "%s/shard-%05d-model-%05d-of-%05d.safetensors", std::string(folder), writer, layer, layers);
}

std::string SealFileName(int64_t writer) {
  return absl::StrFormat("seals/%05d", writer);
}

std::string PinFileName(const PinName& pin) {
  return absl::StrCat(StepName(pin.step),
                      pin.holder.empty() ? "" : ".",
                      pin.holder,
                      pin.until_s > 0 ? absl::StrCat(".x", pin.until_s) : "");
}

std::optional<PinName> ParsePinName(std::string_view name) {
  const size_t dot = name.find('.');
  const std::optional<int64_t> step = ParseStepName(name.substr(0, dot));
  if (!step) {
    return std::nullopt;
  }
  PinName pin = {.step = *step, .holder = {}, .until_s = 0};
  if (dot != name.npos) {
    std::string_view rest = name.substr(dot + 1);
    const size_t end = rest.rfind(".x");
    if (end != rest.npos) {
      std::string_view digits = rest.substr(end + 2);
      pin.until_s = TakeDigits(digits).value_or(0);
      rest = rest.substr(0, end);
    }
    pin.holder = std::string(rest);
  }
  constexpr std::string_view kHolderLetters = "abcdefghijklmnopqrstuvwxyz0123456789-";
  const bool letters = pin.holder.find_first_not_of(kHolderLetters) == std::string::npos;
  return letters && PinFileName(pin) == name ? std::optional<PinName>(pin) : std::nullopt;
}

SaveId MakeSaveId(std::string_view job, const AttemptKey& key) {
  // Without the tag: the job is named in full.
  const AttemptKey plain = {.step = key.step, .epoch = key.epoch, .attempt = key.attempt};
  const Sha256Digest digest = Sha256(absl::StrCat(std::string(job), "\n", AttemptName(plain)));
  SaveId id = {};
  std::copy_n(digest.begin(), id.size(), id.begin());
  return id;
}

CommitRecord MakeCommitRecord(const Manifest& manifest, std::string_view encoded) {
  CommitRecord record;
  record.job = manifest.job;
  record.step = manifest.step;
  record.save_id = manifest.save_id;
  record.epoch = manifest.epoch;
  record.attempt = manifest.attempt;
  record.files = static_cast<int64_t>(manifest.files.size());
  record.bytes = manifest.total_bytes();
  record.manifest_bytes = static_cast<int64_t>(encoded.size());
  record.manifest_crc32c = Crc32c(0, encoded.data(), encoded.size());
  record.manifest_sha256 = Sha256(encoded);
  return record;
}

std::string EncodeCommit(const CommitRecord& record) {
  json::Value manifest;
  manifest.Set("path", kManifestFile);
  manifest.Set("bytes", record.manifest_bytes);
  manifest.Set("crc32c", absl::StrFormat("%08x", record.manifest_crc32c));
  manifest.Set("sha256", Hex(record.manifest_sha256));
  json::Value commit;
  commit.Set("format", kFormatName);
  commit.Set("version", static_cast<int64_t>(kFormatVersion));
  commit.Set("job", record.job);
  commit.Set("step", record.step);
  commit.Set("save_id", Hex(View(record.save_id)));
  commit.Set("epoch", record.epoch);
  commit.Set("attempt", record.attempt);
  commit.Set("prefix", record.prefix);
  commit.Set("files", record.files);
  commit.Set("bytes", record.bytes);
  commit.Set("manifest", std::move(manifest));
  return json::SerializePretty(commit) + "\n";
}

absl::StatusOr<CommitRecord> ParseCommit(std::string_view text) {
  if (static_cast<int64_t>(text.size()) > kMaxCommitBytes) {
    return absl::DataLossError(
        absl::StrCat("COMMIT: ", text.size(), " bytes, expected at most ", kMaxCommitBytes));
  }
  const absl::StatusOr<json::Value> parsed = json::Parse(text);
  if (!parsed.ok() || !parsed->is_object()) {
    return absl::DataLossError(
        absl::StrCat("COMMIT: not a JSON object",
                     parsed.ok() ? "" : ": ",
                     parsed.ok() ? "" : std::string(parsed.status().message())));
  }
  ASSIGN_OR_RETURN(const std::string format, StringField(*parsed, "format"));
  if (format != kFormatName) {
    return FieldError("format", kFormatName);
  }
  ASSIGN_OR_RETURN(const int64_t version, IntField(*parsed, "version"));
  if (version != kFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("COMMIT: version ", version, "; this program reads version ", kFormatVersion));
  }
  CommitRecord record;
  ASSIGN_OR_RETURN(record.job, StringField(*parsed, "job"));
  ASSIGN_OR_RETURN(record.step, IntField(*parsed, "step"));
  RETURN_IF_ERROR(HexField(*parsed, "save_id", record.save_id));
  ASSIGN_OR_RETURN(record.epoch, IntField(*parsed, "epoch"));
  ASSIGN_OR_RETURN(record.attempt, IntField(*parsed, "attempt"));
  ASSIGN_OR_RETURN(record.prefix, StringField(*parsed, "prefix"));
  ASSIGN_OR_RETURN(record.files, IntField(*parsed, "files"));
  ASSIGN_OR_RETURN(record.bytes, IntField(*parsed, "bytes"));
  const json::Value* manifest = parsed->Find("manifest");
  if (manifest == nullptr || !manifest->is_object()) {
    return FieldError("manifest", "an object");
  }
  ASSIGN_OR_RETURN(const std::string path, StringField(*manifest, "path"));
  if (path != kManifestFile || record.prefix != ".") {
    return FieldError("prefix and manifest.path", "\".\" and \"manifest.pb\"");
  }
  ASSIGN_OR_RETURN(record.manifest_bytes, IntField(*manifest, "bytes"));
  std::array<uint8_t, 4> crc = {};
  RETURN_IF_ERROR(HexField(*manifest, "crc32c", crc));
  for (const uint8_t byte : crc) {
    record.manifest_crc32c = record.manifest_crc32c << 8 | byte;
  }
  RETURN_IF_ERROR(HexField(*manifest, "sha256", record.manifest_sha256));
  return record;
}

}  // namespace ravel::ckpt
