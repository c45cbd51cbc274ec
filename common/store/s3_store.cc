// Objects over HTTP. Each request has a deadline and is tried again after errors of the network,
// 429 and 5xx, with jitter and a fresh signature. Whether a write whose answer was lost has
// happened is read from the object: each write carries an id of its own in the object's metadata. A
// redirect is not followed. Content is signed by its SHA-256, so the server refuses what was
// damaged on the way.

#include "common/store/s3_store.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <curl/curl.h>

#include "common/crypto.h"
#include "common/file_writer.h"
#include "common/net_address.h"
#include "common/signed_size.h"
#include "common/store/blob_tree.h"
#include "common/store/s3_listing.h"
#include "common/store/s3_refusal.h"
#include "common/store/s3_signature.h"

namespace ravel::store {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kPartBytes = 16 << 20;
constexpr int64_t kMaxAnswerBytes = 8 << 20;  // of XML
constexpr int64_t kMaxFileBytes = 64 << 10;
constexpr int kMostTries = 8;           // that end without an answer
constexpr int kMostAnsweredTries = 12;  // by a server that is there, and busy
constexpr milliseconds kFirstPause{50};
constexpr milliseconds kLongestPause{4000};
constexpr long kConnectMs = 5000;
constexpr long kRequestMs = 60'000;
constexpr long kNotImplemented = 501;
constexpr char kUploadHeader[] = "x-amz-meta-ravel-upload";

struct S3Place {
  std::string scheme = "https";
  std::string host;  // of requests, with the port
  std::string bucket;
  bool path_style = false;
  std::string region = "us-east-1";
  std::string ca_file;
  S3Keys keys;
  std::string keys_file;  // that the keys are of; empty: of the environment
};

size_t TakeBody(char* data, size_t size, size_t count, void* to) {
  auto& body = *static_cast<std::string*>(to);
  if (body.size() + size * count > Size(kMaxAnswerBytes + kPartBytes)) {
    return 0;
  }
  body.append(data, size * count);
  return size * count;
}

size_t TakeHeader(char* data, size_t size, size_t count, void* to) {
  const std::string_view line(data, size * count);
  const size_t colon = line.find(':');
  if (colon != std::string_view::npos) {
    std::string value(line.substr(colon + 1));
    absl::StripAsciiWhitespace(&value);
    (*static_cast<std::map<std::string, std::string>*>(
        to))[absl::AsciiStrToLower(std::string(line.substr(0, colon)))] = value;
  }
  return size * count;
}

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string NowText() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%dT%H%M%SZ", &utc);
  return text;
}

// Answers other than these may be others when the request comes again.
bool IsFinal(const S3Request& request, const S3Answer& answer) {
  const bool late_error =
      request.method == "POST" && answer.code == 200 && absl::StrContains(answer.body, "<Error>");
  const bool passing = answer.code >= 500 && answer.code != kNotImplemented;
  return answer.code != 409 && answer.code != 429 && !passing && !late_error;
}

// Requests to one bucket. Thread-safe.
class S3Bucket : public BlobStore {
 public:
  explicit S3Bucket(S3Place place) : place_(std::move(place)) {}

  std::string Locate(std::string_view key) const override {
    return absl::StrCat(std::string(kS3Scheme), JoinPath(place_.bucket, key));
  }

  // An answer that says what has happened. Unavailable after the last try: of 5xx, 429, a 200 that
  // carries an error, or 409, two writers at once, of whom none may have won.
  using Body = std::string_view;
  absl::StatusOr<S3Answer> Call(std::string_view what, const S3Request& request, Body body) const {
    milliseconds pause = kFirstPause;
    std::minstd_rand random{std::random_device()()};
    absl::Status last;
    int most = kMostTries;
    for (int tries = 0; tries < most; ++tries) {
      if (tries > 0) {
        std::uniform_int_distribution<int64_t> length(pause.count() / 4, pause.count());
        std::this_thread::sleep_for(milliseconds(length(random)));
        pause = std::min(pause * 2, kLongestPause);
      }
      absl::StatusOr<S3Answer> answer = Once(request, body);
      if (answer.ok() && IsFinal(request, *answer)) {
        return answer;
      }
      most = answer.ok() ? kMostAnsweredTries : kMostTries;
      last = answer.ok() ? absl::UnavailableError(absl::StrCat(
                               "HTTP ", answer->code, " ", XmlText(answer->body, "Code")))
                         : answer.status();
    }
    return absl::UnavailableError(
        absl::StrCat(std::string(what), ": ", std::string(last.message())));
  }

