#include "coordinator/fleet/device_inventory.h"

#include <algorithm>
#include <iterator>

#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

struct CpuDevices {
  int64_t count = 0;
  int64_t bytes = 0;
};

CpuDevices CpusOf(const std::vector<DeviceFacts>& devices) {
  CpuDevices cpus;
  for (const DeviceFacts& device : devices) {
    if (device.kind == "cpu") {
      cpus.count += 1;
      cpus.bytes += device.memory_bytes;
    }
  }
  return cpus;
}

}  // namespace

void AddNode(const std::string& node,
             const std::vector<DeviceFacts>& devices,
             DeviceInventory& inventory) {
  for (const DeviceFacts& device : devices) {
    if (device.kind != "cpu") {
      inventory.gpu_models.insert(device.model);
    }
    if (device.kind != "cpu" && device.memory_bytes > inventory.gpu_bytes) {
      inventory.gpu_bytes = device.memory_bytes;
      inventory.gpu_name = absl::StrCat(device.model, " of ", node);
    }
  }
  const CpuDevices cpus = CpusOf(devices);
  if (cpus.bytes > inventory.cpu_bytes) {
    inventory.cpu_bytes = cpus.bytes;
    inventory.cpu_name = node;
    inventory.cpu_count = cpus.count;
  }
}

void Hosts::Add(const std::string& node,
                const std::string& host,
                const std::vector<DeviceFacts>& devices) {
  const CpuDevices cpus = CpusOf(devices);
  Host& known = hosts_[host.empty() ? node : host];
  known.cpus += cpus.count;
  known.gpus += std::ssize(devices) - cpus.count;
  if (std::ssize(devices) == cpus.count) {
    return;
  }
  all_told_ = all_told_ && cpus.bytes > 0;
  if (cpus.bytes > known.bytes) {
    known.node = node;
    known.bytes = cpus.bytes;
  }
}

void Hosts::Tell(DeviceInventory& inventory) const {
  for (const auto& [host, has] : hosts_) {
    inventory.gpus_of_host = std::max(inventory.gpus_of_host, has.gpus);
    inventory.cpus_of_host = std::max(inventory.cpus_of_host, has.cpus);
  }
  inventory.host_name.clear();
  inventory.host_bytes = 0;
  inventory.all_hosts_bytes = 0;
  if (!all_told_) {
    return;
  }
  for (const auto& [host, memory] : hosts_) {
    inventory.all_hosts_bytes += memory.bytes;
    if (memory.bytes > inventory.host_bytes) {
      inventory.host_bytes = memory.bytes;
      inventory.host_name = memory.node;
    }
  }
}

}  // namespace ravel::coordinator
