#pragma once

// What this node offers. CPU devices are a number that the operator chooses; GPUs are asked of
// NVML, loaded at run time.

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel::daemon {

struct DeviceFacts {
  std::string kind;  // cpu, gpu
  std::string model;
  int64_t memory_bytes = 0;
  std::string uuid;
};

struct NodeFacts {
  std::vector<DeviceFacts> devices;  // CPU devices first; the index is the ordinal
  std::string device_message;        // why there is no GPU; empty when there is one
  std::string cpu_isa;               // "avx2", "avx512", "baseline"
  // Equal for nodes whose trainers can share memory: boot id and pid namespace.
  std::string host_id;
};

// Reads /proc and, in this process, NVML.
NodeFacts ProbeNode(int cpu_devices);

// NVML tells of every GPU; CUDA gives a program those that CUDA_VISIBLE_DEVICES names, numbered in
// its order: indices, or beginnings of UUIDs, up to the first that names none. `visible`: its
// value, or nullptr where it is not set.
std::vector<DeviceFacts> VisibleGpus(std::vector<DeviceFacts> all, const char* visible);

}  // namespace ravel::daemon
