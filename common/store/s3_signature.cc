#include "common/store/s3_signature.h"

#include <array>
#include <cstdint>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/crypto.h"

namespace ravel::store {
namespace {

constexpr std::string_view kAlgorithm = "AWS4-HMAC-SHA256";
constexpr size_t kHashBlock = 64;

std::string Bytes(const Sha256Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string Hmac(std::string key, std::string_view message) {
  if (key.size() > kHashBlock) {
    key = Bytes(Sha256(key));
  }
  key.resize(kHashBlock, '\0');
  std::string inner = key;
  std::string outer = key;
  for (size_t i = 0; i < kHashBlock; ++i) {
    inner[i] = static_cast<char>(inner[i] ^ 0x36);
    outer[i] = static_cast<char>(outer[i] ^ 0x5c);
  }
  return Bytes(Sha256(outer + Bytes(Sha256(inner + std::string(message)))));
}

}  // namespace

std::string S3Encode(std::string_view text, bool keep_slash) {
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_' || c == '~' || (keep_slash && c == '/');
    if (plain) {
      encoded += c;
    } else {
      absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

std::string S3Query(const std::map<std::string, std::string>& query) {
  std::string text;
  for (const auto& [name, value] : query) {
    absl::StrAppend(
        &text, text.empty() ? "" : "&", S3Encode(name, false), "=", S3Encode(value, false));
  }
  return text;
}

std::string SignS3(const S3Keys& keys,
                   std::string_view region,
                   std::string_view time,
                   S3Request& request) {
  request.headers["host"] = request.host;
  request.headers["x-amz-date"] = std::string(time);
  request.headers["x-amz-content-sha256"] = request.payload_sha256;
  if (!keys.session_token.empty()) {
    request.headers["x-amz-security-token"] = keys.session_token;
  }
  std::string canonical = absl::StrCat(
      request.method, "\n", S3Encode(request.path, true), "\n", S3Query(request.query), "\n");
  std::string names;
  for (const auto& [name, value] : request.headers) {
    absl::StrAppend(&canonical, name, ":", value, "\n");
    absl::StrAppend(&names, names.empty() ? "" : ";", name);
  }
  absl::StrAppend(&canonical, "\n", names, "\n", request.payload_sha256);
  const std::string day(time.substr(0, 8));
  const std::string scope = absl::StrCat(day, "/", std::string(region), "/s3/aws4_request");
  const std::string to_sign = absl::StrCat(
      std::string(kAlgorithm), "\n", std::string(time), "\n", scope, "\n", Hex(Sha256(canonical)));
  std::string key = Hmac("AWS4" + keys.secret_key, day);
  for (const std::string_view part :
       {region, std::string_view("s3"), std::string_view("aws4_request")}) {
    key = Hmac(key, part);
  }
  return absl::StrCat(std::string(kAlgorithm),
                      " Credential=",
                      keys.access_key,
                      "/",
                      scope,
                      ",SignedHeaders=",
                      names,
                      ",Signature=",
                      Hex(Hmac(key, to_sign)));
}

}  // namespace ravel::store
