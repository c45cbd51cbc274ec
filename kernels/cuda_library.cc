#include "kernels/cuda_library.h"

#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>

#include <absl/strings/str_cat.h>
#include <dlfcn.h>
#include <unistd.h>

#include "common/status.h"

namespace ravel::kernels {
namespace {

// Folder of the running binary; empty if the kernel does not tell.
std::string BinaryFolder() {
  std::array<char, PATH_MAX> path;
  const ssize_t bytes = readlink("/proc/self/exe", path.data(), path.size());
  const std::string binary(path.data(), bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return binary.substr(0, binary.rfind('/') + 1);
}

}  // namespace

std::string DefaultCudaLibraryPath() {
  const char* chosen = std::getenv("RAVEL_CUDA_LIBRARY");
  if (chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  return BinaryFolder() + "libravel_cuda.so";
}

absl::StatusOr<CudaLibrary> CudaLibrary::Open(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(
        "no CUDA: ",
        path,
        " not found; build with RAVEL_CUDA=ON, or name the library in RAVEL_CUDA_LIBRARY"));
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA: cannot load ", path, ": ", dlerror()));
  }
  const auto version = reinterpret_cast<cuda::RavelCudaAbiVersionFunction>(
      dlsym(library, cuda::kCudaAbiVersionSymbol));
  const auto functions = reinterpret_cast<cuda::RavelCudaFunctionsFunction>(
      dlsym(library, cuda::kCudaFunctionsSymbol));
  if (version == nullptr || functions == nullptr) {
    dlclose(library);
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA: ", path, " is not a libravel_cuda.so"));
  }
  const int32_t found = version();
  if (found != cuda::kCudaAbiVersion) {
    dlclose(library);
    return absl::FailedPreconditionError(absl::StrCat("no CUDA: ",
                                                      path,
                                                      " has ABI version ",
                                                      found,
                                                      ", this binary needs ",
                                                      cuda::kCudaAbiVersion));
  }
  return CudaLibrary(path, functions());
}

absl::Status CudaLibrary::ToStatus(int32_t error, const std::string& what) const {
  if (error == 0) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(
      "CUDA: ", what, ": ", functions_->error_text(error), " (error ", error, ", ", path_, ")"));
}

absl::StatusOr<CudaVersions> CudaLibrary::Versions() const {
  CudaVersions versions;
  RETURN_IF_ERROR(ToStatus(functions_->versions(&versions.driver, &versions.runtime), "versions"));
  return versions;
}

absl::StatusOr<std::vector<CudaDevice>> CudaLibrary::Devices() const {
  int32_t count = 0;
  RETURN_IF_ERROR(ToStatus(functions_->device_count(&count), "counting devices"));
  std::vector<CudaDevice> devices;
  for (int32_t index = 0; index < count; ++index) {
    cuda::RavelCudaDevice device = {};
    RETURN_IF_ERROR(ToStatus(functions_->device(index, &device), absl::StrCat("device ", index)));
    devices.push_back({.name = std::string(device.name, strnlen(device.name, sizeof(device.name))),
                       .memory_bytes = device.memory_bytes,
                       .compute_major = device.compute_major,
                       .compute_minor = device.compute_minor,
                       .multiprocessors = device.multiprocessors});
  }
  return devices;
}

absl::Status CudaLibrary::SelfTest(int index) const {
  return ToStatus(functions_->self_test(index), absl::StrCat("self-test of device ", index));
}

}  // namespace ravel::kernels