  absl::Status PutIfAbsent(const std::string& key, std::string_view content) override {
    return PutWhole(key, content);
  }
  absl::Status PutWhole(const std::string& key, std::string_view content);
  absl::StatusOr<std::unique_ptr<FileWriter>> Write(const std::string& key,
                                                    int64_t expected_bytes) override;
  absl::StatusOr<BlobFacts> Head(const std::string& key) const override;
  absl::Status ReadAt(const BlobFacts& blob,
                      int64_t offset,
                      std::span<std::byte> out) const override;
  absl::StatusOr<BlobListing> List(const std::string& prefix, Depth depth) const override;
  absl::Status Delete(const std::string& key) override;
  absl::Status DropUnfinished(const std::string& prefix) override;

  S3Request To(const std::string& method, const std::string& key) const {
    S3Request request;
    request.method = method;
    request.host = place_.host;
    request.path =
        place_.path_style ? absl::StrCat("/", place_.bucket, "/", key) : absl::StrCat("/", key);
    return request;
  }
  absl::Status Failed(std::string_view what, const std::string& key, const S3Answer& answer) const;
  // True if the object was written with that id.
  absl::StatusOr<bool> IsWrittenBy(const std::string& key, const std::string& id) const;

 private:
  absl::StatusOr<S3Answer> Once(S3Request request, Body body) const;

  const S3Place place_;
};

absl::StatusOr<S3Answer> S3Bucket::Once(S3Request request, Body body) const {
  request.payload_sha256 = Hex(Sha256(body));
  const std::string authorization = SignS3(place_.keys, place_.region, NowText(), request);
  const std::string query = S3Query(request.query);
  const std::string url = absl::StrCat(place_.scheme,
                                       "://",
                                       request.host,
                                       S3Encode(request.path, true),
                                       query.empty() ? "" : "?",
                                       query);
  const std::unique_ptr<CURL, void (*)(CURL*)> curl(curl_easy_init(), &curl_easy_cleanup);
  curl_slist* lines = nullptr;
  for (const auto& [name, value] : request.headers) {
    lines = curl_slist_append(lines, absl::StrCat(name, ": ", value).c_str());
  }
  lines = curl_slist_append(lines, ("Authorization: " + authorization).c_str());
  lines = curl_slist_append(lines, "Expect:");
  lines = curl_slist_append(lines, "Content-Type:");
  const std::unique_ptr<curl_slist, void (*)(curl_slist*)> headers(lines, &curl_slist_free_all);
  S3Answer answer;
  curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_PROXY, "");
  curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl.get(), CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  curl_easy_setopt(curl.get(), CURLOPT_CONNECTTIMEOUT_MS, kConnectMs);
  curl_easy_setopt(curl.get(), CURLOPT_TIMEOUT_MS, kRequestMs);
  curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.get());
  curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, &TakeBody);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &answer.body);
  curl_easy_setopt(curl.get(), CURLOPT_HEADERFUNCTION, &TakeHeader);
  curl_easy_setopt(curl.get(), CURLOPT_HEADERDATA, &answer.headers);
  if (!place_.ca_file.empty()) {
    curl_easy_setopt(curl.get(), CURLOPT_CAINFO, place_.ca_file.c_str());
  }
  if (request.method == "HEAD") {
    curl_easy_setopt(curl.get(), CURLOPT_NOBODY, 1L);
  } else if (request.method != "GET") {
    curl_easy_setopt(curl.get(), CURLOPT_CUSTOMREQUEST, request.method.c_str());
    curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): the line above gives its size
    curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDS, body.data());
  }
  const CURLcode result = curl_easy_perform(curl.get());
  if (result != CURLE_OK) {
    const bool trust =
        result == CURLE_PEER_FAILED_VERIFICATION || result == CURLE_SSL_CACERT_BADFILE;
    return absl::UnavailableError(absl::StrCat(curl_easy_strerror(result),
                                               " (",
                                               place_.scheme,
                                               "://",
                                               request.host,
                                               trust ? ", RAVEL_S3_CA)" : ", RAVEL_S3_ENDPOINT)"));
  }
  curl_easy_getinfo(curl.get(), CURLINFO_RESPONSE_CODE, &answer.code);
  return answer;
}

