// Memory, streams, events, copies and graphs over the CUDA runtime. Each function makes the device
// of its handle the current one of the thread first.

#include <nvtx3/nvToolsExt.h>

#include "kernels/cuda/functions.h"

namespace ravel::kernels::cuda {
namespace {

StreamHandle* StreamOf(void* stream) {
  return static_cast<StreamHandle*>(stream);
}
EventHandle* EventOf(void* event) {
  return static_cast<EventHandle*>(event);
}

int32_t MemoryInfo(int32_t index, uint64_t* free_bytes, uint64_t* total_bytes) {
  size_t free_size = 0;
  size_t total_size = 0;
  const int32_t error = On(index, [&] { return cudaMemGetInfo(&free_size, &total_size); });
  *free_bytes = free_size;
  *total_bytes = total_size;
  return error;
}

int32_t DeviceAllocate(int32_t index, uint64_t bytes, void** memory) {
  return On(index, [&] { return cudaMalloc(memory, bytes); });
}

int32_t DeviceFree(int32_t index, void* memory) {
  return On(index, [&] { return cudaFree(memory); });
}

int32_t PinnedAllocate(int32_t index, uint64_t bytes, void** memory) {
  return On(index, [&] { return cudaHostAlloc(memory, bytes, cudaHostAllocPortable); });
}

int32_t PinnedFree(int32_t index, void* memory) {
  return On(index, [&] { return cudaFreeHost(memory); });
}

int32_t StreamCreate(int32_t index, int32_t high_priority, void** stream) {
  cudaError_t error = cudaSetDevice(index);
  int lowest = 0;
  int highest = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  }
  cudaStream_t made = nullptr;
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(
        &made, cudaStreamNonBlocking, high_priority != 0 ? highest : lowest);
  }
  if (error == cudaSuccess) {
    *stream = new StreamHandle{.device = index, .stream = made};
  }
  return error;
}

int32_t StreamDestroy(void* stream) {
  ReleaseAttention(*StreamOf(stream));
  const int32_t error =
      On(StreamOf(stream)->device, [&] { return cudaStreamDestroy(StreamOf(stream)->stream); });
  delete StreamOf(stream);
  return error;
}

// cudaErrorNotReady is an answer, no error; the runtime keeps it as the thread's last error all the
// same.
int32_t AnswerOf(int32_t error, int32_t* done) {
  *done = error == cudaSuccess ? 1 : 0;
  if (error != cudaErrorNotReady) {
    return error;
  }
  cudaGetLastError();
  return 0;
}

int32_t StreamDone(void* stream, int32_t* done) {
  return AnswerOf(
      On(StreamOf(stream)->device, [&] { return cudaStreamQuery(StreamOf(stream)->stream); }),
      done);
}

int32_t StreamSynchronize(void* stream) {
  return On(StreamOf(stream)->device,
            [&] { return cudaStreamSynchronize(StreamOf(stream)->stream); });
}

int32_t EventCreate(int32_t index, int32_t timed, void** event) {
  cudaError_t error = cudaSetDevice(index);
  cudaEvent_t made = nullptr;
  if (error == cudaSuccess) {
    error = cudaEventCreateWithFlags(&made, timed != 0 ? cudaEventDefault : cudaEventDisableTiming);
  }
  if (error == cudaSuccess) {
    *event = new EventHandle{index, made};
  }
  return error;
}

int32_t EventDestroy(void* event) {
  const int32_t error =
      On(EventOf(event)->device, [&] { return cudaEventDestroy(EventOf(event)->event); });
  delete EventOf(event);
  return error;
}

int32_t EventRecord(void* event, void* stream) {
  return On(StreamOf(stream)->device,
            [&] { return cudaEventRecord(EventOf(event)->event, StreamOf(stream)->stream); });
}

int32_t EventDone(void* event, int32_t* done) {
  return AnswerOf(On(EventOf(event)->device, [&] { return cudaEventQuery(EventOf(event)->event); }),
                  done);
}

int32_t EventSynchronize(void* event) {
  return On(EventOf(event)->device, [&] { return cudaEventSynchronize(EventOf(event)->event); });
}

