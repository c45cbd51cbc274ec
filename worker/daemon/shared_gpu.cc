#include "worker/daemon/shared_gpu.h"

#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::daemon {

std::vector<std::string> SharedGpuEnvironment(std::string_view host) {
  return {absl::StrCat("NCCL_HOSTID=", std::string(host)),
          "NCCL_NET=Socket",
          "NCCL_SOCKET_IFNAME=lo",
          "NCCL_IB_DISABLE=1",
          "NCCL_ALGO=Ring",
          "NCCL_PROTO=Simple",
          "NCCL_MAX_CTAS=2",
          "RAVEL_NCCL_CHECK=1"};
}

void ShareGpus(int times, NodeFacts& facts) {
  std::vector<DeviceFacts> devices;
  for (const DeviceFacts& device : facts.devices) {
    const bool shared = device.kind == "gpu";
    for (int i = 0; i < (shared ? times : 1); ++i) {
      devices.push_back(device);
      if (shared) {
        devices.back().memory_bytes /= times;
      }
    }
  }
  facts.devices = std::move(devices);
}

}  // namespace ravel::daemon
