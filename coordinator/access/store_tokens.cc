#include "coordinator/access/store_tokens.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/file_writer.h"

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

}  // namespace ravel::coordinator
