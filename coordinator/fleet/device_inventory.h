#pragma once

#include <cstdint>
#include <string>

namespace ravel::coordinator {

// The largest devices among the nodes that are here; 0: none is known.
struct DeviceInventory {
  std::string gpu_name = {};
  int64_t gpu_bytes = 0;  // of one GPU
  std::string cpu_name = {};
  int64_t cpu_bytes = 0;  // of one node: its ranks share it
};

}  // namespace ravel::coordinator
