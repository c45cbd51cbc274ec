// A library with the interface of libravel_cuda.so and no CUDA: two devices, the second of which
// fails its self-test; memory of the host; work that is done at once. It refuses what the real one
// would: more memory than the device has, kernels that do not exist, waits for events never
// recorded. Its ABI version is set by the build, so that a wrong one exists too.

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/cuda_abi.h"
#include "kernels/cuda/kernel_params.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int32_t kOutOfMemory = 2;
constexpr int32_t kInvalidValue = 1;
constexpr uint64_t kMemoryBytes = uint64_t{1} << 34;

struct FakeEvent {
  bool recorded = false;
};
struct FakeStream {
  int launches = 0;
};

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
             .memory_bytes = kMemoryBytes,
             .compute_major = 9,
             .compute_minor = index,
             .multiprocessors = 132,
             .cache_bytes = 0,
             .pci = ""};
  return 0;
}

int32_t SelfTest(int32_t index) {
  return index == 0 ? 0 : 209;
}

const char* ErrorText(int32_t error) {
  return error == 209 ? "no kernel image" : error == kOutOfMemory ? "out of memory" : "invalid";
}

int32_t UseDevice(int32_t index) {
  return index < 2 ? 0 : kInvalidValue;
}

int32_t MemoryInfo(int32_t, uint64_t* free_bytes, uint64_t* total_bytes) {
  *free_bytes = kMemoryBytes;
  *total_bytes = kMemoryBytes;
  return 0;
}

int32_t Allocate(int32_t, uint64_t bytes, void** memory) {
  if (bytes > kMemoryBytes) {
    return kOutOfMemory;
  }
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return 0;
}

int32_t Free(int32_t, void* memory) {
  std::free(memory);
  return 0;
}

int32_t StreamCreate(int32_t, int32_t, void** stream) {
  *stream = new FakeStream;
  return 0;
}

int32_t StreamDestroy(void* stream) {
  delete static_cast<FakeStream*>(stream);
  return 0;
}

int32_t Done(void*, int32_t* done) {
  *done = 1;
  return 0;
}

int32_t Synchronize(void*) {
  return 0;
}

int32_t EventCreate(int32_t, int32_t, void** event) {
  *event = new FakeEvent;
  return 0;
}

int32_t EventDestroy(void* event) {
  delete static_cast<FakeEvent*>(event);
  return 0;
}

int32_t EventRecord(void* event, void*) {
  static_cast<FakeEvent*>(event)->recorded = true;
  return 0;
}

int32_t EventElapsed(void* begin, void* end, float* milliseconds) {
  *milliseconds = 1.5f;
  return static_cast<FakeEvent*>(begin)->recorded && static_cast<FakeEvent*>(end)->recorded
             ? 0
             : kInvalidValue;
}

int32_t StreamWait(void*, void* event) {
  return static_cast<FakeEvent*>(event)->recorded ? 0 : kInvalidValue;
}

int32_t Copy(void*, void* to, const void* from, uint64_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}

int32_t Fill(void*, void* to, int32_t byte, uint64_t bytes) {
  std::memset(to, byte, bytes);
  return 0;
}

int32_t HostWork(void*, const RavelCudaHostWork* work) {
  work->run(work->argument);
  return 0;
}

int32_t Launch(void* stream, const RavelCudaLaunch* launch) {
  ++static_cast<FakeStream*>(stream)->launches;
  return launch->kernel >= 0 && launch->kernel < kKernelIds ? 0 : kInvalidValue;
}

int32_t HasKernel(int32_t kernel, uint64_t) {
  return kernel >= 0 && kernel < kKernelIds ? 1 : 0;
}

int32_t CaptureBegin(void*) {
  return 0;
}

int32_t CaptureEnd(void*, void** graph) {
  *graph = nullptr;
  return 0;
}

int32_t GraphLaunch(void*, void*) {
  return 0;
}

int32_t GraphDestroy(void*) {
  return 0;
}

int32_t GemmVersion(uint64_t* version) {
  *version = 130100;
  return 0;
}

// Three algorithms; a "gemm" writes the number of its algorithm.
int32_t GemmCandidates(int32_t,
                       const RavelCudaGemm*,
                       uint64_t,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit,
                       int32_t* count) {
  *count = limit < 3 ? limit : 3;
  for (int32_t i = 0; i < *count; ++i) {
    algorithms[i] = {};
    algorithms[i].words[0] = static_cast<uint64_t>(i + 1);
  }
  return 0;
}

