// Attention as cuda_abi.h has it: handles of streams, plans, runs.

#include <memory>
#include <utility>

#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/functions.h"

namespace ravel::kernels::cuda {
namespace {

// A handle of the stream's own, made once: cuDNN's handles are for one thread, as streams are.
int32_t HandleOf(StreamHandle& on, cudnnHandle_t* handle) {
  const CudnnLibrary& library = TheCudnn();
  if (!library.missing.empty()) {
    return Fail(library.missing);
  }
  const cudaError_t error = cudaSetDevice(on.device);
  if (error != cudaSuccess) {
    return error;
  }
  if (on.cudnn == nullptr) {
    cudnnHandle_t made = nullptr;
    Cudnn cudnn(library.functions);
    cudnn.Check(library.functions.create(&made), "a handle");
    if (cudnn.ok()) {
      cudnn.Check(library.functions.set_stream(made, on.stream), "a handle's stream");
    }
    if (!cudnn.ok()) {
      if (made != nullptr) {
        library.functions.destroy(made);
      }
      return Fail("cuDNN: " + cudnn.failure());
    }
    on.cudnn = made;
  }
  *handle = static_cast<cudnnHandle_t>(on.cudnn);
  return 0;
}

// The plan behind the C interface's handle.
struct PlanHandle {
  int32_t device;
  std::unique_ptr<CudnnAttentionPlan> plan;
};

}  // namespace

int32_t AttentionVersion(uint64_t* version) {
  const CudnnLibrary& library = TheCudnn();
  if (!library.missing.empty()) {
    return Fail(library.missing);
  }
  *version = library.version;
  return 0;
}

int32_t AttentionPlan(void* stream,
                      const RavelCudaAttention* attention,
                      RavelCudaAttentionPlan* plan) {
  *plan = {};
  CudnnTarget target;
  StreamHandle& on = *static_cast<StreamHandle*>(stream);
  const int32_t error = HandleOf(on, &target.handle);
  if (error != 0) {
    return error;
  }
  const CudnnLibrary& library = TheCudnn();
  std::string why;
  std::unique_ptr<CudnnAttentionPlan> made =
      PlanAttention(library.functions, library.version, target, *attention, why);
  if (made == nullptr) {
    return Fail(CudnnVersionText(library.version) + ": " + why);
  }
  plan->workspace_bytes = static_cast<uint64_t>(made->workspace_bytes);
  plan->unified = made->unified ? 1 : 0;
  plan->engine = static_cast<int32_t>(made->engine);
  plan->plan = new PlanHandle{on.device, std::move(made)};
  return 0;
}

int32_t AttentionPlanDestroy(void* plan) {
  auto* handle = static_cast<PlanHandle*>(plan);
  const cudaError_t error = cudaSetDevice(handle->device);  // of whose code the engine lets go
  delete handle;
  return error;
}

int32_t AttentionRun(void* stream, void* plan, const RavelCudaAttentionBuffers* buffers) {
  cudnnHandle_t handle = nullptr;
  const int32_t error = HandleOf(*static_cast<StreamHandle*>(stream), &handle);
  if (error != 0) {
    return error;
  }
  const std::string failure = RunAttention(handle, *static_cast<PlanHandle*>(plan)->plan, *buffers);
  return failure.empty() ? 0 : Fail("cuDNN: " + failure);
}

void ReleaseAttention(StreamHandle& on) {
  if (on.cudnn != nullptr) {
    cudaSetDevice(on.device);
    TheCudnn().functions.destroy(static_cast<cudnnHandle_t>(on.cudnn));
    on.cudnn = nullptr;
  }
}

}  // namespace ravel::kernels::cuda
