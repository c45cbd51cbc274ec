#include "tests/kernels/cuda/runtime/fake_runtime.h"

#include <cstddef>

#include <cuda_runtime_api.h>

#include "common/mutex.h"

namespace ravel::kernels::cuda::fake_runtime {
namespace {

// Behind every handle and every address: what it is of.
struct Object {
  int device;
};

struct Record {
  Mutex mutex;
  std::vector<std::string> faults ABSL_GUARDED_BY(mutex);
  std::vector<std::string> calls ABSL_GUARDED_BY(mutex);
};

Record& TheRecord() {
  static Record& record = *new Record;
  return record;
}

int& Current() {
  thread_local int device = -1;
  return device;
}

cudaError_t Use(const char* name, const void* object) {
  const int device = object == nullptr ? Current() : static_cast<const Object*>(object)->device;
  Record& record = TheRecord();
  const MutexLock lock(record.mutex);
  record.calls.push_back(name);
  if (device != Current() || device < 0) {
    record.faults.push_back(std::string(name) + ": device " + std::to_string(device) +
                            ", current " + std::to_string(Current()));
  }
  return cudaSuccess;
}

template <typename Handle>
cudaError_t Make(const char* name, Handle* made) {
  *made = reinterpret_cast<Handle>(new Object{Current()});
  return Use(name, nullptr);
}

cudaError_t Destroy(const char* name, void* object) {
  const cudaError_t error = Use(name, object);
  delete static_cast<Object*>(object);
  return error;
}

}  // namespace

std::vector<std::string> Faults() {
  Record& record = TheRecord();
  const MutexLock lock(record.mutex);
  return record.faults;
}

std::vector<std::string> Calls() {
  Record& record = TheRecord();
  const MutexLock lock(record.mutex);
  return record.calls;
}

extern "C" {

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) {
    return cudaErrorInvalidDevice;
  }
  Current() = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = 0;
  return Use("cudaMemGetInfo", nullptr);
}
cudaError_t cudaMalloc(void** memory, size_t) {
  return Make("cudaMalloc", memory);
}
cudaError_t cudaFree(void* memory) {
  return Destroy("cudaFree", memory);
}
cudaError_t cudaHostAlloc(void** memory, size_t, unsigned int) {
  return Make("cudaHostAlloc", memory);
}
cudaError_t cudaFreeHost(void* memory) {
  return Destroy("cudaFreeHost", memory);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return Use("cudaDeviceGetStreamPriorityRange", nullptr);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  return Make("cudaStreamCreateWithPriority", stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return Destroy("cudaStreamDestroy", stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Use("cudaStreamQuery", stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return Use("cudaStreamSynchronize", stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned int) {
  return Use("cudaStreamWaitEvent", stream);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return Make("cudaEventCreateWithFlags", event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return Destroy("cudaEventDestroy", event);
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  return Use("cudaEventRecord", stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Use("cudaEventQuery", event);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return Use("cudaEventSynchronize", event);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t end) {
  *milliseconds = 0.0f;
  return Use("cudaEventElapsedTime", end);
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t stream) {
  return Use("cudaMemcpyAsync", stream);
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
  return Use("cudaMemsetAsync", stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  function(argument);
  return Use("cudaLaunchHostFunc", stream);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return Use("cudaStreamBeginCapture", stream);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(new Object{Current()});
  return Use("cudaStreamEndCapture", stream);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  return Make("cudaGraphInstantiate", executable);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return Destroy("cudaGraphDestroy", graph);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  return Use("cudaGraphLaunch", graph);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  return Destroy("cudaGraphExecDestroy", graph);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*,
                                             void** function,
                                             unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"

}  // namespace ravel::kernels::cuda::fake_runtime
