#include "common/store/s3_refusal.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "common/store/s3_listing.h"

namespace ravel::store {
namespace {

constexpr size_t kLongestWord = 100;  // of the server's, in messages

enum class Key { kAccess, kSecret, kToken };

// The place of a key, in the words that its owner knows it by.
std::string KeyPlace(const S3Setup& setup, Key key) {
  const char* const names[] = {
      "RAVEL_S3_ACCESS_KEY_ID", "RAVEL_S3_SECRET_ACCESS_KEY", "RAVEL_S3_SESSION_TOKEN"};
  const char* const file_names[] = {
      "aws_access_key_id", "aws_secret_access_key", "aws_session_token"};
  const auto at = static_cast<size_t>(key);
  if (setup.job_keys) {
    return absl::StrCat(names[at], " of the job's environment");
  }
  return setup.keys_file.empty()
             ? absl::StrCat(names[at], " of this process")
             : absl::StrCat(file_names[at], " in ", setup.keys_file, " (RAVEL_S3_CREDENTIALS)");
}

struct KeyAdvice {
  std::string_view code;
  Key key;
  const char* before;
  const char* after;
};

constexpr KeyAdvice kKeyAdvice[] = {
    {"InvalidAccessKeyId", Key::kAccess, "the server does not know the access key: correct ", ""},
    {"SignatureDoesNotMatch",
     Key::kSecret,
     "the secret key is not that of the access key: correct ",
     ", or the access key beside it"},
    {"ExpiredToken", Key::kToken, "the keys were lent and have ended: renew them, with ", ""},
    {"TokenRefreshRequired", Key::kToken, "the keys must be renewed, with ", ""},
    {"InvalidToken", Key::kToken, "the token is not that of the access key: correct ", ""},
};

// This host's clock against the server's, if the answer has the time.
std::string ClockText(const S3Answer& answer, const S3Setup& setup) {
  const auto date = answer.headers.find("date");
  const int64_t server_ms =
      date == answer.headers.end() ? 0 : S3TimeMs(date->second, "%a, %d %b %Y %H:%M:%S GMT");
  if (server_ms <= 0) {
    return "";
  }
  const int64_t seconds = (setup.now_ms - server_ms) / 1000;
  return absl::StrCat(" by ", std::max(seconds, -seconds), " s");
}

// The region that the answer says is right; empty: it does not say.
std::string RegionOf(const S3Answer& answer) {
  const auto header = answer.headers.find("x-amz-bucket-region");
  return (header != answer.headers.end() ? header->second : XmlText(answer.body, "Region"))
      .substr(0, kLongestWord);
}

std::string RegionAdvice(const S3Answer& answer, const S3Setup& setup) {
  const std::string region = RegionOf(answer);
  return absl::StrCat("requests are signed for the region ",
                      setup.region,
                      ": set RAVEL_S3_REGION to ",
                      region.empty() ? "that of the bucket" : region);
}

// The remedy for settings other than keys; empty: it is none of these.
std::string SettingAdvice(const std::string& code, const S3Answer& answer, const S3Setup& setup) {
  if (code == "NoSuchBucket") {
    return absl::StrCat("there is no such bucket at ",
                        setup.endpoint,
                        ": make it, or correct the URL or RAVEL_S3_ENDPOINT");
  }
  if (code == "RequestTimeTooSkewed" || code == "RequestExpired") {
    return absl::StrCat("the clock of this host is not the server's",
                        ClockText(answer, setup),
                        ": set it, best by NTP");
  }
  const bool elsewhere = answer.code == 301 || answer.code == 307 || code == "PermanentRedirect" ||
                         code == "IllegalLocationConstraintException" ||
                         code == "AuthorizationHeaderMalformed";
  return elsewhere ? RegionAdvice(answer, setup) : "";
}

absl::Status ByCode(long code, const std::string& message) {
  switch (code) {
    case 404:
      return absl::NotFoundError(message);
    case 401:
    case 403:
      return absl::PermissionDeniedError(message);
    case 412:
      return absl::AlreadyExistsError(message);
    default:
      return absl::FailedPreconditionError(message);
  }
}

}  // namespace

absl::Status S3Refusal(std::string_view what, const S3Answer& answer, const S3Setup& setup) {
  const std::string code = XmlText(answer.body, "Code").substr(0, kLongestWord);
  const std::string message = absl::StrCat(std::string(what), ": HTTP ", answer.code, " ", code);
  const RefusalCause keys = setup.job_keys ? RefusalCause::kJobKeys : RefusalCause::kKeys;
  for (const KeyAdvice& row : kKeyAdvice) {
    if (row.code == code) {
      return MarkRefused(absl::PermissionDeniedError(absl::StrCat(
                             message, ": ", row.before, KeyPlace(setup, row.key), row.after)),
                         keys);
    }
  }
  const std::string advice = SettingAdvice(code, answer, setup);
  if (!advice.empty()) {
    return MarkRefused(absl::FailedPreconditionError(absl::StrCat(message, ": ", advice)),
                       RefusalCause::kSettings);
  }
  if (answer.code == 401 || answer.code == 403) {
    return MarkRefused(
        absl::PermissionDeniedError(absl::StrCat(message,
                                                 ": the keys may not do this in ",
                                                 setup.url,
                                                 ": give their owner the right, or change ",
                                                 KeyPlace(setup, Key::kAccess))),
        keys);
  }
  return ByCode(answer.code, message);
}

}  // namespace ravel::store
