#pragma once

// AWS Signature Version 4. Pure.

#include <map>
#include <string>
#include <string_view>

namespace ravel::store {

struct S3Keys {
  std::string access_key;
  std::string secret_key;
  std::string session_token = {};  // empty: none
};

struct S3Request {
  std::string method;                               // "PUT"
  std::string host;                                 // as in the Host header
  std::string path;                                 // not encoded, "/bucket/key"
  std::map<std::string, std::string> query = {};    // not encoded
  std::map<std::string, std::string> headers = {};  // lower-case names; the ones to sign
  std::string payload_sha256;                       // hex, of the body
};

// Percent-encoding as the signature wants it: all but letters, digits and "-._~", and '/' if
// `keep_slash`.
std::string S3Encode(std::string_view text, bool keep_slash);
// "a=1&b=": encoded, in the order of names; a flag has an empty value.
std::string S3Query(const std::map<std::string, std::string>& query);
// Adds x-amz-date, x-amz-content-sha256 and, with a session, x-amz-security-token to the headers,
// and returns the value of Authorization. `time` is "20130524T000000Z".
std::string SignS3(const S3Keys& keys,
                   std::string_view region,
                   std::string_view time,
                   S3Request& request);

}  // namespace ravel::store
