#include "worker/store/trust_book.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/json.h"
#include "common/plain_text.h"

namespace ravel::store_server {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 20;
constexpr size_t kMaxOwnerBytes = 128;
constexpr size_t kPrefixDigits = 16;
constexpr size_t kMaxJobKeys = 8;

absl::Status Malformed() {
  return absl::DataLossError(
      "expected {\"revoked\": [{\"owner\": TEXT, \"serialPrefix\": TEXT, \"revokedMs\": NUMBER}], "
      "\"jobKeys\": [64 hexadecimal digits]}");
}

absl::StatusOr<RevokedEnrolment> Parse(const json::Value& value) {
  const json::Value* const owner = value.Find("owner");
  const json::Value* const prefix = value.Find("serialPrefix");
  const json::Value* const time = value.Find("revokedMs");
  if (owner == nullptr || !owner->is_string() || prefix == nullptr || !prefix->is_string() ||
      time == nullptr || !time->is_int()) {
    return Malformed();
  }
  return RevokedEnrolment{owner->AsString(), prefix->AsString(), time->AsInt()};
}

absl::Status CheckFields(const RevokedEnrolment& revoked) {
  if (revoked.serial_prefix.size() != kPrefixDigits ||
      revoked.serial_prefix.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return absl::InvalidArgumentError("serial_prefix: expected 16 hexadecimal digits");
  }
  if (revoked.owner.size() > kMaxOwnerBytes || HasControlText(revoked.owner)) {
    return absl::InvalidArgumentError("owner: expected at most 128 bytes of plain text");
  }
  return absl::OkStatus();
}

absl::Status CheckKeys(const std::vector<std::string>& job_keys) {
  const bool sized = std::all_of(job_keys.begin(), job_keys.end(), [](const std::string& key) {
    return key.size() == kSigningKeyBytes;
  });
  return sized && job_keys.size() <= kMaxJobKeys
             ? absl::OkStatus()
             : absl::InvalidArgumentError("job_keys: expected at most 8 of 32 bytes");
}

// A file of a release before tokens has none.
absl::StatusOr<std::vector<std::string>> ParseKeys(const json::Value& file) {
  const json::Value* const keys = file.Find("jobKeys");
  std::vector<std::string> parsed;
  if (keys == nullptr) {
    return parsed;
  }
  if (!keys->is_array()) {
    return Malformed();
  }
  for (const json::Value& key : keys->AsArray()) {
    parsed.push_back(key.is_string() ? Unhex(key.AsString()) : "");
  }
  return CheckKeys(parsed).ok() ? absl::StatusOr<std::vector<std::string>>(parsed) : Malformed();
}

std::string Text(const std::vector<RevokedEnrolment>& revoked,
                 const std::vector<std::string>& job_keys) {
  json::Array enrolments;
  for (const RevokedEnrolment& each : revoked) {
    json::Value value;
    value.Set("owner", each.owner);
    value.Set("serialPrefix", each.serial_prefix);
    value.Set("revokedMs", each.revoked_ms);
    enrolments.push_back(std::move(value));
  }
  json::Value value;
  value.Set("revoked", std::move(enrolments));
  json::Array keys;
  for (const std::string& key : job_keys) {
    keys.push_back(json::Value(Hex(key)));
  }
  value.Set("jobKeys", std::move(keys));
  return json::Serialize(value) + "\n";
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrustBook>> TrustBook::Open(const std::string& path) {
  std::unique_ptr<TrustBook> book(new TrustBook(path));
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) {
    return book;
  }
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxFileBytes));
  RETURN_IF_ERROR(Annotate(book->Read(text), path));
  return book;
}

absl::Status TrustBook::Read(const std::string& text) {
  const absl::StatusOr<json::Value> value = json::Parse(text);
  const json::Value* const revoked = value.ok() ? value->Find("revoked") : nullptr;
  if (revoked == nullptr || !revoked->is_array()) {
    return Malformed();
  }
  ASSIGN_OR_RETURN(std::vector<std::string> keys, ParseKeys(*value));
  const MutexLock lock(mutex_);
  job_keys_ = std::move(keys);
  for (const json::Value& each : revoked->AsArray()) {
    ASSIGN_OR_RETURN(const RevokedEnrolment parsed, Parse(each));
    if (!CheckFields(parsed).ok()) {
      return Malformed();
    }
    owners_[parsed.serial_prefix] = parsed.owner;
  }
  return absl::OkStatus();
}

std::vector<std::string> TrustBook::job_keys() const {
  const MutexLock lock(mutex_);
  return job_keys_;
}

absl::Status TrustBook::Keep(const std::vector<RevokedEnrolment>& revoked,
                             const std::vector<std::string>& job_keys) {
  RETURN_IF_ERROR(CheckKeys(job_keys));
  Owners owners;
  for (const RevokedEnrolment& each : revoked) {
    RETURN_IF_ERROR(CheckFields(each));
    owners[each.serial_prefix] = each.owner;
  }
  {
    const MutexLock lock(mutex_);
    owners_.swap(owners);
    job_keys_ = job_keys;
  }
  return WriteFileAtomically(path_, Text(revoked, job_keys), FileAccess::kOwner);
}

absl::Status TrustBook::Check(std::string_view serial) const {
  const MutexLock lock(mutex_);
  const auto found = owners_.find(serial.substr(0, kPrefixDigits));
  return found == owners_.end()
             ? absl::OkStatus()
             : absl::PermissionDeniedError(absl::StrCat(
                   "the certificate of ", found->second, " was revoked, or replaced by a new one"));
}

}  // namespace ravel::store_server