int32_t EventElapsed(void* begin, void* end, float* milliseconds) {
  return On(EventOf(end)->device, [&] {
    return cudaEventElapsedTime(milliseconds, EventOf(begin)->event, EventOf(end)->event);
  });
}

int32_t StreamWait(void* stream, void* event) {
  return On(StreamOf(stream)->device, [&] {
    return cudaStreamWaitEvent(StreamOf(stream)->stream, EventOf(event)->event, 0);
  });
}

int32_t Copy(void* stream, void* to, const void* from, uint64_t bytes) {
  return On(StreamOf(stream)->device, [&] {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, StreamOf(stream)->stream);
  });
}

int32_t Fill(void* stream, void* to, int32_t byte, uint64_t bytes) {
  return On(StreamOf(stream)->device,
            [&] { return cudaMemsetAsync(to, byte, bytes, StreamOf(stream)->stream); });
}

int32_t HostWork(void* stream, const RavelCudaHostWork* work) {
  return On(StreamOf(stream)->device, [&] {
    return cudaLaunchHostFunc(StreamOf(stream)->stream, work->run, work->argument);
  });
}

int32_t CaptureBegin(void* stream) {
  return On(StreamOf(stream)->device, [&] {
    return cudaStreamBeginCapture(StreamOf(stream)->stream, cudaStreamCaptureModeThreadLocal);
  });
}

int32_t CaptureEnd(void* stream, void** graph) {
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t error = cudaSetDevice(StreamOf(stream)->device);
  if (error == cudaSuccess) {
    error = cudaStreamEndCapture(StreamOf(stream)->stream, &captured);
  }
  if (error == cudaSuccess) {
    // Kernels keep the priority of the stream that they were captured on: gathers and reduces go
    // first.
    error = cudaGraphInstantiate(&executable, captured, cudaGraphInstantiateFlagUseNodePriority);
  }
  if (captured != nullptr) {
    cudaGraphDestroy(captured);
  }
  if (error == cudaSuccess) {
    *graph = new GraphHandle{StreamOf(stream)->device, executable};
  }
  return error;
}

int32_t GraphLaunch(void* graph, void* stream) {
  const GraphHandle* handle = static_cast<GraphHandle*>(graph);
  return On(handle->device,
            [&] { return cudaGraphLaunch(handle->graph, StreamOf(stream)->stream); });
}

int32_t GraphDestroy(void* graph) {
  GraphHandle* handle = static_cast<GraphHandle*>(graph);
  const int32_t error = On(handle->device, [&] { return cudaGraphExecDestroy(handle->graph); });
  delete handle;
  return error;
}

void RangePush(const char* name) {
  nvtxRangePushA(name);
}

void RangePop() {
  nvtxRangePop();
}

int32_t DriverFunction(const char* name, int32_t version, void** function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      name, function, static_cast<unsigned>(version), cudaEnableDefault, &found);
  if (error != cudaSuccess) {
    return error;
  }
  return found == cudaDriverEntryPointSuccess
             ? 0
             : Fail(std::string("the driver has no function ") + name);
}

}  // namespace

void AddDeviceFunctions(RavelCudaFunctions& functions) {
  functions.memory_info = MemoryInfo;
  functions.device_allocate = DeviceAllocate;
  functions.device_free = DeviceFree;
  functions.pinned_allocate = PinnedAllocate;
  functions.pinned_free = PinnedFree;
  functions.stream_create = StreamCreate;
  functions.stream_destroy = StreamDestroy;
  functions.stream_done = StreamDone;
  functions.stream_synchronize = StreamSynchronize;
  functions.event_create = EventCreate;
  functions.event_destroy = EventDestroy;
  functions.event_record = EventRecord;
  functions.event_done = EventDone;
  functions.event_synchronize = EventSynchronize;
  functions.event_elapsed = EventElapsed;
  functions.stream_wait = StreamWait;
  functions.copy = Copy;
  functions.fill = Fill;
  functions.host_work = HostWork;
  functions.capture_begin = CaptureBegin;
  functions.capture_end = CaptureEnd;
  functions.graph_launch = GraphLaunch;
  functions.graph_destroy = GraphDestroy;
  functions.range_push = RangePush;
  functions.range_pop = RangePop;
  functions.driver_function = DriverFunction;
}

}  // namespace ravel::kernels::cuda
