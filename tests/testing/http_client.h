#pragma once

// A client of HTTP that sends exactly what a test says.

#include <chrono>
#include <string>

namespace ravel::testing {

struct HttpReply {
  int status = 0;  // 0: closed without an answer, or no answer in time
  std::string header;
  std::string body;
};

// Connects to 127.0.0.1, sends `request` as it is and reads until the server closes.
HttpReply SendHttp(int port,
                   const std::string& request,
                   std::chrono::milliseconds limit = std::chrono::seconds(20));
HttpReply GetPage(int port, const std::string& path);

// The value of a sample of Prometheus' text; `series` as it is written, with its labels. NaN: there
// is none.
double SampleOf(const std::string& page, const std::string& series);

// A connection that sends nothing by itself. -1: refused.
int OpenConnection(int port);

}  // namespace ravel::testing
