#include "tests/testing/emulated_cuda/nccl_host.h"

#include <utility>

#include "kernels/cuda/nccl_library.h"
#include "tests/testing/emulated_cuda/emulated_errors.h"
#include "tests/testing/emulated_nccl/emulated_nccl.h"

namespace ravel::kernels::cuda::emulated {
namespace {

EmulatedStreams*& TheStreams() {
  static EmulatedStreams* streams = nullptr;
  return streams;
}

int32_t IssueForNccl(void* stream,
                     const char* name,
                     const NcclAccess* accesses,
                     size_t count,
                     std::function<std::function<void()>()> prepare) {
  EmulatedWork work = {.name = name,
                       .accesses = {},
                       .run = nullptr,
                       .prepare = std::move(prepare),
                       .of_peers = true};
  for (size_t i = 0; i < count; ++i) {
    const auto bytes = static_cast<int64_t>(accesses[i].bytes);
    work.accesses.push_back(
        {.name = accesses[i].writes ? "received" : "sent",
         .kind = accesses[i].writes ? Access::Kind::kWrite : Access::Kind::kRead,
         .data = accesses[i].data,
         .row_bytes = bytes,
         .stride_bytes = bytes});
  }
  return TheStreams()->Issue(stream, std::move(work));
}

bool IsCapturing(void* stream) {
  return TheStreams()->IsCapturing(stream);
}

void* NcclStreamOf(void* stream) {
  thread_local NcclStream of_call = {};
  of_call = {
      .stream = stream, .issue = IssueForNccl, .capturing = IsCapturing, .error_text = ErrorText};
  return &of_call;
}

// The library's own, before what is added here.
RavelCudaFunctions& TheFunctions() {
  static RavelCudaFunctions functions = {};
  return functions;
}

int32_t Destroy(void* comm) {
  const int32_t error = TheFunctions().nccl_destroy(comm);
  TheStreams()->ForgetPeers();
  return error;
}

int32_t Abort(void* comm) {
  const int32_t error = TheFunctions().nccl_abort(comm);
  TheStreams()->ForgetPeers();
  return error;
}

}  // namespace

void AddEmulatedNccl(EmulatedStreams& streams,
                     int32_t (*use_device)(int32_t index),
                     RavelCudaFunctions& functions) {
  TheStreams() = &streams;
  AddNcclFunctions({.use_device = use_device, .stream_of = NcclStreamOf}, functions);
  TheFunctions() = functions;
  functions.nccl_destroy = Destroy;
  functions.nccl_abort = Abort;
}

}  // namespace ravel::kernels::cuda::emulated
