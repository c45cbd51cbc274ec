#include "common/plan/device_kind.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostDevices = 65536;
constexpr int64_t kMostGiB = 1 << 20;
constexpr double kTera = 1e12;
constexpr double kGiga = 1e9;

struct KnownDevice {
  std::string_view name;  // before the memory size
  double flops;
  double memory_bytes_per_second;
  double node_bytes_per_second;
  double network_bytes_per_second;
};
// Half of the dense bf16 peak, four fifths of the memory's rate and three quarters of the links':
// what training reaches.
constexpr KnownDevice kKnown[] = {
    {"A100", 156 * kTera, 1600 * kGiga, 225 * kGiga, 18 * kGiga},
    {"H100", 495 * kTera, 2700 * kGiga, 337 * kGiga, 37 * kGiga},
    {"H200", 495 * kTera, 3800 * kGiga, 337 * kGiga, 37 * kGiga},
    {"B200", 1125 * kTera, 6400 * kGiga, 675 * kGiga, 37 * kGiga},
    {"GB200", 1250 * kTera, 6400 * kGiga, 675 * kGiga, 37 * kGiga},
    {"L40S", 181 * kTera, 690 * kGiga, 24 * kGiga, 18 * kGiga},
};
// Matched against the beginning of the NVML name; the first match counts.
struct DensePeak {
  std::string_view model;
  double flops;
};
constexpr DensePeak kDensePeaks[] = {
    {"NVIDIA A100", 312 * kTera},
    {"NVIDIA H100 PCIe", 756 * kTera},
    {"NVIDIA H100 NVL", 835 * kTera},
    {"NVIDIA H100 80GB HBM3", 989.4 * kTera},
    {"NVIDIA GH200", 989.4 * kTera},
    {"NVIDIA H200 NVL", 835 * kTera},
    {"NVIDIA H200", 989.4 * kTera},
    {"NVIDIA B200", 2250 * kTera},
    {"NVIDIA GB200", 2500 * kTera},
    {"NVIDIA L40S", 362 * kTera},
};
// A model's compute capability, by the word that names it: GH200 is not H200.
struct ModelCapability {
  std::string_view word;
  int compute_major;
  int compute_minor;
};
constexpr ModelCapability kCapabilities[] = {{"A100", 8, 0},
                                             {"L40S", 8, 9},
                                             {"H100", 9, 0},
                                             {"H200", 9, 0},
                                             {"GH200", 9, 0},
                                             {"B200", 10, 0},
                                             {"GB200", 10, 0}};
constexpr KnownDevice kCpu = {"cpu", 0.1 * kTera, 10 * kGiga, 8 * kGiga, 1 * kGiga};

absl::Status Expected(std::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat(
      "--devices: expected a count and a device such as 64xH100-80G, 4xcpu or 8xNAME-48G, got '",
      std::string(text),
      "'; known are ",
      KnownDeviceNames()));
}

// "80G", "80GB", "80GiB" -> bytes; 0 when it is none of them.
int64_t MemoryOf(std::string_view text) {
  int64_t gib = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), gib);
  const std::string_view unit = text.substr(Size(end - text.data()));
  const bool known_unit = unit == "G" || unit == "GB" || unit == "GiB";
  return error == std::errc() && known_unit && gib > 0 && gib <= kMostGiB ? gib << 30 : 0;
}

void SetRates(const KnownDevice& from, DeviceKind& kind) {
  kind.flops = from.flops;
  kind.memory_bytes_per_second = from.memory_bytes_per_second;
  kind.node_bytes_per_second = from.node_bytes_per_second;
  kind.network_bytes_per_second = from.network_bytes_per_second;
}

