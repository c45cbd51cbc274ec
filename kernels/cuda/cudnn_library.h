#pragma once

// cuDNN, opened when it is first asked for: one table of the functions we call. Inside
// libravel_cuda.so and its tests, which fill tables of their own.

#include <cstdint>
#include <string>
#include <vector>

#include <cudnn_graph.h>

namespace ravel::kernels::cuda {

struct CudnnFunctions {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) error_text = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) make = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) discard = nullptr;
  decltype(&cudnnBackendSetAttribute) set = nullptr;
  decltype(&cudnnBackendGetAttribute) get = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;
};

struct CudnnLibrary {
  CudnnFunctions functions;
  uint64_t version = 0;  // 91900 for 9.19
  std::string missing;   // why there is none, and where it was sought; empty if there is
};

// Returns the paths where cuDNN is sought: the one that RAVEL_CUDNN_LIBRARY names and nothing else,
// or the loader's own search, then the toolkit's folder.
std::vector<std::string> CudnnPaths();
// The first that loads. Refuses another major version than that of the headers this was built with,
// and one before kOldestCudnn.
CudnnLibrary OpenCudnn(const std::vector<std::string>& paths);
// That of the process, opened by the first call. Thread-safe.
const CudnnLibrary& TheCudnn();

// "cuDNN 9.19.0" and the like.
std::string CudnnVersionText(uint64_t version);

}  // namespace ravel::kernels::cuda
