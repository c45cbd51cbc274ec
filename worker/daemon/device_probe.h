#pragma once

// Finds the devices that this node offers. The operator chooses the number of CPU devices; GPUs are
// read from NVML, loaded at run time.

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
  // Why there is no GPU, or which are left out and why; empty when all are there.
  std::string device_message;
  std::string cpu_isa;  // "avx2", "avx512", "baseline"
  // Equal for nodes whose trainers can share memory: boot id and pid namespace.
  std::string host_id;
};

// Reads /proc and, in this process, NVML. GPUs that do not answer, or that are cut into MIG
// devices, are left out.
NodeFacts ProbeNode(int cpu_devices, const std::string& nvml = "libnvidia-ml.so.1");

// NVML tells of every GPU; CUDA gives a program those that CUDA_VISIBLE_DEVICES names, numbered in
// its order: indices, or beginnings of UUIDs, up to the first that names none. `visible`: its
// value, or nullptr where it is not set.
std::vector<DeviceFacts> VisibleGpus(std::vector<DeviceFacts> all, const char* visible);
// The first word of `visible` that names none, which hides itself and all that follow; empty where
// all do.
std::string WordWithoutGpu(const std::vector<DeviceFacts>& all, const char* visible);

}  // namespace ravel::daemon