absl::Status S3Bucket::Failed(std::string_view what,
                              const std::string& key,
                              const S3Answer& answer) const {
  const bool job_keys = place_.keys_file.empty() && Environment(kKeysOfJobVariable) == "1";
  return S3Refusal(absl::StrCat(std::string(what), " ", Locate(key)),
                   answer,
                   {.url = absl::StrCat(std::string(kS3Scheme), place_.bucket),
                    .endpoint = absl::StrCat(place_.scheme, "://", place_.host),
                    .region = place_.region,
                    .keys_file = place_.keys_file,
                    .job_keys = job_keys,
                    .now_ms = static_cast<int64_t>(std::time(nullptr)) * 1000});
}

absl::StatusOr<bool> S3Bucket::IsWrittenBy(const std::string& key, const std::string& id) const {
  ASSIGN_OR_RETURN(const S3Answer answer, Call("head " + Locate(key), To("HEAD", key), ""));
  const auto found = answer.headers.find(kUploadHeader);
  return answer.code == 200 && found != answer.headers.end() && found->second == id;
}

absl::Status S3Bucket::PutWhole(const std::string& key, std::string_view content) {
  const std::string id = RandomHex(16);
  S3Request request = To("PUT", key);
  request.headers["if-none-match"] = "*";
  request.headers[kUploadHeader] = id;
  ASSIGN_OR_RETURN(const S3Answer answer, Call("put " + Locate(key), request, content));
  if (answer.code == 200) {
    return absl::OkStatus();
  }
  if (answer.code == 412) {  // who won is in the object
    ASSIGN_OR_RETURN(const bool ours, IsWrittenBy(key, id));
    return ours ? absl::OkStatus()
                : absl::AlreadyExistsError(absl::StrCat("create ", Locate(key), ": File exists"));
  }
  if (answer.code == kNotImplemented) {
    return absl::FailedPreconditionError(
        absl::StrCat("put ",
                     Locate(key),
                     ": HTTP 501 ",
                     XmlText(answer.body, "Code"),
                     ": the server has no writes with If-None-Match: two commits could both win"));
  }
  return Failed("put", key, answer);
}

// Small content is one PUT; longer one is uploaded in parts and completed if absent.
class S3Writer : public FileWriter {
 public:
  S3Writer(S3Bucket* bucket, std::string key)
      : bucket_(bucket), key_(std::move(key)), id_(RandomHex(16)) {}
  S3Writer(const S3Writer&) = delete;
  S3Writer& operator=(const S3Writer&) = delete;
  ~S3Writer() override {
    if (!upload_.empty() && !finished_) {
      S3Request request = bucket_->To("DELETE", key_);
      request.query["uploadId"] = upload_;
      bucket_->Call("abort", request, "").status().IgnoreError();
    }
  }

