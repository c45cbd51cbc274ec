#include "worker/store/fence_book.h"

#include <filesystem>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/json.h"

namespace ravel::store_server {
namespace {

constexpr int64_t kMaxFenceBytes = 4096;

absl::Status Malformed(const std::string& path) {
  return absl::DataLossError(absl::StrCat(
      path, ": expected {\"folder\": TEXT, \"jobTag\": NUMBER, \"minEpoch\": NUMBER}"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<FenceBook>> FenceBook::Open(const std::string& folder) {
  std::unique_ptr<FenceBook> book(new FenceBook(folder));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const MutexLock lock(book->mutex_);
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string path = entry.path().string();
    if (!absl::EndsWith(path, ".json")) {
      continue;  // one that was being written
    }
    ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxFenceBytes));
    const absl::StatusOr<json::Value> value = json::Parse(text);
    if (!value.ok() || !value->is_object()) {
      return Malformed(path);
    }
    const json::Value* const at = value->Find("folder");
    const json::Value* const tag = value->Find("jobTag");
    const json::Value* const epoch = value->Find("minEpoch");
    if (at == nullptr || !at->is_string() || tag == nullptr || !tag->is_int() || epoch == nullptr ||
        !epoch->is_int()) {
      return Malformed(path);
    }
    book->epochs_[{at->AsString(), static_cast<uint32_t>(tag->AsInt())}] = epoch->AsInt();
  }
  if (error) {
    return absl::UnavailableError(absl::StrCat(folder, ": ", error.message()));
  }
  return book;
}

absl::Status FenceBook::Raise(std::string_view job_folder, uint32_t job_tag, int64_t min_epoch) {
  const Key key(std::string(job_folder), job_tag);
  const MutexLock lock(mutex_);
  const auto found = epochs_.find(key);
  if (found != epochs_.end() && found->second >= min_epoch) {
    return absl::OkStatus();
  }
  json::Value value;
  value.Set("folder", key.first);
  value.Set("jobTag", static_cast<int64_t>(job_tag));
  value.Set("minEpoch", min_epoch);
  const Sha256Digest name = Sha256(absl::StrCat(key.first, "\n", job_tag));
  const std::string hex =
      Hex(std::string_view(reinterpret_cast<const char*>(name.data()), name.size()));
  RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder_, "/", hex.substr(0, 32), ".json"),
                                      json::Serialize(value) + "\n"));
  epochs_[key] = min_epoch;
  return absl::OkStatus();
}

int64_t FenceBook::MinEpoch(std::string_view job_folder, uint32_t job_tag) const {
  const MutexLock lock(mutex_);
  const auto found = epochs_.find(Key(std::string(job_folder), job_tag));
  return found == epochs_.end() ? 0 : found->second;
}

}  // namespace ravel::store_server
