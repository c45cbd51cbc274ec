// The server against clients that are well, slow, too many and hostile.

#include "common/http/http_server.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/http_client.h"

namespace ravel::http {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::GetPage;
using ::testing::HasSubstr;
using testing::HttpReply;
using ::testing::Not;
using testing::SendHttp;

class HttpServerTest : public ::testing::Test {
 protected:
  void Start() {
    options_.listen = "127.0.0.1:0";
    options_.pages["/metrics"] = [this](Respond respond) {
      ++asked_;
      respond({200, "ravel_things 3\n", "text/plain; version=0.0.4"});
    };
    options_.pages["/silent"] = [this](Respond respond) {
      kept_ = std::move(respond);
      waits_ = true;
    };
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  int port() const { return server_->port(); }

  ServerOptions options_;
  std::atomic<int> asked_ = 0;
  Respond kept_;  // of /silent
  std::atomic<bool> waits_ = false;
  std::unique_ptr<Server> server_;
};

TEST_F(HttpServerTest, AnswersGetAndHead) {
  Start();
  const HttpReply got = GetPage(port(), "/metrics");
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.body, "ravel_things 3\n");
  EXPECT_THAT(got.header, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(got.header, HasSubstr("Content-Length: 15"));
  const HttpReply head = SendHttp(port(), "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  EXPECT_THAT(head.header, HasSubstr("Content-Length: 15"));
  EXPECT_EQ(asked_, 2);
}

TEST_F(HttpServerTest, RefusesWhatChangesOrIsNoPageOrNoRequest) {
  Start();
  for (const char* verb : {"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"}) {
    const HttpReply reply =
        SendHttp(port(), absl::StrCat(verb, " /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"));
    EXPECT_EQ(reply.status, 405) << verb;
    EXPECT_THAT(reply.header, HasSubstr("Allow: GET, HEAD")) << verb;
  }
  EXPECT_EQ(GetPage(port(), "/etc/passwd").status, 404);
  EXPECT_EQ(GetPage(port(), "/../metrics").status, 404);
  EXPECT_EQ(GetPage(port(), "/metrics?job=a").status, 404);
  EXPECT_EQ(SendHttp(port(), "hello\r\n\r\n").status, 400);
  EXPECT_EQ(SendHttp(port(), std::string("GET /metrics\0x HTTP/1.1\r\n\r\n", 27)).status, 400);
  EXPECT_EQ(SendHttp(port(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").status, 400);
  EXPECT_EQ(SendHttp(port(), "\x16\x03\x01\x02" + std::string(200, 'x') + "\r\n\r\n").status, 400);
  EXPECT_EQ(asked_, 0);
}

TEST_F(HttpServerTest, ALongHeaderIsRefusedAndABodyIsNotRead) {
  Start();
  const std::string head = "GET /metrics HTTP/1.1\r\nX: ";
  EXPECT_EQ(SendHttp(port(), head + std::string(8000, 'a') + "\r\n\r\n").status, 200);
  EXPECT_EQ(SendHttp(port(), head + std::string(9000, 'a') + "\r\n\r\n").status, 431);
  EXPECT_EQ(SendHttp(port(), head + std::string(300'000, 'a')).status, 431);
  std::string lines;
  for (int i = 0; i < 3000; ++i) {
    absl::StrAppend(&lines, "X", i, ": y\r\n");
  }
  EXPECT_EQ(SendHttp(port(), "GET /metrics HTTP/1.1\r\n" + lines + "\r\n").status, 431);
  EXPECT_EQ(SendHttp(port(),
                     "GET /metrics HTTP/1.1\r\nContent-Length: 500000\r\n\r\n" +
                         std::string(500'000, 'b'))
                .status,
            200);
}

TEST_F(HttpServerTest, APageThatDoesNotAnswerIs503AndItsLateAnswerIsDropped) {
  options_.page_limit = milliseconds(50);
  Start();
  EXPECT_EQ(GetPage(port(), "/silent").status, 503);
  kept_({200, "late"});
  kept_({200, "later"});
  EXPECT_EQ(GetPage(port(), "/metrics").status, 200);
  server_.reset();
  kept_({200, "after the end"});
}

TEST_F(HttpServerTest, AnswersMayComeFromOtherThreadsAndTheFirstOneCounts) {
  std::vector<std::thread> threads;
  options_.pages["/twice"] = [&threads](Respond respond) {
    threads.emplace_back([respond = std::move(respond)] {
      respond({200, "first"});
      respond({500, "second"});
    });
  };
  Start();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(GetPage(port(), "/twice").body, "first");
  }
  server_.reset();  // its thread started them
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(HttpServerTest, ABodyMayBeMadeOnTheServersThread) {
  options_.pages["/made"] = [](Respond respond) {
    respond({.make_body = [] { return std::string("made"); }});
  };
  Start();
  EXPECT_EQ(GetPage(port(), "/made").body, "made");
}

TEST_F(HttpServerTest, SilentClientsAreClosedAndHoldNobodyUp) {
  options_.request_limit = milliseconds(300);
  options_.max_connections = 4;
  Start();
  std::vector<int> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(testing::OpenConnection(port()));
    ASSERT_GE(silent.back(), 0);
  }
  // All places are taken: one more is closed unanswered, until the silent ones are closed.
  EXPECT_TRUE(testing::Eventually(seconds(20), [&] {
    return GetPage(port(), "/metrics").status == 0 || server_->counts().refused_connections > 0;
  }));
  EXPECT_TRUE(
      testing::Eventually(seconds(20), [&] { return GetPage(port(), "/metrics").status == 200; }));
  EXPECT_GT(server_->counts().refused_connections, 0);
  for (const int file : silent) {
    close(file);
  }
}

TEST_F(HttpServerTest, ManyClientsAtOnce) {
  Start();
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 25; ++j) {
        good += GetPage(port(), "/metrics").status == 200 ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(good, 200);
  EXPECT_EQ(server_->counts().answered, 200);
}

TEST_F(HttpServerTest, EndsWhileClientsWait) {
  Start();
  std::thread client([port = port()] { GetPage(port, "/silent"); });
  EXPECT_TRUE(testing::Eventually(seconds(20), [&] { return waits_.load(); }));
  server_.reset();
  client.join();
}

TEST(HttpServerListenTest, NamesWhatIsWrongWithAnAddress) {
  for (const char* bad : {"", "7071", "127.0.0.1", "127.0.0.1:70710", "example.org:7071"}) {
    const auto server = Server::Start({.listen = bad, .pages = {}});
    EXPECT_TRUE(absl::IsInvalidArgument(server.status())) << bad << ": " << server.status();
  }
  const auto first = Server::Start({.listen = "127.0.0.1:0", .pages = {}});
  ASSERT_TRUE(first.ok());
  const auto second =
      Server::Start({.listen = absl::StrCat("127.0.0.1:", (*first)->port()), .pages = {}});
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
  EXPECT_TRUE(Server::Start({.listen = "localhost:0", .pages = {}}).ok());
}

}  // namespace
}  // namespace ravel::http
