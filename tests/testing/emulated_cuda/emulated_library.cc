// The two symbols of libravel_cuda.so, over emulated devices. README.md lists the environment
// variables, which are read once.

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include <absl/base/thread_annotations.h>

#include "common/check.h"
#include "common/mutex.h"
#include "tests/testing/emulated_cuda/emulated_attention.h"
#include "tests/testing/emulated_cuda/emulated_errors.h"
#include "tests/testing/emulated_cuda/emulated_gemm.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"
#include "tests/testing/emulated_cuda/emulated_memory.h"
#include "tests/testing/emulated_cuda/emulated_stream.h"
#include "tests/testing/emulated_cuda/nccl_host.h"

namespace ravel::kernels::cuda::emulated {
namespace {

uint64_t NumberOf(const char* variable, uint64_t otherwise) {
  const char* value = std::getenv(variable);
  if (value == nullptr) {
    return otherwise;
  }
  const std::string_view text = value;
  uint64_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
    CheckFailed(__FILE__, __LINE__, "the variable is a number", variable);
  }
  return number;
}

EmulatedStreams::Pace PaceOf() {
  const uint64_t kernels = NumberOf("RAVEL_EMULATED_PACE_MICROSECONDS", 0);
  return {
      .kernels = std::chrono::microseconds(kernels),
      .copies = std::chrono::microseconds(NumberOf("RAVEL_EMULATED_COPY_MICROSECONDS", kernels))};
}

constexpr uint64_t kDefaultMemoryBytes = uint64_t{8} << 30;
constexpr int32_t kCacheBytes = 64 << 10;

struct Emulation {
  const int32_t devices = static_cast<int32_t>(NumberOf("RAVEL_EMULATED_DEVICES", 1));
  const uint64_t memory_bytes = NumberOf("RAVEL_EMULATED_MEMORY_BYTES", kDefaultMemoryBytes);
  const bool has_cublas_lt = NumberOf("RAVEL_EMULATED_CUBLASLT", 1) != 0;
  const bool has_cudnn = NumberOf("RAVEL_EMULATED_CUDNN", 1) != 0;
  Mutex plans_mutex;
  std::map<void*, std::unique_ptr<RavelCudaAttention>> plans ABSL_GUARDED_BY(plans_mutex);
  EmulatedMemory memory;
  EmulatedStreams streams{memory, NumberOf("RAVEL_EMULATED_DELAY_SEED", 0), PaceOf()};
};

// Never destroyed: streams that a program leaves behind may still run when it ends.
Emulation& The() {
  static Emulation& emulation = *new Emulation;
  return emulation;
}

bool IsDevice(int32_t index) {
  return index >= 0 && index < The().devices;
}

int32_t Versions(int32_t* driver, int32_t* runtime) {
  *driver = 13000;
  *runtime = 13000;
  return 0;
}

int32_t DeviceCount(int32_t* count) {
  *count = The().devices;
  return 0;
}

// The compute capability, times 10.
int32_t Compute() {
  constexpr uint64_t kHopper = 90;
  return static_cast<int32_t>(NumberOf("RAVEL_EMULATED_COMPUTE", kHopper));
}

int32_t Device(int32_t index, RavelCudaDevice* device) {
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  *device = {};
  const bool mixed = NumberOf("RAVEL_EMULATED_MIXED", 0) != 0;
  std::snprintf(device->name, sizeof(device->name), "Emulated device %d", mixed ? index : 0);
  device->memory_bytes = The().memory_bytes;
  device->compute_major = Compute() / 10;
  device->compute_minor = Compute() % 10;
  device->multiprocessors = 132;
  device->cache_bytes = kCacheBytes;
  return 0;
}

int32_t SelfTest(int32_t index) {
  return IsDevice(index) ? 0 : kInvalidDevice;
}

int32_t UseDevice(int32_t index) {
  return IsDevice(index) ? 0 : kInvalidDevice;
}

int32_t MemoryInfo(int32_t index, uint64_t* free_bytes, uint64_t* total_bytes) {
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  *total_bytes = The().memory_bytes;
  *free_bytes = The().memory_bytes - The().memory.BytesInUse(index);
  return 0;
}

int32_t Allocate(MemoryKind kind, int32_t index, uint64_t bytes, uint64_t limit, void** memory) {
  *memory = nullptr;
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  const int32_t error = The().streams.RefuseInCapture();
  if (error != 0 || bytes == 0) {
    return error;
  }
  if (const std::string work = The().streams.WaitsForPeers(); !work.empty()) {
    return Fail("memory is allocated, which may wait for the device, while it waits for peers: " +
                work);
  }
  *memory = The().memory.Allocate(kind, index, bytes, limit);
  return *memory == nullptr ? kOutOfMemory : 0;
}

// As the runtime: work of the device, which may use the memory, is waited for. Another device than
// that of the memory would be given a context by the runtime.
int32_t Free(MemoryKind kind, int32_t index, void* memory) {
  if (memory == nullptr) {
    return 0;
  }
  if (The().memory.DeviceOf(memory) != index) {
    return kInvalidValue;
  }
  if (const std::string work = The().streams.WaitsForPeers(); !work.empty()) {
    CheckFailed(__FILE__,
                __LINE__,
                "memory is freed, which waits for the device, when peers are waited for no more",
                work.c_str());
  }
  const int32_t error = The().streams.SynchronizeDevice(The().memory.DeviceOf(memory));
  if (error != 0) {
    return error;
  }
  return The().memory.Free(kind, memory) ? 0 : kInvalidValue;
}

int32_t DeviceAllocate(int32_t index, uint64_t bytes, void** memory) {
  return Allocate(MemoryKind::kDevice, index, bytes, The().memory_bytes, memory);
}

int32_t DeviceFree(int32_t index, void* memory) {
  return Free(MemoryKind::kDevice, index, memory);
}

int32_t PinnedAllocate(int32_t index, uint64_t bytes, void** memory) {
  constexpr uint64_t kMostPinned = uint64_t{1} << 40;
  return Allocate(MemoryKind::kPinned, index, bytes, kMostPinned, memory);
}

int32_t PinnedFree(int32_t index, void* memory) {
  return Free(MemoryKind::kPinned, index, memory);
}

int32_t StreamCreate(int32_t index, int32_t, void** stream) {
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  *stream = The().streams.CreateStream(index);
  return 0;
}

int32_t StreamDestroy(void* stream) {
  return The().streams.DestroyStream(stream);
}

int32_t StreamDone(void* stream, int32_t* done) {
  return The().streams.StreamDone(stream, done);
}

int32_t StreamSynchronize(void* stream) {
  return The().streams.Synchronize(stream);
}

int32_t EventCreate(int32_t index, int32_t timed, void** event) {
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  *event = The().streams.CreateEvent(timed != 0);
  return 0;
}

int32_t EventDestroy(void* event) {
  return The().streams.DestroyEvent(event);
}

int32_t EventRecord(void* event, void* stream) {
  return The().streams.Record(event, stream);
}

int32_t EventDone(void* event, int32_t* done) {
  return The().streams.EventDone(event, done);
}

int32_t EventSynchronize(void* event) {
  return The().streams.EventSynchronize(event);
}

int32_t EventElapsed(void* begin, void* end, float* milliseconds) {
  return The().streams.Elapsed(begin, end, milliseconds);
}

int32_t StreamWait(void* stream, void* event) {
  return The().streams.Wait(stream, event);
}

// The device of a copy's other side does not matter: copies reach any device. As in CUDA, a copy
// of no bytes may name no memory.
int32_t Copy(void* stream, void* to, const void* from, uint64_t bytes) {
  const int64_t count = static_cast<int64_t>(bytes);
  EmulatedWork work = {
      .name = "copy",
      .accesses = {{.name = "from", .data = from, .row_bytes = count, .stride_bytes = count},
                   {.name = "to",
                    .kind = Access::Kind::kWrite,
                    .data = to,
                    .row_bytes = count,
                    .stride_bytes = count}},
      .run =
          [=] {
            if (bytes != 0)
              std::memmove(to, from, bytes);
          },
      .any_device = true,
      .of_copies = true};
  return The().streams.Issue(stream, std::move(work));
}

int32_t HostWork(void* stream, const RavelCudaHostWork* work) {
  EmulatedWork issued = {.name = "work of the host",
                         .accesses = {},
                         .run = [run = work->run, argument = work->argument] { run(argument); },
                         .of_copies = true};
  for (int32_t i = 0; i < work->access_count; ++i) {
    const RavelCudaHostAccess& access = work->accesses[i];
    const auto bytes = static_cast<int64_t>(access.bytes);
    issued.accesses.push_back(
        {.name = "pinned memory",
         .kind = access.writes != 0 ? Access::Kind::kUpdate : Access::Kind::kRead,
         .data = access.data,
         .row_bytes = bytes,
         .stride_bytes = bytes});
  }
  return The().streams.Issue(stream, std::move(issued));
}

int32_t Fill(void* stream, void* to, int32_t byte, uint64_t bytes) {
  const int64_t count = static_cast<int64_t>(bytes);
  EmulatedWork work = {.name = "fill",
                       .accesses = {{.name = "to",
                                     .kind = Access::Kind::kWrite,
                                     .data = to,
                                     .row_bytes = count,
                                     .stride_bytes = count}},
                       .run = [=] {
                         if (bytes != 0)
                           std::memset(to, byte, bytes);
                       }};
  return The().streams.Issue(stream, std::move(work));
}

int32_t Issue(void* stream, PlannedLaunch planned) {
  return planned.problem.empty() ? The().streams.Issue(stream, std::move(planned.work))
                                 : Fail(planned.problem);
}

int32_t Launch(void* stream, const RavelCudaLaunch* launch) {
  return Issue(stream, PlanLaunch(*launch));
}

int32_t HasKernelOf(int32_t kernel, uint64_t param_bytes) {
  return HasKernel(kernel, param_bytes) ? 1 : 0;
}

int32_t CaptureBegin(void* stream) {
  return The().streams.BeginCapture(stream);
}

int32_t CaptureEnd(void* stream, void** graph) {
  return The().streams.EndCapture(stream, graph);
}

int32_t GraphLaunch(void* graph, void* stream) {
  return The().streams.LaunchGraph(graph, stream);
}

int32_t GraphDestroy(void* graph) {
  return The().streams.DestroyGraph(graph);
}

int32_t RequireCublasLt() {
  return The().has_cublas_lt ? 0 : Fail("libcublasLt is hidden: RAVEL_EMULATED_CUBLASLT is 0");
}

int32_t GemmVersion(uint64_t* version) {
  *version = 130100;
  return RequireCublasLt();
}

int32_t GemmCandidates(int32_t index,
                       const RavelCudaGemm* gemm,
                       uint64_t workspace_bytes,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit,
                       int32_t* count) {
  *count = 0;
  const int32_t error = RequireCublasLt();
  if (error != 0) {
    return error;
  }
  if (!IsDevice(index)) {
    return kInvalidDevice;
  }
  if (GemmIsOffered(*gemm, Compute() / 10)) {
    *count = GemmAlgorithms(*gemm, workspace_bytes, algorithms, limit);
  }
  return 0;
}

int32_t GemmRun(void* stream,
                const RavelCudaGemm* gemm,
                const RavelCudaAlgorithm* algorithm,
                const RavelCudaGemmBuffers* buffers) {
  const int32_t error = RequireCublasLt();
  return error != 0 ? error
                    : Issue(stream, PlanCublasGemm(*gemm, *algorithm, *buffers, Compute() / 10));
}

int32_t AttentionVersion(uint64_t* version) {
  *version = 91900;
  return The().has_cudnn ? 0 : Fail("libcudnn is hidden: RAVEL_EMULATED_CUDNN is 0");
}

int32_t AttentionPlan(void* stream,
                      const RavelCudaAttention* attention,
                      RavelCudaAttentionPlan* plan) {
  const int32_t error = AttentionVersion(&plan->workspace_bytes);
  if (error != 0 || The().streams.DeviceOf(stream) < 0) {
    return error != 0 ? error : kInvalidHandle;
  }
  const std::string problem = AttentionProblem(*attention);
  if (!problem.empty()) {
    return Fail(problem);
  }
  auto made = std::make_unique<RavelCudaAttention>(*attention);
  *plan = {.plan = made.get(),
           .workspace_bytes = AttentionWorkspaceBytes(*attention),
           .unified = 0,
           .engine = 0};
  const MutexLock lock(The().plans_mutex);
  The().plans[plan->plan] = std::move(made);
  return 0;
}

int32_t AttentionPlanDestroy(void* plan) {
  const MutexLock lock(The().plans_mutex);
  return The().plans.erase(plan) == 1 ? 0 : kInvalidHandle;
}

int32_t AttentionRun(void* stream, void* plan, const RavelCudaAttentionBuffers* buffers) {
  RavelCudaAttention attention = {};
  {
    const MutexLock lock(The().plans_mutex);
    const auto found = The().plans.find(plan);
    if (found == The().plans.end()) {
      return kInvalidHandle;
    }
    attention = *found->second;
  }
  return Issue(stream, PlanAttention(attention, *buffers));
}

// Of one test at a time: names as they are pushed, two spaces deeper for each that is open.
std::atomic<std::string*> recorded_ranges = nullptr;
thread_local size_t open_ranges = 0;

void RangePush(const char* name) {
  if (std::string* ranges = recorded_ranges.load(); ranges != nullptr) {
    *ranges += std::string(2 * open_ranges, ' ') + name + "\n";
  }
  ++open_ranges;
}
void RangePop() {
  --open_ranges;
}

int32_t DriverFunction(const char* name, int32_t, void** function) {
  *function = nullptr;
  return Fail(std::string("the driver has no function ") + name);
}

// Functions that are not named here are null: not offered.
RavelCudaFunctions MakeFunctions() {
  RavelCudaFunctions functions = {};
  functions.versions = Versions;
  functions.device_count = DeviceCount;
  functions.device = Device;
  functions.self_test = SelfTest;
  functions.error_text = ErrorText;
  functions.use_device = UseDevice;
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
  functions.launch = Launch;
  functions.has_kernel = HasKernelOf;
  functions.capture_begin = CaptureBegin;
  functions.capture_end = CaptureEnd;
  functions.graph_launch = GraphLaunch;
  functions.graph_destroy = GraphDestroy;
  functions.gemm_version = GemmVersion;
  functions.gemm_candidates = GemmCandidates;
  functions.gemm_run = GemmRun;
  functions.attention_version = AttentionVersion;
  functions.attention_plan = AttentionPlan;
  functions.attention_plan_destroy = AttentionPlanDestroy;
  functions.attention_run = AttentionRun;
  functions.range_push = RangePush;
  functions.range_pop = RangePop;
  functions.driver_function = DriverFunction;
  AddEmulatedNccl(The().streams, UseDevice, functions);
  return functions;
}

}  // namespace
}  // namespace ravel::kernels::cuda::emulated

namespace ravel::kernels::cuda {

extern "C" __attribute__((visibility("default"))) int32_t ravel_cuda_abi_version() {
  return kCudaAbiVersion;
}

extern "C" __attribute__((visibility("default"))) void ravel_emulated_ranges(std::string* ranges) {
  emulated::recorded_ranges = ranges;
}

extern "C" __attribute__((visibility("default"))) const RavelCudaFunctions* ravel_cuda_functions() {
  static const RavelCudaFunctions functions = emulated::MakeFunctions();
  return &functions;
}

}  // namespace ravel::kernels::cuda
