// A libcuda.so.1 that computes nothing and has no device: as much of a driver as cuDNN asks for
// while it builds plans for a device that is only described. Modules load; the CUDA runtime does
// not start on it.

#include <cstdint>

#include <cuda.h>

namespace {

template <typename Handle>
CUresult NewHandle(Handle* handle) {
  constexpr uintptr_t kHandleBytes = 64;
  static uintptr_t last = 0x1000;
  last += kHandleBytes;
  *handle = reinterpret_cast<Handle>(last);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// Tells that this is no driver.
int ravel_fake_driver() {
  return 1;
}

CUresult cuInit(unsigned) {
  return CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 0;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary* library,
                           const void*,
                           CUjit_option*,
                           void**,
                           unsigned,
                           CUlibraryOption*,
                           void**,
                           unsigned) {
  return NewHandle(library);
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) {
  return NewHandle(kernel);
}

}  // extern "C"
