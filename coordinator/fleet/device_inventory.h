#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "coordinator/fleet/fleet_messages.h"

namespace ravel::coordinator {

// The largest devices among the nodes that are here; 0: none is known.
struct DeviceInventory {
  std::set<std::string> gpu_models = {};  // of all GPUs, as NVML names them
  std::string gpu_name = {};
  int64_t gpu_bytes = 0;  // of one GPU
  std::string cpu_name = {};
  int64_t cpu_bytes = 0;  // of one node: its ranks share it
  int64_t cpu_count = 0;  // devices of that node
  // Memory of the hosts of GPUs: the largest, and all of them; 0: some node has not told.
  std::string host_name = {};
  int64_t host_bytes = 0;
  int64_t all_hosts_bytes = 0;
  // Devices of the host that has most of them, by kind.
  int64_t gpus_of_host = 0;
  int64_t cpus_of_host = 0;
};

// Takes the node's devices where they are larger than those before, and the models of its GPUs.
void AddNode(const std::string& node,
             const std::vector<DeviceFacts>& devices,
             DeviceInventory& inventory);

// Devices of hosts, and memory of those that have GPUs, as cpu devices there tell it. Nodes of one
// host tell the same memory, which counts once.
class Hosts {
 public:
  void Add(const std::string& node,
           const std::string& host,
           const std::vector<DeviceFacts>& devices);
  // Sets what the inventory says of hosts: of memory nothing where a node with GPUs has told none.
  void Tell(DeviceInventory& inventory) const;

 private:
  struct Host {
    std::string node;
    int64_t bytes = 0;
    int64_t gpus = 0;
    int64_t cpus = 0;
  };
  std::map<std::string, Host> hosts_;
  bool all_told_ = true;
};

}  // namespace ravel::coordinator
