#include "kernels/cuda/cudnn_library.h"

#include <cstdlib>

#include <dlfcn.h>

#include "kernels/cuda/attention_graph.h"

namespace ravel::kernels::cuda {
namespace {

constexpr char kName[] = "libcudnn.so.9";

template <typename Function>
void Find(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr && missing.empty()) {
    missing = std::string(kName) + " has no " + name;
  }
}

void* OpenFirst(const std::vector<std::string>& paths, std::string& missing) {
  missing = "cuDNN not found; tried";
  for (const std::string& path : paths) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      missing.clear();
      return handle;
    }
    missing += " " + path + " (" + dlerror() + ")";
  }
  return nullptr;
}

std::string WhyRefused(uint64_t version) {
  constexpr uint64_t kMajor = 10000;
  if (version / kMajor != CUDNN_MAJOR) {
    return CudnnVersionText(version) + " is installed; this build has the headers of " +
           CudnnVersionText(CUDNN_VERSION);
  }
  if (version < kOldestCudnn) {
    return CudnnVersionText(version) + " is installed; attention needs " +
           CudnnVersionText(kOldestCudnn);
  }
  return "";
}

}  // namespace

std::string CudnnVersionText(uint64_t version) {
  return "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

std::vector<std::string> CudnnPaths() {
  const char* chosen = std::getenv("RAVEL_CUDNN_LIBRARY");
  if (chosen != nullptr && *chosen != '\0') {
    return {chosen};
  }
  return {kName, std::string("/usr/local/cuda/lib64/") + kName};
}

CudnnLibrary OpenCudnn(const std::vector<std::string>& paths) {
  CudnnLibrary library;
  void* handle = OpenFirst(paths, library.missing);
  if (handle == nullptr) {
    return library;
  }
  CudnnFunctions& f = library.functions;
  Find(handle, "cudnnGetVersion", f.version, library.missing);
  Find(handle, "cudnnGetErrorString", f.error_text, library.missing);
  Find(handle, "cudnnGetLastErrorString", f.last_error, library.missing);
  Find(handle, "cudnnCreate", f.create, library.missing);
  Find(handle, "cudnnDestroy", f.destroy, library.missing);
  Find(handle, "cudnnSetStream", f.set_stream, library.missing);
  Find(handle, "cudnnBackendCreateDescriptor", f.make, library.missing);
  Find(handle, "cudnnBackendDestroyDescriptor", f.discard, library.missing);
  Find(handle, "cudnnBackendSetAttribute", f.set, library.missing);
  Find(handle, "cudnnBackendGetAttribute", f.get, library.missing);
  Find(handle, "cudnnBackendFinalize", f.finalize, library.missing);
  Find(handle, "cudnnBackendExecute", f.execute, library.missing);
  if (library.missing.empty()) {
    library.version = f.version();
    library.missing = WhyRefused(library.version);
  }
  return library;
}

const CudnnLibrary& TheCudnn() {
  static const CudnnLibrary library = OpenCudnn(CudnnPaths());
  return library;
}

}  // namespace ravel::kernels::cuda
