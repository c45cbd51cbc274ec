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

TEST(NetAddress, RangesOfPortsHaveTwoEnds) {
  const absl::StatusOr<PortRange> range = ParsePortRange("20000-20015");
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_EQ(range->first, 20000);
  EXPECT_EQ(range->last, 20015);
  EXPECT_TRUE(ParsePortRange("1024-65535").ok());
  EXPECT_TRUE(ParsePortRange("7-7").status().message().find("from 1024") != std::string::npos);
  for (const char* bad : {"",
                          "20000",
                          "20000-",
                          "-20000",
                          "20001-20000",
                          "1023-2000",
                          "20000-65536",
                          "a-b",
                          "1-2-3"}) {
    EXPECT_EQ(ParsePortRange(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(NetAddress, AnInterfaceHasAnAddress) {
  EXPECT_EQ(AddressOfInterface("lo").value_or(""), "127.0.0.1");
  const absl::Status none = AddressOfInterface("lo7").status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(none.message().find("'lo7'; there are "), absl::string_view::npos) << none;
}

TEST(NetAddress, TheWayToLoopbackIsLoopback) {
  const absl::StatusOr<std::string> four = LocalAddressTowards({"127.0.0.1", 7070});
  ASSERT_TRUE(four.ok()) << four.status();
  EXPECT_EQ(*four, "127.0.0.1");
  EXPECT_FALSE(LocalAddressTowards({"no-such-host.invalid", 7070}).ok());
}

}  // namespace
}  // namespace ravel
