// Parsers of ravelctl and the stores: tokenizers, texts, traces, answers of S3; and requests to the
// HTTP servers.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/http/http_server.h"
#include "common/json.h"
#include "common/store/s3_listing.h"
#include "common/store/s3_refusal.h"
#include "common/trace.h"
#include "coordinator/ctl/output.h"
#include "coordinator/ctl/split_pattern.h"
#include "coordinator/ctl/tokenizer.h"
#include "coordinator/ctl/tokenizer_file.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/http_client.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

std::string TokenizerText(const char* name) {
  return ReadText(absl::StrCat(RAVEL_TOKENIZER_GOLDEN, "/", name, ".tokenizer.json"));
}

TEST(FuzzTools, TokenizerFiles) {
  const std::string text = "Hello world\n it's 1234 \xf0\x9f\x98\x80\xff end";
  Fuzz({.name = "tokenizer",
        .form = FuzzForm::kText,
        .seeds = {TokenizerText("gpt2_style"),
                  TokenizerText("llama3_style"),
                  TokenizerText("prefix_space")},
        .heap_bytes = int64_t{256} << 20,
        .cpu_time = std::chrono::milliseconds(3000)},
       [&](std::string_view input) {
         const auto tokenizer = ctl::Tokenizer::FromJson(input);
         if (!tokenizer.ok()) {
           return Refused();
         }
         std::vector<int32_t> ids;
         if ((*tokenizer)->Encode(text, ids).ok()) {
           (void)(*tokenizer)->Decode(ids);
         }
         const std::vector<int32_t> strange = {0, -1, INT32_MAX, 5};
         (void)(*tokenizer)->Decode(strange);
         return AcceptedIf((*tokenizer)->vocabulary() > 0, "has no vocabulary");
       });
}

TEST(FuzzTools, TokenizedTexts) {
  auto tokenizer = ctl::Tokenizer::FromJson(TokenizerText("gpt2_style"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  Fuzz({.name = "tokenized_text",
        .form = FuzzForm::kText,
        .seeds = {"And the LORD said unto Moses, it's 1234\r\n\n  \xc3\xa9\xe2\x80\xa8",
                  std::string(300, 'a') + std::string(300, ' ')},
        .cpu_time = std::chrono::milliseconds(3000)},
       [&](std::string_view input) {
         std::vector<int32_t> ids;
         if (!(*tokenizer)->Encode(input, ids).ok()) {
           return Refused();
         }
         const auto text = (*tokenizer)->Decode(ids);
         // The text of a special token is that token, which decoding leaves out.
         const bool special = input.find("<|") != std::string_view::npos;
         return AcceptedIf(text.ok() && (special || *text == input));
       });
}

TEST(FuzzTools, SplitPatterns) {
  Fuzz({.name = "split_pattern",
        .form = FuzzForm::kText,
        .seeds = {ctl::kGpt2Pattern, ctl::kLlama3Pattern, "(a|b)+c{2,5}[^x]*?"},
        .cpu_time = std::chrono::milliseconds(3000)},
       [](std::string_view input) {
         const auto pattern = ctl::SplitPattern::Compile(std::string(input));
         if (!pattern.ok()) {
           return Refused();
         }
         constexpr std::string_view kText = "aaaaaaaaaaaaaaaaaaaaaaaaaaaa  bcc it's 12\n";
         size_t bytes = 0;
         const absl::Status split =
             (*pattern)->Split(kText, [&](std::string_view piece) { bytes += piece.size(); });
         return AcceptedIf(!split.ok() || bytes == kText.size(), "loses text");
       });
}

TEST(FuzzTools, Traces) {
  const ScratchFolder scratch;
  std::vector<trace::Event> events;
  for (int64_t i = 0; i < 6; ++i) {
    events.push_back({.begin_ns = 1000 * i,
                      .end_ns = 1000 * i + 900,
                      .step = 1 + i / 3,
                      .phase = "only",
                      .unit = "layers.0",
                      .op = i % 3 == 0 ? "Gather" : "Forward",
                      .stream = i % 3 == 0 ? "gather" : "compute",
                      .bytes = 100,
                      .peer_wait_ns = 300,
                      .peer = 1});
  }
  const std::string path = scratch.path() + "/trace.json";
  const std::string other = scratch.path() + "/other.json";
  ASSERT_EQ(trace::WriteChromeTrace(other, {.job = "tiny", .epoch = 1, .rank = 1}, events),
            absl::OkStatus());
  ASSERT_EQ(trace::WriteChromeTrace(path, {.job = "tiny", .epoch = 1}, events), absl::OkStatus());
  Fuzz({.name = "trace", .form = FuzzForm::kText, .seeds = {ReadText(path)}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         const absl::StatusOr<json::Value> merged = trace::MergeChromeTraces({path, other});
         if (!merged.ok()) {
           return Refused();
         }
         for (const int64_t step : {-1, 1, 2}) {
           (void)trace::TextGantt(*merged, step, 80);
           (void)trace::FindStalls(*merged, step);
           (void)trace::FindLateRanks(*merged, step);
           (void)trace::CountOverlaps(*merged, step);
         }
         return Accepted();
       });
}

TEST(FuzzTools, Documents) {
  Fuzz({.name = "shown_document",
        .form = FuzzForm::kText,
        .seeds = {R"({"a": [1, {"b": "x: y"}], "c": {"d": null, "e": 1e300}})"}},
       [](std::string_view input) {
         const absl::StatusOr<json::Value> value = json::Parse(input);
         if (!value.ok()) {
           return Refused();
         }
         (void)ctl::ToYaml(*value);
         (void)ctl::ForStream(std::string(input), 1);
         return Accepted();
       });
}

TEST(FuzzTools, AnswersOfS3) {
  constexpr char kListing[] = R"(<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated>
<Contents><Key>a &amp; b&lt;c</Key><LastModified>2026-03-01T12:30:05.000Z</LastModified>
<ETag>&quot;0123&quot;</ETag><Size>4096</Size></Contents>
<CommonPrefixes><Prefix>team/</Prefix></CommonPrefixes>
<NextContinuationToken>1ueG</NextContinuationToken></ListBucketResult>)";
  constexpr char kUploads[] = R"(<ListMultipartUploadsResult><Bucket>b</Bucket>
<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker><IsTruncated>true</IsTruncated>
<Upload><Key>a/model</Key><UploadId>VXBsb2Fk</UploadId></Upload></ListMultipartUploadsResult>)";
  Fuzz({.name = "s3_listing",
        .form = FuzzForm::kText,
        .seeds = {kListing,
                  kUploads,
                  "<Error><Code>SlowDown</Code></Error>",
                  "<Error><Code>PermanentRedirect</Code><Region>eu-west-1</Region></Error>"}},
       [](std::string_view input) {
         const absl::Status refused = store::S3Refusal("x", {301, {}, std::string(input)}, {});
         if (refused.message().size() > 1000) {
           return AcceptedIf(false, "makes a message without an end");
         }
         std::vector<store::UnfinishedUpload> uploads;
         (void)store::AddUploadsPage(input, uploads);
         store::BlobListing listing;
         const absl::StatusOr<std::string> next = store::AddListingPage(input, listing);
         for (const store::BlobFacts& blob : listing.blobs) {
           if (blob.size < 0) {
             return AcceptedIf(false, "has a negative size");
           }
         }
         return next.ok() ? Accepted() : Refused();
       });
}