absl::StatusOr<DeviceKind> KindOf(std::string_view name, std::string_view text) {
  DeviceKind kind;
  kind.name = std::string(name);
  const size_t dash = name.rfind('-');
  std::string_view model = name;
  if (dash != std::string_view::npos) {
    kind.memory_bytes = MemoryOf(name.substr(dash + 1));
    model = name.substr(0, dash);
  }
  if (model == "cpu") {
    kind.cpu = true;
    kind.known = true;
    kind.devices_per_node = kMostDevices;
    SetRates(kCpu, kind);
    if (dash != std::string_view::npos && kind.memory_bytes == 0) {
      return Expected(text);
    }
    return kind;
  }
  if (model == "gpu" && dash == std::string_view::npos) {
    SetRates(kKnown[1], kind);
    return kind;
  }
  if (kind.memory_bytes == 0 || model.empty() || model.back() == '-') {
    return Expected(text);
  }
  SetRates(kKnown[1], kind);
  for (const KnownDevice& known : kKnown) {
    if (known.name == model) {
      kind.known = true;
      SetRates(known, kind);
      const GemmDevice device = GemmDeviceOf(model);
      kind.compute_major = device.compute_major;
      kind.compute_minor = device.compute_minor;
    }
  }
  return kind;
}

bool IsWordOf(std::string_view word, std::string_view text) {
  const auto parts = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; };
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || parts(text[at - 1])) && (end == text.size() || parts(text[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::string KnownDeviceNames() {
  std::string names;
  for (const KnownDevice& known : kKnown) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(known.name));
  }
  return absl::StrCat(
      names,
      ", each with its memory (H100-80G); cpu with or without; any other name has the rates of ",
      std::string(kKnown[1].name));
}

absl::StatusOr<DeviceRequest> ParseDevices(std::string_view text, bool cpu_by_default) {
  DeviceRequest request;
  if (text.empty()) {
    ASSIGN_OR_RETURN(request.kind, KindOf(cpu_by_default ? "cpu" : "gpu", text));
    return request;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), request.count);
  std::string_view rest = text.substr(Size(end - text.data()));
  if (error != std::errc() || request.count < 1 || request.count > kMostDevices) {
    return Expected(text);
  }
  if (rest.empty()) {
    ASSIGN_OR_RETURN(request.kind, KindOf(cpu_by_default ? "cpu" : "gpu", text));
    return request;
  }
  if (rest.front() != 'x') {
    return Expected(text);
  }
  ASSIGN_OR_RETURN(request.kind, KindOf(rest.substr(1), text));
  return request;
}

double DenseBf16Peak(std::string_view model) {
  if (model.find(" MIG ") != std::string_view::npos) {
    return 0;
  }
  for (const DensePeak& peak : kDensePeaks) {
    const std::string_view rest = model.substr(std::min(model.size(), peak.model.size()));
    // A whole word: B200 is not B2000.
    if (model.starts_with(peak.model) &&
        (rest.empty() || std::isalnum(static_cast<unsigned char>(rest.front())) == 0)) {
      return peak.flops;
    }
  }
  return 0;
}

GemmDevice GemmDeviceOf(std::string_view model) {
  GemmDevice device;
  device.name = std::string(model);
  for (const ModelCapability& known : kCapabilities) {
    if (IsWordOf(known.word, model)) {
      device.compute_major = known.compute_major;
      device.compute_minor = known.compute_minor;
    }
  }
  return device;
}

absl::Status CheckRecipeOn(const DeviceKind& kind, const RecipeSpec& recipe) {
  return CheckRecipeOnGpu(recipe,
                          {.name = kind.name,
                           .compute_major = kind.compute_major,
                           .compute_minor = kind.compute_minor});
}

absl::Status CheckTensorNodes(const DeviceKind& kind, int64_t tensor_ranks, bool across_nodes) {
  if (kind.cpu || across_nodes || kind.devices_per_node % tensor_ranks == 0) {
    return absl::OkStatus();
  }
  return FieldRefusal("parallelism.tensor",
                      absl::StrCat("a divisor of the ",
                                   kind.devices_per_node,
                                   " devices of a node, or parallelism.tensorAcrossNodes: true"),
                      absl::StrCat(tensor_ranks));
}

}  // namespace ravel::plan
