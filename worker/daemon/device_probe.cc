// Finds out what this node offers. NVML is loaded with dlopen and declared here, so the build needs
// no NVIDIA header and the binary runs without a driver. NVML lists every GPU of the machine, but
// trainers only see CUDA_VISIBLE_DEVICES, so that variable is interpreted as CUDA does. A GPU that
// does not answer is left out with a reason, instead of failing the node.

#include "worker/daemon/device_probe.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <dlfcn.h>
#include <unistd.h>

namespace ravel::daemon {
namespace {

constexpr char kVisibleDevices[] = "CUDA_VISIBLE_DEVICES";

std::string ReadSmallFile(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The value of the first line "KEY : VALUE" of a /proc table.
std::string Field(const std::string& table, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(table, '\n')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StripAsciiWhitespace(parts.first) == key) {
      return std::string(absl::StripAsciiWhitespace(parts.second));
    }
  }
  return "";
}

std::string CpuIsa(const std::string& cpuinfo) {
  const std::string flags = absl::StrCat(" ", Field(cpuinfo, "flags"), " ");
  if (absl::StrContains(flags, " avx512f ")) {
    return "avx512";
  }
  return absl::StrContains(flags, " avx2 ") && absl::StrContains(flags, " fma ") ? "avx2"
                                                                                 : "baseline";
}

int64_t MemoryBytes() {
  const std::string total = Field(ReadSmallFile("/proc/meminfo"), "MemTotal");
  int64_t kib = 0;
  const std::vector<std::string> parts = absl::StrSplit(total, ' ');
  return absl::SimpleAtoi(parts[0], &kib) ? kib * 1024 : 0;
}

std::string HostId() {
  const std::string boot(
      absl::StripAsciiWhitespace(ReadSmallFile("/proc/sys/kernel/random/boot_id")));
  std::array<char, PATH_MAX> link = {};
  const ssize_t length = readlink("/proc/self/ns/pid", link.data(), link.size() - 1);
  return absl::StrCat(boot, "/", length > 0 ? link.data() : "pid:unknown");
}

// The part of NVML that is asked, with our own prototypes: no header of it is needed to build.
struct NvmlMemory {
  unsigned long long total = 0;
  unsigned long long free = 0;
  unsigned long long used = 0;
};
struct Nvml {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_text)(int) = nullptr;
  int (*count)(unsigned int*) = nullptr;
  int (*handle)(unsigned int, void**) = nullptr;
  int (*name)(void*, char*, unsigned int) = nullptr;
  int (*uuid)(void*, char*, unsigned int) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;
  int (*mig_mode)(void*, unsigned int*, unsigned int*) = nullptr;  // absent in old drivers
};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool FindAll(void* library, Nvml& nvml) {
  return Find(library, "nvmlInit_v2", nvml.init) && Find(library, "nvmlShutdown", nvml.shutdown) &&
         Find(library, "nvmlErrorString", nvml.error_text) &&
         Find(library, "nvmlDeviceGetCount_v2", nvml.count) &&
         Find(library, "nvmlDeviceGetHandleByIndex_v2", nvml.handle) &&
         Find(library, "nvmlDeviceGetName", nvml.name) &&
         Find(library, "nvmlDeviceGetUUID", nvml.uuid) &&
         Find(library, "nvmlDeviceGetMemoryInfo", nvml.memory);
}

// Empty, or why the GPU of this index is none that a trainer can have.
std::string AskGpu(const Nvml& nvml, unsigned int index, std::vector<DeviceFacts>& devices) {
  void* device = nullptr;
  std::array<char, 96> name = {};
  std::array<char, 96> uuid = {};
  NvmlMemory memory;
  int error = nvml.handle(index, &device);
  error = error != 0 ? error : nvml.name(device, name.data(), name.size());
  error = error != 0 ? error : nvml.uuid(device, uuid.data(), uuid.size());
  error = error != 0 ? error : nvml.memory(device, &memory);
  if (error != 0) {
    return absl::StrCat("GPU ", index, " is left out: ", nvml.error_text(error));
  }
  unsigned int cut = 0;
  unsigned int pending = 0;
  if (nvml.mig_mode != nullptr && nvml.mig_mode(device, &cut, &pending) == 0 && cut != 0) {
    return absl::StrCat(
        "GPU ", index, " is left out: it is cut into MIG devices, which are not supported");
  }
  devices.push_back({.kind = "gpu",
                     .model = name.data(),
                     .memory_bytes = static_cast<int64_t>(memory.total),
                     .uuid = uuid.data()});
  return "";
}