TEST(S3Listing, AnAnswerOfEntitiesAloneIsReadInOnePass) {
  std::string xml = "<Code>";
  for (int i = 0; i < 500'000; ++i) {
    xml += "&lt;";
  }
  xml += "</Code>";
  EXPECT_EQ(store::XmlText(xml, "Code"), std::string(500'000, '<'));
  EXPECT_EQ(store::XmlText("<Key>&amp;lt;&quot;&#34;&</Key>", "Key"), "&lt;\"\"&");
}

TEST(S3Listing, UnfinishedUploadsComeInPages) {
  std::vector<store::UnfinishedUpload> uploads;
  const store::UnfinishedUpload next = store::AddUploadsPage(
      "<IsTruncated>true</IsTruncated><NextKeyMarker>b&amp;c</NextKeyMarker>"
      "<NextUploadIdMarker>7</NextUploadIdMarker>"
      "<Upload><Key>a</Key><UploadId>6</UploadId></Upload>"
      "<Upload><Key>b&amp;c</Key><UploadId>7</UploadId></Upload>",
      uploads);
  ASSERT_EQ(uploads.size(), 2u);
  EXPECT_EQ(uploads[1].key, "b&c");
  EXPECT_EQ(uploads[1].id, "7");
  EXPECT_EQ(next.key, "b&c");
  EXPECT_EQ(next.id, "7");
  EXPECT_EQ(store::AddUploadsPage(
                "<IsTruncated>false</IsTruncated><NextKeyMarker>b</NextKeyMarker>", uploads)
                .key,
            "");
}

TEST(S3Listing, ANegativeSizeIsDataLoss) {
  store::BlobListing listing;
  EXPECT_TRUE(absl::IsDataLoss(
      store::AddListingPage("<Contents><Key>a</Key><Size>-1</Size></Contents>", listing).status()));
}

TEST(FuzzTools, HttpRequests) {
  std::atomic<int> asked = 0;
  http::ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.request_limit = std::chrono::milliseconds(200);
  options.pages["/metrics"] = [&](http::Respond respond) {
    ++asked;
    respond({.body = "page"});
  };
  const auto server = http::Server::Start(std::move(options));
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n";
  // Anything but a request of that page is answered by another code, or closed.
  Fuzz({.name = "http_request",
        .form = FuzzForm::kText,
        .seeds = {request, "HEAD /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc"},
        .part = 6},
       [&](std::string_view input) {
         const HttpReply reply =
             SendHttp((*server)->port(), std::string(input), std::chrono::seconds(2));
         return reply.status == 200 || reply.status == 0 ? Accepted() : Refused();
       });
  EXPECT_EQ(GetPage((*server)->port(), "/metrics").status, 200);
}

}  // namespace
}  // namespace ravel::testing