  absl::Status Append(std::span<const std::byte> bytes) override {
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    while (std::ssize(buffer_) > kPartBytes) {
      RETURN_IF_ERROR(SendPart(std::string_view(buffer_).substr(0, Size(kPartBytes))));
      buffer_.erase(0, Size(kPartBytes));
    }
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (upload_.empty()) {
      return bucket_->PutWhole(key_, buffer_);
    }
    RETURN_IF_ERROR(SendPart(buffer_));
    std::string body = "<CompleteMultipartUpload>";
    for (size_t i = 0; i < tags_.size(); ++i) {
      absl::StrAppend(
          &body, "<Part><PartNumber>", i + 1, "</PartNumber><ETag>", tags_[i], "</ETag></Part>");
    }
    body += "</CompleteMultipartUpload>";
    S3Request request = bucket_->To("POST", key_);
    request.query["uploadId"] = upload_;
    request.headers["if-none-match"] = "*";
    ASSIGN_OR_RETURN(const S3Answer answer,
                     bucket_->Call("complete " + bucket_->Locate(key_), request, body));
    // Another code may follow a completion whose answer was lost.
    finished_ =
        answer.code == 200 && absl::StrContains(answer.body, "CompleteMultipartUploadResult");
    if (!finished_) {
      ASSIGN_OR_RETURN(finished_, bucket_->IsWrittenBy(key_, id_));
    }
    return finished_ ? absl::OkStatus() : bucket_->Failed("complete", key_, answer);
  }

 private:
  absl::Status SendPart(std::string_view part) {
    if (upload_.empty()) {
      S3Request request = bucket_->To("POST", key_);
      request.query["uploads"] = "";
      request.headers[kUploadHeader] = id_;
      ASSIGN_OR_RETURN(const S3Answer begun,
                       bucket_->Call("begin " + bucket_->Locate(key_), request, ""));
      upload_ = XmlText(begun.body, "UploadId");
      if (begun.code != 200 || upload_.empty()) {
        return bucket_->Failed("begin", key_, begun);
      }
    }
    S3Request request = bucket_->To("PUT", key_);
    request.query["partNumber"] = absl::StrCat(tags_.size() + 1);
    request.query["uploadId"] = upload_;
    ASSIGN_OR_RETURN(const S3Answer sent,
                     bucket_->Call("upload " + bucket_->Locate(key_), request, part));
    const auto tag = sent.headers.find("etag");
    if (sent.code != 200 || tag == sent.headers.end()) {
      return bucket_->Failed("upload", key_, sent);
    }
    tags_.push_back(tag->second);
    return absl::OkStatus();
  }

  S3Bucket* bucket_;
  const std::string key_;
  const std::string id_;
  std::string buffer_;
  std::string upload_;
  std::vector<std::string> tags_;
  bool finished_ = false;
};

absl::StatusOr<std::unique_ptr<FileWriter>> S3Bucket::Write(const std::string& key,
                                                            int64_t /*expected_bytes*/) {
  return std::make_unique<S3Writer>(this, key);
}

absl::StatusOr<BlobFacts> S3Bucket::Head(const std::string& key) const {
  ASSIGN_OR_RETURN(S3Answer answer, Call("head " + Locate(key), To("HEAD", key), ""));
  BlobFacts facts;
  if (answer.code != 200 || !absl::SimpleAtoi(answer.headers["content-length"], &facts.size) ||
      facts.size < 0) {
    return Failed("head", key, answer);
  }
  facts.key = key;
  facts.version = answer.headers["etag"];
  facts.changed_ms = S3TimeMs(answer.headers["last-modified"], "%a, %d %b %Y %H:%M:%S GMT");
  return facts;
}

absl::Status S3Bucket::ReadAt(const BlobFacts& blob,
                              int64_t offset,
                              std::span<std::byte> out) const {
  while (!out.empty()) {
    const size_t length = std::min(out.size(), Size(kPartBytes));
    S3Request request = To("GET", blob.key);
    request.headers["range"] =
        absl::StrCat("bytes=", offset, "-", offset + static_cast<int64_t>(length) - 1);
    ASSIGN_OR_RETURN(S3Answer answer, Call("read " + Locate(blob.key), request, ""));
    if (answer.code != 206 && answer.code != 200) {
      return Failed("read", blob.key, answer);
    }
    if (answer.body.size() != length || answer.headers["etag"] != blob.version) {
      return absl::DataLossError(
          absl::StrCat(Locate(blob.key), ": truncated or changed at byte ", offset));
    }
    std::memcpy(out.data(), answer.body.data(), length);
    out = out.subspan(length);
    offset += static_cast<int64_t>(length);
  }
  return absl::OkStatus();
}

