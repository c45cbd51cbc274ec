// The functions of NVML that a worker daemon asks, for as many devices of 8 GiB as
// RAVEL_EMULATED_DEVICES says (1): what libravel_cuda_emulated.so offers, told beforehand.
// RAVEL_EMULATED_LOST and RAVEL_EMULATED_MIG are indices of a device that does not answer, and of
// one that is cut into parts.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kGpuIsLost = 15;
constexpr unsigned long long kMemoryBytes = 8ull << 30;

unsigned int Devices() {
  const char* chosen = std::getenv("RAVEL_EMULATED_DEVICES");
  return chosen == nullptr ? 1 : static_cast<unsigned int>(std::atoi(chosen));
}

// Whether the variable names the device.
bool Names(const char* variable, unsigned int index) {
  const char* chosen = std::getenv(variable);
  return chosen != nullptr && static_cast<unsigned int>(std::atoi(chosen)) == index;
}

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

}  // namespace

#define RAVEL_NVML extern "C" __attribute__((visibility("default")))

RAVEL_NVML int nvmlInit_v2() {
  return kSuccess;
}

RAVEL_NVML int nvmlShutdown() {
  return kSuccess;
}

RAVEL_NVML const char* nvmlErrorString(int error) {
  return error == kSuccess ? "no error" : error == kGpuIsLost ? "GPU is lost" : "invalid argument";
}

RAVEL_NVML int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = Devices();
  return kSuccess;
}

// A handle is the index plus one.
RAVEL_NVML int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  if (index >= Devices()) {
    return kInvalidArgument;
  }
  if (Names("RAVEL_EMULATED_LOST", index)) {
    return kGpuIsLost;
  }
  *device = reinterpret_cast<void*>(uintptr_t{index} + 1);
  return kSuccess;
}

RAVEL_NVML int nvmlDeviceGetName(void*, char* name, unsigned int bytes) {
  std::snprintf(name, bytes, "Emulated GPU");
  return kSuccess;
}

RAVEL_NVML int nvmlDeviceGetUUID(void* device, char* uuid, unsigned int bytes) {
  std::snprintf(uuid,
                bytes,
                "GPU-emulated-%llu",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(device) - 1));
  return kSuccess;
}

RAVEL_NVML int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {.total = kMemoryBytes, .free = kMemoryBytes, .used = 0};
  return kSuccess;
}

RAVEL_NVML int nvmlDeviceGetMigMode(void* device, unsigned int* current, unsigned int* pending) {
  const auto index = static_cast<unsigned int>(reinterpret_cast<uintptr_t>(device) - 1);
  *current = *pending = Names("RAVEL_EMULATED_MIG", index) ? 1 : 0;
  return kSuccess;
}
