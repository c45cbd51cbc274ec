#include "common/job_environment.h"

#include <algorithm>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

namespace ravel {
namespace {

constexpr size_t kMaxPatterns = 64;
constexpr size_t kMaxSecretPartBytes = 253;  // as names of Kubernetes

absl::string_view View(std::string_view text) {
  return {text.data(), text.size()};
}

// Variables of Ravel that hold keys and nothing else.
constexpr std::string_view kCredentials[] = {
    "RAVEL_S3_ACCESS_KEY_ID", "RAVEL_S3_SECRET_ACCESS_KEY", "RAVEL_S3_SESSION_TOKEN"};

constexpr absl::string_view kForbiddenNames[] = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "ENV", "BASH_ENV", "IFS", "GLIBC_TUNABLES"};
constexpr absl::string_view kForbiddenBeginnings[] = {"LD_",
                                                      "RAVEL_",
                                                      "ASAN_",
                                                      "TSAN_",
                                                      "UBSAN_",
                                                      "LSAN_",
                                                      "GCOV_",
                                                      "LLVM_",
                                                      "MALLOC_",
                                                      "PYTHON",
                                                      "NVIDIA_",
                                                      "NCCL_RAS_",
                                                      "CUDA_MPS_",
                                                      "CUDA_COREDUMP",
                                                      "CUDA_ENABLE_COREDUMP",
                                                      "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
                                                      "OMP_TOOL"};
constexpr absl::string_view kForbiddenParts[] = {"PLUGIN",
                                                 "PATH",
                                                 "_FILE",
                                                 "DIRECTORY",
                                                 "TMPDIR",
                                                 "_LIBRAR",
                                                 "PRELOAD",
                                                 "INJECT",
                                                 "VISIBLE_DEVICES",
                                                 "DEVICE_ORDER",
                                                 "NUM_THREADS",
                                                 "COMM_ID",
                                                 "HOSTID",
                                                 "IFNAME",
                                                 "_CERT"};
constexpr absl::string_view kPrinted[] = {"NCCL_", "CUDA_", "GLOO_", "OMP_", "UCX_", "FI_"};
constexpr absl::string_view kSecretWords[] = {"SECRET", "PASSW", "TOKEN", "CREDENTIAL"};

bool IsSpelled(std::string_view name) {
  const auto ok = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  return !name.empty() && static_cast<int64_t>(name.size()) <= kMaxVariableNameBytes &&
         !absl::ascii_isdigit(static_cast<unsigned char>(name.front())) &&
         std::all_of(name.begin(), name.end(), ok);
}

bool IsSecretPart(absl::string_view part) {
  const auto ok = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  };
  return !part.empty() && part.size() <= kMaxSecretPartBytes &&
         absl::ascii_isalnum(static_cast<unsigned char>(part.front())) &&
         std::all_of(part.begin(), part.end(), ok);
}

}  // namespace

std::string ExpectedName(std::string_view name) {
  if (!IsSpelled(name)) {
    return absl::StrCat(
        "letters, digits and _, no digit first, at most ", kMaxVariableNameBytes, " characters");
  }
  if (std::find(std::begin(kCredentials), std::end(kCredentials), name) != std::end(kCredentials)) {
    return "";
  }
  const absl::string_view text = View(name);
  const bool forbidden =
      absl::EndsWith(text, "_DIR") ||
      std::find(std::begin(kForbiddenNames), std::end(kForbiddenNames), text) !=
          std::end(kForbiddenNames) ||
      std::any_of(
          std::begin(kForbiddenBeginnings),
          std::end(kForbiddenBeginnings),
          [text](absl::string_view beginning) { return absl::StartsWith(text, beginning); }) ||
      std::any_of(std::begin(kForbiddenParts),
                  std::end(kForbiddenParts),
                  [text](absl::string_view part) { return absl::StrContains(text, part); });
  return forbidden ? "a name that loads no library, names no file and changes no device, address "
                     "or thread of a trainer"
                   : "";
}

std::string ExpectedSecret(std::string_view reference) {
  const std::vector<absl::string_view> parts = absl::StrSplit(View(reference), '/');
  return parts.size() == 2 && IsSecretPart(parts[0]) && IsSecretPart(parts[1])
             ? ""
             : "SECRET/KEY, each of letters, digits, ., _ and -, with a letter or digit first";
}

bool MayHoldSecret(std::string_view name) {
  return std::none_of(
      std::begin(kPrinted), std::end(kPrinted), [name](absl::string_view beginning) {
        return absl::StartsWith(View(name), beginning);
      });
}

bool SoundsSecret(std::string_view name) {
  const std::string upper = absl::AsciiStrToUpper(View(name));
  return std::any_of(std::begin(kSecretWords),
                     std::end(kSecretWords),
                     [&upper](absl::string_view word) { return absl::StrContains(upper, word); });
}

absl::StatusOr<std::vector<std::string>> ParseNamePatterns(std::string_view text) {
  std::vector<std::string> patterns = absl::StrSplit(View(text), ',', absl::SkipEmpty());
  if (patterns.size() > kMaxPatterns) {
    return absl::InvalidArgumentError(absl::StrCat("expected at most ", kMaxPatterns, " patterns"));
  }
  for (const std::string& pattern : patterns) {
    const bool open = pattern.back() == '*';
    if (!IsSpelled(open ? pattern.substr(0, pattern.size() - 1) : pattern)) {
      return absl::InvalidArgumentError(
          absl::StrCat(pattern, ": expected NAME or BEGINNING*, separated by commas"));
    }
  }
  return patterns;
}

bool MatchesAny(std::string_view name, std::span<const std::string> patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [name](const std::string& pattern) {
    return pattern.back() == '*'
               ? absl::StartsWith(View(name), pattern.substr(0, pattern.size() - 1))
               : View(name) == pattern;
  });
}

}  // namespace ravel