absl::StatusOr<BlobListing> S3Bucket::List(const std::string& prefix, Depth depth) const {
  BlobListing listing;
  std::string token;
  do {
    S3Request request = To("GET", "");
    request.query = {{"list-type", "2"}, {"prefix", prefix}};
    if (depth == Depth::kOneLevel) {
      request.query["delimiter"] = "/";
    }
    if (!token.empty()) {
      request.query["continuation-token"] = token;
    }
    ASSIGN_OR_RETURN(const S3Answer answer, Call("list " + Locate(prefix), request, ""));
    if (answer.code != 200) {
      return Failed("list", prefix, answer);
    }
    absl::StatusOr<std::string> next = AddListingPage(answer.body, listing);
    if (!next.ok()) {
      return Annotate(next.status(), "list " + Locate(prefix));
    }
    token = *std::move(next);
  } while (!token.empty());
  return listing;
}

absl::Status S3Bucket::Delete(const std::string& key) {
  ASSIGN_OR_RETURN(const S3Answer answer, Call("delete " + Locate(key), To("DELETE", key), ""));
  return answer.code == 204 || answer.code == 200 || answer.code == 404
             ? absl::OkStatus()
             : Failed("delete", key, answer);
}

absl::Status S3Bucket::DropUnfinished(const std::string& prefix) {
  std::vector<UnfinishedUpload> uploads;
  UnfinishedUpload next;
  do {
    S3Request request = To("GET", "");
    request.query = {{"uploads", ""}, {"prefix", prefix}};
    if (!next.key.empty()) {
      request.query["key-marker"] = next.key;
      request.query["upload-id-marker"] = next.id;
    }
    ASSIGN_OR_RETURN(const S3Answer answer, Call("list uploads " + Locate(prefix), request, ""));
    if (answer.code != 200) {
      return Failed("list uploads", prefix, answer);
    }
    const std::string last = next.key;
    next = AddUploadsPage(answer.body, uploads);
    if (!next.key.empty() && next.key < last) {
      return absl::DataLossError(absl::StrCat("list uploads ", Locate(prefix), ": pages go back"));
    }
  } while (!next.key.empty());
  for (const UnfinishedUpload& upload : uploads) {
    if (!absl::StartsWith(upload.key, prefix)) {
      continue;  // of a server that ignores the prefix
    }
    S3Request request = To("DELETE", upload.key);
    request.query["uploadId"] = upload.id;
    ASSIGN_OR_RETURN(const S3Answer answer, Call("abort " + Locate(upload.key), request, ""));
    if (answer.code != 204 && answer.code != 200 && answer.code != 404) {
      return Failed("abort", upload.key, answer);
    }
  }
  return absl::OkStatus();
}

// NAME = VALUE of one section of a file of credentials; empty: none.
std::string Setting(std::string_view text, std::string_view section, std::string_view name) {
  bool inside = false;
  const std::vector<std::string> lines = absl::StrSplit(std::string(text), '\n');
  for (std::string line : lines) {
    absl::StripAsciiWhitespace(&line);
    const size_t equals = line.find('=');
    if (absl::StartsWith(line, "[")) {
      inside = line == section;
    } else if (inside && equals != std::string::npos) {
      std::string found = line.substr(0, equals);
      std::string value = line.substr(equals + 1);
      absl::StripAsciiWhitespace(&found);
      absl::StripAsciiWhitespace(&value);
      if (found == name) {
        return value;
      }
    }
  }
  return "";
}