int32_t GemmRun(void*,
                const RavelCudaGemm*,
                const RavelCudaAlgorithm* algorithm,
                const RavelCudaGemmBuffers* buffers) {
  *static_cast<float*>(buffers->c) = static_cast<float>(algorithm->words[0]);
  return 0;
}

// An engine for heads of whole vectors, which needs the accumulator of dq and marks its result.
int32_t AttentionVersion(uint64_t* version) {
  *version = 91900;
  return 0;
}

struct FakePlan {
  RavelCudaAttention attention;
};

int32_t AttentionPlan(void*, const RavelCudaAttention* attention, RavelCudaAttentionPlan* plan) {
  if (attention->head_size % 8 != 0) {
    return kInvalidValue;
  }
  const int64_t elements = attention->sequences * attention->query_heads *
                           attention->sequence_tokens * attention->head_size;
  const uint64_t bytes = attention->backward != 0 ? static_cast<uint64_t>(elements) * 4 : 0;
  *plan = {.plan = new FakePlan{*attention}, .workspace_bytes = bytes, .unified = 0, .engine = 8};
  return 0;
}

int32_t AttentionPlanDestroy(void* plan) {
  delete static_cast<FakePlan*>(plan);
  return 0;
}

// Adds to the first statistic of each of its heads and sequences: who was computed, how often.
int32_t AttentionRun(void*, void* plan, const RavelCudaAttentionBuffers* buffers) {
  const RavelCudaAttention& a = static_cast<FakePlan*>(plan)->attention;
  for (int64_t head = 0; head < a.query_heads; ++head) {
    for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
      buffers->log_sum_exp[(sequence * a.query_heads + head) * a.sequence_tokens] += 1.0f;
    }
  }
  return 0;
}

void RangePush(const char*) {}
void RangePop() {}

int32_t DriverFunction(const char*, int32_t, void** function) {
  *function = nullptr;
  return kInvalidValue;
}

constexpr RavelCudaFunctions kFunctions = {.versions = Versions,
                                           .device_count = DeviceCount,
                                           .device = Device,
                                           .self_test = SelfTest,
                                           .error_text = ErrorText,
                                           .use_device = UseDevice,
                                           .memory_info = MemoryInfo,
                                           .device_allocate = Allocate,
                                           .device_free = Free,
                                           .pinned_allocate = Allocate,
                                           .pinned_free = Free,
                                           .stream_create = StreamCreate,
                                           .stream_destroy = StreamDestroy,
                                           .stream_done = Done,
                                           .stream_synchronize = Synchronize,
                                           .event_create = EventCreate,
                                           .event_destroy = EventDestroy,
                                           .event_record = EventRecord,
                                           .event_done = Done,
                                           .event_synchronize = Synchronize,
                                           .event_elapsed = EventElapsed,
                                           .stream_wait = StreamWait,
                                           .copy = Copy,
                                           .fill = Fill,
                                           .host_work = HostWork,
                                           .launch = Launch,
                                           .has_kernel = HasKernel,
                                           .capture_begin = CaptureBegin,
                                           .capture_end = CaptureEnd,
                                           .graph_launch = GraphLaunch,
                                           .graph_destroy = GraphDestroy,
                                           .gemm_version = GemmVersion,
                                           .gemm_candidates = GemmCandidates,
                                           .gemm_run = GemmRun,
                                           .attention_version = AttentionVersion,
                                           .attention_plan = AttentionPlan,
                                           .attention_plan_destroy = AttentionPlanDestroy,
                                           .attention_run = AttentionRun,
                                           .range_push = RangePush,
                                           .range_pop = RangePop,
                                           .driver_function = DriverFunction,
                                           .nccl_version = nullptr,
                                           .nccl_unique_id = nullptr,
                                           .nccl_init = nullptr,
                                           .nccl_split = nullptr,
                                           .nccl_state = nullptr,
                                           .nccl_finalize = nullptr,
                                           .nccl_destroy = nullptr,
                                           .nccl_abort = nullptr,
                                           .nccl_forget = nullptr,
                                           .nccl_group_begin = nullptr,
                                           .nccl_group_end = nullptr,
                                           .nccl_all_gather = nullptr,
                                           .nccl_send = nullptr,
                                           .nccl_receive = nullptr};

}  // namespace

extern "C" int32_t ravel_cuda_abi_version() {
  return kCudaAbiVersion + RAVEL_FAKE_ABI_VERSION_OFFSET;
}
extern "C" const RavelCudaFunctions* ravel_cuda_functions() {
  return &kFunctions;
}

}  // namespace ravel::kernels::cuda
