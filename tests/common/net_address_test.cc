#include "common/net_address.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(NetAddress, HostAndPortAreTakenApart) {
  EXPECT_EQ(ParseHostPort("127.0.0.1:7070")->host, "127.0.0.1");
  EXPECT_EQ(ParseHostPort("127.0.0.1:7070")->port, 7070);
  EXPECT_EQ(ParseHostPort("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseHostPort("localhost:1")->host, "localhost");
  for (const char* bad : {"",
                          ":",
                          "7070",
                          "host",
                          "host:",
                          ":7070",
                          "host:65536",
                          "host:-1",
                          "host:70x",
                          "::1:7070",
                          "[]:7070",
                          "[host]:7070",
                          "a:b:7070"}) {
    EXPECT_FALSE(ParseHostPort(bad).ok()) << bad;
  }
  EXPECT_LT(ParseHostPort(std::string(1 << 20, 'x')).status().message().size(), 400u);
}

TEST(NetAddress, OnlyAddressesOfThisMachineAreLoopback) {
  for (const char* mine :
       {"127.0.0.1", "127.255.1.2", "localhost", "::1", "[::1]", "0:0:0:0:0:0:0:1"}) {
    EXPECT_TRUE(IsLoopbackHost(mine)) << mine;
  }
  for (const char* other : {"",
                            "127.",
                            "127.1",
                            "127.0.0.1.example.invalid",
                            "127.0.0.256",
                            "128.0.0.1",
                            "0.0.0.0",
                            "::",
                            "::2",
                            "[::1",
                            "::ffff:10.0.0.1",
                            "localhost.example.invalid",
                            "10.0.0.1",
                            "127.0.0.1%lo"}) {
    EXPECT_FALSE(IsLoopbackHost(other)) << other;
  }
}

TEST(NetAddress, OthersNeedAnAddressThatMeansThisHost) {
  for (const char* good : {"10.0.0.1", "fd00::1", "[fd00::1]", "beta", "beta-1.example"}) {
    EXPECT_TRUE(CheckReachableHost("--advertise", good).ok()) << good;
  }
  for (const char* bad :
       {"", "0.0.0.0", "::", "[::]", "beta:7070", "10.0.0.1:1", "-x", "a b", "a,b", "a/b"}) {
    const absl::Status refused = CheckReachableHost("--advertise", bad);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(refused.message().find("--advertise"), absl::string_view::npos);
  }
}

TEST(NetAddress, TheWayToLoopbackIsLoopback) {
  const absl::StatusOr<std::string> four = LocalAddressTowards({"127.0.0.1", 7070});
  ASSERT_TRUE(four.ok()) << four.status();
  EXPECT_EQ(*four, "127.0.0.1");
  EXPECT_FALSE(LocalAddressTowards({"no-such-host.invalid", 7070}).ok());
}

}  // namespace
}  // namespace ravel
