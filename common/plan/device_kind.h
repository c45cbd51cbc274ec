#pragma once

// Devices that a plan is made for without having them: what they are called, how much memory they
// have, what they can compute, and rough speeds for a timeline.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/model/gemm_paths.h"
#include "common/status.h"

namespace ravel::plan {

struct DeviceKind {
  std::string name;  // "H100-80G", "cpu"
  bool cpu = false;
  int64_t memory_bytes = 0;  // 0: not known, nothing is refused for lack of it
  // Rates that are reached in practice, per device.
  double flops = 0;  // of matrix products in compute dtype
  double memory_bytes_per_second = 0;
  double node_bytes_per_second = 0;     // to a peer of the node, one direction
  double network_bytes_per_second = 0;  // to another node
  int64_t devices_per_node = 8;
  bool known = false;     // else the rates are those of a common device, and the text says so
  int compute_major = 0;  // compute capability; 0.0: not known, or no GPU
  int compute_minor = 0;

  // Memory that a plan may use: all of it less 6 % for the runtime, its context and its
  // communicators.
  int64_t usable_bytes() const { return memory_bytes - memory_bytes / 100 * 6; }
};

struct DeviceRequest {
  int64_t count = 0;  // 0: not said
  DeviceKind kind;
};

// "64xH100-80G", "8xH200-141G", "4xcpu", "4xcpu-16G", "4" (of `default_kind`), or any NAME-nG: n
// GiB, also nGiB. Errors begin "--devices: ".
absl::StatusOr<DeviceRequest> ParseDevices(std::string_view text, bool cpu_by_default);

// The names that have rates of their own, for people: "A100, ... with their memory (H100-80G),
// ...".
std::string KnownDeviceNames();

// Returns the vendor's dense bf16 peak in FLOP/s of the device with this NVML name, such as "NVIDIA
// H100 80GB HBM3", or 0 if the device is not known or is a MIG slice.
double DenseBf16Peak(std::string_view model);

// Returns what the device with this NVML name, or a slice of it (MIG), can compute: of compute
// capability 0.0 if the device is not known.
GemmDevice GemmDeviceOf(std::string_view model);

// Refuses a recipe that devices of this kind cannot run, as CheckRecipeOnGpu does; of cpu devices
// and of those that are not known nothing.
absl::Status CheckRecipeOn(const DeviceKind& kind, const RecipeSpec& recipe);

// Refuses a tensor axis of so many ranks that its groups do not lie in nodes of this kind, unless
// `across_nodes`; of cpu devices, whose nodes have any number, nothing. The error names the field.
absl::Status CheckTensorNodes(const DeviceKind& kind, int64_t tensor_ranks, bool across_nodes);

}  // namespace ravel::plan
