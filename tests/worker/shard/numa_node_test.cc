// The node of a device by what Linux says, and memory of a host that does not have so much.

#include "worker/shard/numa_node.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "worker/shard/host_state.h"

namespace ravel::shard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NumaNodeTest : public ::testing::Test {
 protected:
  ~NumaNodeTest() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = folder_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_numa_", ::getpid());
};

TEST_F(NumaNodeTest, IsTheNodeThatLinuxNamesForTheDevice) {
  Write("devices/system/node/node0/cpulist", "0-1");
  Write("bus/pci/devices/0000:af:00.0/numa_node", "1");
  EXPECT_EQ(NodeOfDevice("0000:AF:00.0", folder_).index, -1) << "the host has one node";
  Write("devices/system/node/node1/cpulist", "2-3,6");
  const NumaNode node = NodeOfDevice("0000:AF:00.0", folder_);
  EXPECT_EQ(node.index, 1);
  EXPECT_THAT(node.cpus, ElementsAre(2, 3, 6));
  EXPECT_EQ(NodeOfDevice("", folder_).index, -1);
  EXPECT_EQ(NodeOfDevice("0000:17:00.0", folder_).index, -1) << "no such device";
  for (const char* wrong : {"-1", "7", "99", "x", ""}) {
    Write("bus/pci/devices/0000:af:00.0/numa_node", wrong);
    EXPECT_EQ(NodeOfDevice("0000:af:00.0", folder_).index, -1) << wrong;
  }
}

TEST(ParseCpuList, ReadsRangesAndRefusesTheRest) {
  EXPECT_THAT(ParseCpuList("0-3,8,10-11"), ElementsAre(0, 1, 2, 3, 8, 10, 11));
  EXPECT_THAT(ParseCpuList("5"), ElementsAre(5));
  for (const char* wrong : {"", "a", "3-1", "-1", "0-99999999", "1-2-3"}) {
    EXPECT_THAT(ParseCpuList(wrong), IsEmpty()) << wrong;
  }
}

TEST(HostState, IsZeroAndRefusedByItsFieldWhereTheHostHasLess) {
  const auto state = HostState::Create(5 << 20, {.index = 0, .cpus = {0}});
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_THAT((*state)->all(), ::testing::Each(std::byte{}));
  EXPECT_TRUE((*state)->Holds((*state)->all().data()));
  EXPECT_FALSE((*state)->Holds((*state)->all().data() + (*state)->all().size()));
  const absl::Status refused = HostState::Create(int64_t{1} << 50, {}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("training.optimizer.offload.fraction"));
}

}  // namespace
}  // namespace ravel::shard