// Adds the GPUs; returns why there is none, or what is left out.
std::string AskNvml(const Nvml& nvml, std::vector<DeviceFacts>& devices) {
  if (const int error = nvml.init(); error != 0) {
    return absl::StrCat("driver does not answer: ", nvml.error_text(error));
  }
  unsigned int count = 0;
  const int error = nvml.count(&count);
  std::vector<std::string> left_out;
  for (unsigned int i = 0; error == 0 && i < count; ++i) {
    if (std::string why = AskGpu(nvml, i, devices); !why.empty()) {
      left_out.push_back(std::move(why));
    }
  }
  nvml.shutdown();
  if (error != 0) {
    return absl::StrCat("driver does not count its devices: ", nvml.error_text(error));
  }
  return count == 0 ? "driver present, no device" : absl::StrJoin(left_out, "; ");
}

// Empty, or what CUDA_VISIBLE_DEVICES hides by a word that is no GPU of this machine.
std::string HiddenText(const std::vector<DeviceFacts>& present, size_t seen) {
  const char* visible = std::getenv(kVisibleDevices);
  const std::string word = WordWithoutGpu(present, visible);
  if (!word.empty() && word != "-1") {
    return absl::StrCat(kVisibleDevices,
                        ": \"",
                        word,
                        absl::StartsWith(word, "MIG-")
                            ? "\" is a MIG device, which is not supported"
                            : "\" names no GPU of this machine",
                        "; it hides itself and all that follow");
  }
  return !present.empty() && seen == 0
             ? absl::StrCat(kVisibleDevices, " hides all ", present.size(), " devices")
             : "";
}

std::string ProbeGpus(const std::string& name, std::vector<DeviceFacts>& all) {
  std::vector<DeviceFacts> present;
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::StrCat("no driver: ", name, " not found");
  }
  Nvml nvml;
  std::string message;
  if (FindAll(library, nvml)) {
    Find(library, "nvmlDeviceGetMigMode", nvml.mig_mode);
    message = AskNvml(nvml, present);
  } else {
    message = absl::StrCat("driver too old: ", name, " lacks a function");
  }
  dlclose(library);
  const std::vector<DeviceFacts> seen = VisibleGpus(present, std::getenv(kVisibleDevices));
  if (const std::string hidden = HiddenText(present, seen.size()); !hidden.empty()) {
    message = message.empty() ? hidden : absl::StrCat(message, "; ", hidden);
  }
  all.insert(all.end(), seen.begin(), seen.end());
  return message;
}

// Returns the index of the device that the word names; all.size() if it names none.
size_t IndexOf(const std::vector<DeviceFacts>& all, absl::string_view word) {
  size_t index = 0;
  if (absl::SimpleAtoi(word, &index)) {
    return std::min(index, all.size());
  }
  index = 0;
  while (index < all.size() && (word.empty() || !absl::StartsWith(all[index].uuid, word))) {
    ++index;
  }
  return index;
}

}  // namespace

std::vector<DeviceFacts> VisibleGpus(std::vector<DeviceFacts> all, const char* visible) {
  if (visible == nullptr) {
    return all;
  }
  std::vector<DeviceFacts> seen;
  for (const absl::string_view text : absl::StrSplit(visible, ',')) {
    const size_t index = IndexOf(all, absl::StripAsciiWhitespace(text));
    if (index == all.size()) {
      break;
    }
    seen.push_back(all[index]);
  }
  return seen;
}

std::string WordWithoutGpu(const std::vector<DeviceFacts>& all, const char* visible) {
  for (const absl::string_view text : absl::StrSplit(visible == nullptr ? "" : visible, ',')) {
    const absl::string_view word = absl::StripAsciiWhitespace(text);
    if (IndexOf(all, word) == all.size()) {
      return std::string(word);
    }
  }
  return "";
}

NodeFacts ProbeNode(int cpu_devices, const std::string& nvml) {
  NodeFacts facts;
  const std::string cpuinfo = ReadSmallFile("/proc/cpuinfo");
  facts.cpu_isa = CpuIsa(cpuinfo);
  facts.host_id = HostId();
  const int64_t memory = MemoryBytes();
  for (int i = 0; i < cpu_devices; ++i) {
    facts.devices.push_back({.kind = "cpu",
                             .model = Field(cpuinfo, "model name"),
                             .memory_bytes = memory / cpu_devices,
                             .uuid = absl::StrCat("cpu-", i)});
  }
  facts.device_message = ProbeGpus(nvml, facts.devices);
  return facts;
}

}  // namespace ravel::daemon
