#include "coordinator/fleet/device_inventory.h"

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

DeviceFacts CpuOf(int64_t bytes) {
  return {.kind = "cpu", .model = "EPYC", .memory_bytes = bytes, .uuid = ""};
}
DeviceFacts GpuOf(int64_t bytes) {
  return {.kind = "gpu", .model = "H200", .memory_bytes = bytes, .uuid = ""};
}

struct InventoryNode {
  std::string id;
  std::string host;
  std::vector<DeviceFacts> devices;
};

DeviceInventory InventoryOf(const std::vector<InventoryNode>& nodes) {
  DeviceInventory inventory;
  Hosts hosts;
  for (const InventoryNode& node : nodes) {
    AddNode(node.id, node.devices, inventory);
    hosts.Add(node.id, node.host, node.devices);
  }
  hosts.Tell(inventory);
  return inventory;
}

TEST(DeviceInventory, HasTheLargestDeviceOfEachKind) {
  const DeviceInventory inventory = InventoryOf({{"a", "h1", {CpuOf(10), CpuOf(10)}},
                                                 {"b", "h2", {CpuOf(15), GpuOf(80)}},
                                                 {"c", "h3", {GpuOf(40)}}});
  EXPECT_EQ(inventory.cpu_name, "a");
  EXPECT_EQ(inventory.cpu_bytes, 20);
  EXPECT_EQ(inventory.cpu_count, 2);
  EXPECT_EQ(inventory.gpu_name, "H200 of b");
  EXPECT_EQ(inventory.gpu_bytes, 80);
  EXPECT_EQ(inventory.gpu_models, std::set<std::string>{"H200"});
}

TEST(DeviceInventory, HostsOfGpusCountOnce) {
  const InventoryNode without = {"a", "h0", {CpuOf(1000)}};
  const InventoryNode one = {"b", "h1", {CpuOf(100), GpuOf(80)}};
  const InventoryNode same = {"c", "h1", {CpuOf(50), CpuOf(50), GpuOf(80)}};
  const InventoryNode other = {"d", "h2", {CpuOf(300), GpuOf(80)}};
  const DeviceInventory inventory = InventoryOf({without, one, same, other});
  EXPECT_EQ(inventory.host_name, "d");
  EXPECT_EQ(inventory.host_bytes, 300);
  EXPECT_EQ(inventory.all_hosts_bytes, 400);
  EXPECT_EQ(InventoryOf({without}).host_bytes, 0);
}

TEST(DeviceInventory, DevicesOfOneHostAreCountedTogether) {
  const DeviceInventory inventory = InventoryOf({{"a", "h0", {CpuOf(1), CpuOf(1), CpuOf(1)}},
                                                 {"b", "h1", {CpuOf(1), GpuOf(80), GpuOf(80)}},
                                                 {"c", "h1", {CpuOf(1), GpuOf(80)}},
                                                 {"d", "", {GpuOf(80), GpuOf(80)}}});
  EXPECT_EQ(inventory.cpus_of_host, 3);
  EXPECT_EQ(inventory.gpus_of_host, 3);
  EXPECT_EQ(InventoryOf({}).gpus_of_host, 0);
}

// It may have more than all the others.
TEST(DeviceInventory, AHostThatTellsNothingLeavesAllUnknown) {
  const DeviceInventory inventory =
      InventoryOf({{"a", "h1", {CpuOf(100), GpuOf(80)}}, {"b", "h2", {GpuOf(80)}}});
  EXPECT_EQ(inventory.host_bytes, 0);
  EXPECT_EQ(inventory.all_hosts_bytes, 0);
  EXPECT_EQ(inventory.host_name, "");
}

}  // namespace
}  // namespace ravel::coordinator
