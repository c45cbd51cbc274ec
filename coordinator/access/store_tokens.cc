#include "coordinator/access/store_tokens.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "common/ckpt/step_layout.h"
#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/job_token.h"
#include "common/logging.h"
#include "common/store/ravel_url.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMaxFileBytes = 1024;

}  // namespace

StoreTokens::StoreTokens(std::string private_key)
    : private_key_(std::move(private_key)), public_key_(PublicKeyOf(private_key_)) {}

absl::StatusOr<StoreTokens> StoreTokens::Open(const std::string& state_dir) {
  const std::string path = state_dir + "/store-tokens.key";
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) {
    const std::string key = RandomBytes(kSigningKeyBytes);
    RETURN_IF_ERROR(WriteFileAtomically(path, Hex(key) + "\n", FileAccess::kOwner));
    return StoreTokens(key);
  }
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxFileBytes));
  const std::string key = Unhex(std::string(absl::StripAsciiWhitespace(text)));
  if (key.size() != kSigningKeyBytes) {
    return absl::DataLossError(
        absl::StrCat(path,
                     ": expected 64 hexadecimal digits; without this file another key is made, "
                     "and jobs that run are to be started again"));
  }
  return StoreTokens(key);
}

std::string StoreTokens::For(std::string_view root,
                             std::string_view job_uid,
                             int64_t epoch,
                             const std::string& node) const {
  const absl::StatusOr<store::RavelUrl> folder = store::ParseRavelUrl(root);
  if (!folder.ok()) {
    return "";
  }
  absl::StatusOr<std::string> token = FormatJobToken({.folder = JobFolderHash(folder->path),
                                                      .job_tag = ckpt::JobTag(job_uid),
                                                      .epoch = epoch,
                                                      .node = node},
                                                     private_key_);
  if (!token.ok()) {
    log::Warning(absl::StrCat("no token for a store: ", std::string(token.status().message())));
    return "";
  }
  return *std::move(token);
}

}  // namespace ravel::coordinator