absl::Status ReadKeys(S3Place& place) {
  S3Keys& keys = place.keys;
  keys = {Environment("RAVEL_S3_ACCESS_KEY_ID"),
          Environment("RAVEL_S3_SECRET_ACCESS_KEY"),
          Environment("RAVEL_S3_SESSION_TOKEN")};
  if (keys.access_key.empty() != keys.secret_key.empty()) {
    return absl::FailedPreconditionError(
        "RAVEL_S3_ACCESS_KEY_ID and RAVEL_S3_SECRET_ACCESS_KEY: expected both or neither");
  }
  if (!keys.access_key.empty()) {
    return absl::OkStatus();  // a job's own, before the node's
  }
  if (const std::string file = Environment("RAVEL_S3_CREDENTIALS"); !file.empty()) {
    const absl::StatusOr<std::string> text = ReadWholeFile(file, kMaxFileBytes);
    RETURN_IF_ERROR(Annotate(text.status(), "RAVEL_S3_CREDENTIALS"));
    place.keys_file = file;
    keys = {Setting(*text, "[default]", "aws_access_key_id"),
            Setting(*text, "[default]", "aws_secret_access_key"),
            Setting(*text, "[default]", "aws_session_token")};
  }
  if (keys.access_key.empty() || keys.secret_key.empty()) {
    return absl::FailedPreconditionError(
        "no keys for s3://: set RAVEL_S3_CREDENTIALS to a file with aws_access_key_id and "
        "aws_secret_access_key in section [default], or RAVEL_S3_ACCESS_KEY_ID and "
        "RAVEL_S3_SECRET_ACCESS_KEY; variables AWS_* are not read, because trainers do not get "
        "them");
  }
  return absl::OkStatus();
}

absl::Status ReadEndpoint(S3Place& place) {
  const std::string endpoint = Environment("RAVEL_S3_ENDPOINT");
  const std::string style = Environment("RAVEL_S3_STYLE");
  if (!style.empty() && style != "path" && style != "virtual") {
    return absl::InvalidArgumentError("RAVEL_S3_STYLE: expected path or virtual");
  }
  place.path_style = style.empty() ? !endpoint.empty() : style == "path";
  std::string host = absl::StrCat("s3.", place.region, ".amazonaws.com");
  if (!endpoint.empty()) {
    const size_t end = endpoint.find("://");
    place.scheme = end == std::string::npos ? "" : endpoint.substr(0, end);
    host = end == std::string::npos ? "" : endpoint.substr(end + 3);
    while (absl::EndsWith(host, "/")) {
      host.pop_back();
    }
    const std::string name = host.substr(0, host.rfind(':'));
    const bool secure = place.scheme == "https";
    if (host.empty() || absl::StrContains(host, "/") || absl::StrContains(host, "@") ||
        (!secure && (place.scheme != "http" || !IsLoopbackHost(name)))) {
      return absl::InvalidArgumentError(
          "RAVEL_S3_ENDPOINT: expected https://HOST[:PORT], or http:// of this host");
    }
  }
  place.host = place.path_style ? host : absl::StrCat(place.bucket, ".", host);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenS3Store(std::string_view url) {
  static const CURLcode ready = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (ready != CURLE_OK) {
    return absl::InternalError("libcurl cannot be used");
  }
  std::string_view rest = url.substr(std::min(url.size(), kS3Scheme.size()));
  while (rest.ends_with('/')) {
    rest.remove_suffix(1);
  }
  const size_t slash = std::min(rest.find('/'), rest.size());
  S3Place place;
  place.bucket = std::string(rest.substr(0, slash));
  const std::string prefix(rest.substr(std::min(slash + 1, rest.size())));
  const bool bucket_good =
      place.bucket.size() >= 3 && place.bucket.size() <= 63 &&
      place.bucket.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789.-") == std::string::npos;
  const std::string around = absl::StrCat("/", prefix, "/");
  if (!url.starts_with(kS3Scheme) || !bucket_good ||
      (!prefix.empty() && absl::StrContains(around, "//")) || absl::StrContains(around, "/../") ||
      absl::StrContains(around, "/./") || absl::StrContains(prefix, "~")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "store \"",
        std::string(url),
        "\": expected s3://BUCKET/PREFIX, a bucket of 3 to 63 of a-z, 0-9, '.' and '-'"));
  }
  if (const std::string region = Environment("RAVEL_S3_REGION"); !region.empty()) {
    place.region = region;
  }
  place.ca_file = Environment("RAVEL_S3_CA");
  RETURN_IF_ERROR(ReadEndpoint(place));
  RETURN_IF_ERROR(ReadKeys(place));
  return std::make_unique<BlobTree>(std::make_unique<S3Bucket>(std::move(place)), prefix);
}

}  // namespace ravel::store
