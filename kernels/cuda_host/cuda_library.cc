// Opens libravel_cuda.so with dlopen, checks its ABI version, and turns its error codes into
// statuses with a hint where one usually helps. Errors of this process's own device carry a payload
// (IsDeviceError), because the trainer's exit code must tell a broken device from a failed peer.
// NCCL errors count as the device's only if CUDA failed beneath, or if NCCL could not be opened.

#include "kernels/cuda_host/cuda_library.h"

#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <dlfcn.h>
#include <unistd.h>

#include "common/status.h"

namespace ravel::kernels {
namespace {

constexpr char kDeviceError[] = "ravel/device_error";

bool OfDevice(int32_t error) {
  const bool nccl = error >= cuda::kNcclErrors && error < cuda::kNcclErrorsEnd;
  return !nccl || error == cuda::kNcclInCuda || error == cuda::kNcclOtherError;
}

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
  const std::string hint = CudaHint(error);
  const std::string text = absl::StrCat("CUDA: ",
                                        what,
                                        ": ",
                                        functions_->error_text(error),
                                        hint.empty() ? "" : "; ",
                                        hint,
                                        " (error ",
                                        error,
                                        ", ",
                                        path_,
                                        ")");
  absl::Status status =
      error == kCudaOutOfMemory ? absl::ResourceExhaustedError(text) : absl::UnavailableError(text);
  if (OfDevice(error)) {
    status.SetPayload(kDeviceError, absl::Cord(absl::StrCat(error)));
  }
  return status;
}

bool IsDeviceError(const absl::Status& status) {
  return status.GetPayload(kDeviceError).has_value();
}

std::string CudaHint(int32_t error) {
  switch (error) {
    case 35:  // cudaErrorInsufficientDriver
      return "CUDA 13 needs driver 580 or later";
    case 46:  // cudaErrorDevicesUnavailable
      return "another process holds the device, whose compute mode may be exclusive: nvidia-smi";
    case 100:  // cudaErrorNoDevice
      return "CUDA_VISIBLE_DEVICES may name none";
    case 209:  // cudaErrorNoKernelImageForDevice
      return "this build has code for other compute capabilities: CMAKE_CUDA_ARCHITECTURES";
    case 214:  // cudaErrorECCUncorrectable
      return "the device's memory is damaged, and it needs a reset: nvidia-smi -q -d ECC";
    case 700:  // cudaErrorIllegalAddress
    case 710:  // cudaErrorAssert
    case 719:  // cudaErrorLaunchFailure
      return "the kernel's log has the Xid: dmesg";
    case 802:  // cudaErrorSystemNotReady
      return "nvidia-fabricmanager, of the driver's very version, may not run";
    case 803:  // cudaErrorSystemDriverMismatch
      return "libcuda.so.1 is not of the driver that is loaded: restart the machine or container";
    case 999:  // cudaErrorUnknown
      return "the module nvidia_uvm may not be loaded, or a container may lack its device";
    default:
      return "";
  }
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
                       .multiprocessors = device.multiprocessors,
                       .cache_bytes = device.cache_bytes,
                       .pci = std::string(device.pci, strnlen(device.pci, sizeof(device.pci)))});
  }
  return devices;
}

absl::Status CudaLibrary::SelfTest(int index) const {
  return ToStatus(functions_->self_test(index), absl::StrCat("self-test of device ", index));
}

}  // namespace ravel::kernels
