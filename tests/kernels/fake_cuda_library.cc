// A library with the interface of libravel_cuda.so and no CUDA: two devices, the second of which
// fails its self-test. Its ABI version is set by the build, so that a wrong one exists too.

#include <cstring>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda {
namespace {

int32_t Versions(int32_t* driver, int32_t* runtime) {
  *driver = 13020;
  *runtime = 13000;
  return 0;
}

int32_t DeviceCount(int32_t* count) {
  *count = 2;
  return 0;
}

int32_t Device(int32_t index, RavelCudaDevice* device) {
  *device = {.name = "Fake",
             .memory_bytes = uint64_t{1} << 34,
             .compute_major = 9,
             .compute_minor = index,
             .multiprocessors = 132,
             .reserved = 0};
  return 0;
}

int32_t SelfTest(int32_t index) {
  return index == 0 ? 0 : 209;
}

const char* ErrorText(int32_t) {
  return "no kernel image";
}

constexpr RavelCudaFunctions kFunctions = {Versions, DeviceCount, Device, SelfTest, ErrorText};

}  // namespace

extern "C" int32_t ravel_cuda_abi_version() {
  return RAVEL_FAKE_ABI_VERSION;
}
extern "C" const RavelCudaFunctions* ravel_cuda_functions() {
  return &kFunctions;
}

}  // namespace ravel::kernels::cuda
