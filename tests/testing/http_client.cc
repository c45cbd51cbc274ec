#include "tests/testing/http_client.h"

#include <cmath>
#include <cstdlib>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ravel::testing {

int OpenConnection(int port) {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    close(file);
    return -1;
  }
  return file;
}

HttpReply SendHttp(int port, const std::string& request, std::chrono::milliseconds limit) {
  HttpReply reply;
  const int file = OpenConnection(port);
  if (file < 0) {
    return reply;
  }
  size_t sent = 0;
  while (sent < request.size()) {
    const ssize_t some = send(file, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (some <= 0) {
      break;  // it closed early: what it said is read below
    }
    sent += static_cast<size_t>(some);
  }
  std::string text;
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd ready = {file, POLLIN, 0};
    if (left.count() <= 0 || poll(&ready, 1, static_cast<int>(left.count())) <= 0) {
      break;
    }
    char bytes[16384];
    const ssize_t some = recv(file, bytes, sizeof(bytes), 0);
    if (some <= 0) {
      break;
    }
    text.append(bytes, static_cast<size_t>(some));
  }
  close(file);
  const size_t split = text.find("\r\n\r\n");
  if (split != std::string::npos) {
    reply.header = text.substr(0, split);
    reply.body = text.substr(split + 4);
    reply.status = std::atoi(reply.header.substr(reply.header.find(' ') + 1, 3).c_str());
  }
  return reply;
}

HttpReply GetPage(int port, const std::string& path) {
  return SendHttp(port, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
}

double SampleOf(const std::string& page, const std::string& series) {
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    double value = 0;
    if (line.size() > series.size() && line.substr(0, series.size()) == series &&
        line[series.size()] == ' ' && absl::SimpleAtod(line.substr(series.size() + 1), &value)) {
      return value;
    }
  }
  return std::nan("");
}

}  // namespace ravel::testing
