// CudaStream turns every request (launch, copy, fill, gemm, attention, event) into a plain struct
// of bytes, and Perform issues it through libravel_cuda.so. That indirection is what makes CUDA
// graphs possible: a CudaCallLog can keep the calls of a step, compare a later step with them byte
// by byte, and issue them during a capture (cuda_calls.h). The structs have no padding, or equal
// calls could differ. Issued work that fails ends the process (CudaGpu::Fail): the device's context
// is lost with it.

#include "kernels/cuda_host/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/status.h"
#include "kernels/cuda_host/nccl_group.h"

namespace ravel::kernels {

using cuda::AttentionChoice;
using cuda::RavelCudaAlgorithm;
using cuda::RavelCudaAttention;
using cuda::RavelCudaAttentionBuffers;
using cuda::RavelCudaAttentionPlan;
using cuda::RavelCudaGemm;
using cuda::RavelCudaGemmBuffers;

absl::StatusOr<std::unique_ptr<CudaGpu>> CudaGpu::Open(const CudaLibrary& library, int index) {
  ASSIGN_OR_RETURN(const std::vector<CudaDevice> devices, library.Devices());
  if (index < 0 || static_cast<size_t>(index) >= devices.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("CUDA: device ", index, " of ", devices.size(), " does not exist"));
  }
  RETURN_IF_ERROR(library.SelfTest(index));
  RETURN_IF_ERROR(library.ToStatus(library.functions().use_device(index),
                                   absl::StrCat("preparing device ", index)));
  const CudaDevice& properties = devices[static_cast<size_t>(index)];
  std::unique_ptr<CudaGpu> gpu(new CudaGpu(library, index, properties));
  uint64_t version = 0;
  const absl::Status cublas =
      library.ToStatus(library.functions().gemm_version(&version), "cuBLASLt");
  gpu->no_cublas_ = std::string(cublas.message());
  gpu->cublas_version_ = cublas.ok() ? version : 0;
  if (!cublas.ok()) {
    log::Warning(absl::StrCat("gemms: our own kernel, because ", cublas.message()));
  }
  uint64_t cudnn_version = 0;
  gpu->no_cudnn_ = std::string(
      library.ToStatus(library.functions().attention_version(&cudnn_version), "cuDNN").message());
  std::string name = properties.name;
  std::replace(name.begin(), name.end(), ' ', '_');
  gpu->algorithms_ = std::make_unique<cuda::GemmAlgorithms>(absl::StrCat(name,
                                                                         " ",
                                                                         properties.compute_major,
                                                                         ".",
                                                                         properties.compute_minor,
                                                                         " ",
                                                                         properties.multiprocessors,
                                                                         " cublasLt ",
                                                                         version));
  return gpu;
}

CudaGpu::CudaGpu(const CudaLibrary& library, int index, CudaDevice properties)
    : library_(library),
      index_(index),
      properties_(std::move(properties)),
      memory_count_(std::make_unique<CudaMemoryCount>()) {}

void CudaGpu::Fail(const absl::Status& status) const {
  if (on_failure_ != nullptr) {
    on_failure_(status);
  }
  CheckFailed(__FILE__, __LINE__, "the device works", std::string(status.message()).c_str());
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaGpu::MakeStream(Priority priority, void* scratch) {
  CHECK_MSG(scratch != nullptr, "a stream needs scratch memory");
  ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> stream, MakeCopyStream(priority));
  stream->scratch_ = scratch;
  return stream;
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaGpu::MakeCopyStream(Priority priority) {
  ASSIGN_OR_RETURN(CudaMemory word, AllocatePinned(sizeof(uint64_t)));
  void* handle = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().stream_create(index_, priority == Priority::kHigh ? 1 : 0, &handle),
      absl::StrCat("making a stream of device ", index_)));
  return std::unique_ptr<CudaStream>(new CudaStream(*this, handle, nullptr, std::move(word)));
}

absl::StatusOr<CudaEvent> CudaGpu::MakeEvent(Timing timing) const {
  void* handle = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().event_create(index_, timing == Timing::kOn ? 1 : 0, &handle),
      absl::StrCat("making an event of device ", index_)));
  return CudaEvent(library_, handle);
}

CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(handle_, other.handle_);
  return *this;
}

CudaEvent::~CudaEvent() {
  if (handle_ != nullptr) {
    library_->functions().event_destroy(handle_);
  }
}

absl::StatusOr<bool> CudaEvent::Done() const {
  int32_t done = 0;
  RETURN_IF_ERROR(
      library_->ToStatus(library_->functions().event_done(handle_, &done), "asking an event"));
  return done != 0;
}

absl::Status CudaEvent::Synchronize() const {
  return library_->ToStatus(library_->functions().event_synchronize(handle_),
                            "waiting for an event");
}

absl::StatusOr<float> CudaEvent::MillisecondsSince(const CudaEvent& begin) const {
  float milliseconds = 0.0f;
  RETURN_IF_ERROR(
      library_->ToStatus(library_->functions().event_elapsed(begin.handle_, handle_, &milliseconds),
                         "time between events"));
  return milliseconds;
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : gpu_(other.gpu_), handle_(std::exchange(other.handle_, nullptr)) {}

CudaGraph::~CudaGraph() {
  if (handle_ != nullptr) {
    gpu_->library().functions().graph_destroy(handle_);
  }
}

CudaStream::~CudaStream() {
  attention_.Clear();
  functions().stream_destroy(handle_);
}

void CudaStream::Require(int32_t error, const std::string& what) const {
  if (error != 0) {
    gpu_.Fail(gpu_.library().ToStatus(error, absl::StrCat(what, " on device ", gpu_.index())));
  }
}

// -- calls that a log may keep

namespace {

struct LaunchCall {
  int32_t kernel;
  uint32_t grid[3];
  uint32_t block;
  uint32_t shared_bytes;
};
struct CopyCall {
  void* to;
  const void* from;
  uint64_t bytes;
};
struct FillCall {
  void* to;
  uint64_t bytes;
  uint64_t byte;
};
// Ranges of pinned memory follow.
struct HostCall {
  void (*run)(void*);
  void* argument;
};
struct GemmCall {
  RavelCudaGemm gemm;
  RavelCudaAlgorithm algorithm;
  RavelCudaGemmBuffers buffers;
};
struct AttentionCall {
  void* plan;
  RavelCudaAttentionBuffers buffers;
};
struct EventCall {
  void* event;
};
// Calls are compared byte by byte.
static_assert(std::has_unique_object_representations_v<LaunchCall> &&
              std::has_unique_object_representations_v<CopyCall> &&
              std::has_unique_object_representations_v<FillCall> &&
              std::has_unique_object_representations_v<HostCall> &&
              std::has_unique_object_representations_v<cuda::RavelCudaHostAccess> &&
              std::has_unique_object_representations_v<GemmCall> &&
              std::has_unique_object_representations_v<AttentionCall>);

template <typename Arguments>
Arguments ArgumentsOf(std::span<const std::byte> bytes) {
  Arguments arguments;
  CHECK(bytes.size() >= sizeof(arguments));
  std::memcpy(&arguments, bytes.data(), sizeof(arguments));
  return arguments;
}

}  // namespace

template <typename Arguments>
void CudaStream::Submit(CudaCall::Kind kind,
                        const Arguments& arguments,
                        const std::string& what,
                        std::span<const std::byte> tail) {
  if (rehearsed_ != nullptr) {
    return;
  }
  const auto* begin = reinterpret_cast<const std::byte*>(&arguments);
  submitted_.assign(begin, begin + sizeof(arguments));
  submitted_.insert(submitted_.end(), tail.begin(), tail.end());
  if (log_ == nullptr || log_->Takes({.kind = kind, .stream = this, .arguments = submitted_})) {
    Require(Perform(kind, submitted_), what);
  }
}

absl::Status CudaStream::Do(const CudaCall& call) const {
  if (call.kind == CudaCall::Kind::kGather || call.kind == CudaCall::Kind::kExchange) {
    return NcclGroup::Of(call).Do(call);
  }
  return gpu_.library().ToStatus(Perform(call.kind, call.arguments), NameOf(call));
}

int32_t CudaStream::Perform(CudaCall::Kind kind, std::span<const std::byte> arguments) const {
  switch (kind) {
    case CudaCall::Kind::kLaunch: {
      const auto call = ArgumentsOf<LaunchCall>(arguments);
      const cuda::RavelCudaLaunch launch = {.kernel = call.kernel,
                                            .grid = {call.grid[0], call.grid[1], call.grid[2]},
                                            .block = call.block,
                                            .shared_bytes = call.shared_bytes,
                                            .params = arguments.data() + sizeof(call),
                                            .param_bytes = arguments.size() - sizeof(call)};
      return functions().launch(handle_, &launch);
    }
    case CudaCall::Kind::kCopy: {
      const auto call = ArgumentsOf<CopyCall>(arguments);
      return functions().copy(handle_, call.to, call.from, call.bytes);
    }
    case CudaCall::Kind::kFill: {
      const auto call = ArgumentsOf<FillCall>(arguments);
      return functions().fill(handle_, call.to, static_cast<int32_t>(call.byte), call.bytes);
    }
    case CudaCall::Kind::kHostWork: {
      const auto call = ArgumentsOf<HostCall>(arguments);
      std::vector<cuda::RavelCudaHostAccess> accesses((arguments.size() - sizeof(call)) /
                                                      sizeof(cuda::RavelCudaHostAccess));
      std::memcpy(
          accesses.data(), arguments.data() + sizeof(call), arguments.size() - sizeof(call));
      const cuda::RavelCudaHostWork work = {.run = call.run,
                                            .argument = call.argument,
                                            .accesses = accesses.data(),
                                            .access_count = static_cast<int32_t>(accesses.size()),
                                            .reserved = 0};
      return functions().host_work(handle_, &work);
    }
    case CudaCall::Kind::kGemm: {
      const auto call = ArgumentsOf<GemmCall>(arguments);
      return functions().gemm_run(handle_, &call.gemm, &call.algorithm, &call.buffers);
    }
    case CudaCall::Kind::kAttention: {
      const auto call = ArgumentsOf<AttentionCall>(arguments);
      return functions().attention_run(handle_, call.plan, &call.buffers);
    }
    case CudaCall::Kind::kRecord:
      return functions().event_record(ArgumentsOf<EventCall>(arguments).event, handle_);
    case CudaCall::Kind::kWait:
      return functions().stream_wait(handle_, ArgumentsOf<EventCall>(arguments).event);
    case CudaCall::Kind::kGather:
    case CudaCall::Kind::kExchange:
      break;  // not of a stream
  }
  CheckFailed(__FILE__, __LINE__, "call", "of an unknown kind");
}

void CudaStream::Record(CudaEvent& event) {
  Submit(CudaCall::Kind::kRecord, EventCall{event.handle_}, "recording an event");
}

void CudaStream::Wait(const CudaEvent& event) {
  Submit(CudaCall::Kind::kWait, EventCall{event.handle_}, "waiting for an event");
}

absl::StatusOr<bool> CudaStream::Done() const {
  int32_t done = 0;
  RETURN_IF_ERROR(gpu_.library().ToStatus(functions().stream_done(handle_, &done),
                                          absl::StrCat("device ", gpu_.index())));
  return done != 0;
}

absl::Status CudaStream::Synchronize() const {
  if (log_ != nullptr) {
    log_->Refuse("a wait of the host for a stream");
  }
  return gpu_.library().ToStatus(functions().stream_synchronize(handle_),
                                 absl::StrCat("device ", gpu_.index()));
}

void CudaStream::BeginCapture() {
  Require(functions().capture_begin(handle_), "beginning a capture");
  capturing_ = true;
}

absl::StatusOr<CudaGraph> CudaStream::EndCapture() {
  capturing_ = false;
  void* graph = nullptr;
  RETURN_IF_ERROR(
      gpu_.library().ToStatus(functions().capture_end(handle_, &graph), "ending a capture"));
  return CudaGraph(gpu_, graph);
}

void CudaStream::Launch(const CudaGraph& graph) {
  if (log_ != nullptr) {
    log_->Refuse("a graph");
  }
  Require(functions().graph_launch(graph.handle_, handle_), "launching a graph");
}

void CudaStream::RunKernel(const cuda::LaunchShape& shape,
                           const void* params,
                           uint64_t param_bytes) {
  const LaunchCall launch = {.kernel = cuda::KernelId(shape.kernel, shape.variant),
                             .grid = {shape.grid[0], shape.grid[1], shape.grid[2]},
                             .block = shape.block,
                             .shared_bytes = shape.shared_bytes};
  Submit(CudaCall::Kind::kLaunch,
         launch,
         absl::StrCat("kernel ", launch.kernel),
         {static_cast<const std::byte*>(params), param_bytes});
}

void CudaStream::CopyMemory(void* to, const void* from, int64_t bytes) {
  Submit(CudaCall::Kind::kCopy, CopyCall{to, from, static_cast<uint64_t>(bytes)}, "copying");
}

void CudaStream::FillZero(void* to, int64_t bytes) {
  FillBytes(to, 0, bytes);
}

void CudaStream::FillBytes(void* to, uint8_t byte, int64_t bytes) {
  Submit(CudaCall::Kind::kFill, FillCall{to, static_cast<uint64_t>(bytes), byte}, "filling");
}

void CudaStream::RunOnHost(void (*run)(void*),
                           void* argument,
                           std::span<const cuda::RavelCudaHostAccess> accesses) {
  Submit(CudaCall::Kind::kHostWork,
         HostCall{run, argument},
         "work of the host",
         std::as_bytes(accesses));
}

void* CudaStream::Scratch(int64_t bytes) {
  CHECK_MSG(bytes >= 0 && bytes <= cuda::kScratchBytes, "an op needs more scratch than there is");
  CHECK_MSG(scratch_ != nullptr, "an op needs scratch on a stream for copies");
  return scratch_;
}

uint64_t CudaStream::ReadWord(const void* device_word) {
  CHECK_MSG(rehearsed_ == nullptr, "a rehearsal reads nothing from the device");
  CopyMemory(word_.data(), device_word, sizeof(uint64_t));
  if (const absl::Status done = Synchronize(); !done.ok()) {
    gpu_.Fail(done);
  }
  uint64_t word = 0;
  std::memcpy(&word, word_.data(), sizeof(word));
  return word;
}

void CudaStream::SubmitGemm(const GemmRequest& request,
                            const RavelCudaAlgorithm& algorithm,
                            const std::string& key) {
  Submit(CudaCall::Kind::kGemm, GemmCall{request.gemm, algorithm, BuffersOf(request)}, key);
}

void CudaStream::UseAttention(const AttentionOptions& options) {
  CHECK_MSG(!capturing_, "choices of attention are made before a capture");
  attention_.Clear();
  attention_options_ = options;
}

void* CudaStream::AttentionWorkspace() const {
  void* given = attention_options_.workspace;
  CHECK_MSG(given != nullptr || scratch_ != nullptr, "attention on a stream for copies");
  return given != nullptr ? given : scratch_;
}

uint64_t CudaStream::AttentionWorkspaceBytes() const {
  return static_cast<uint64_t>(attention_options_.workspace != nullptr
                                   ? attention_options_.workspace_bytes
                                   : cuda::kScratchBytes);
}

const AttentionChoice& CudaStream::ChooseAttention(const RavelCudaAttention& attention,
                                                   uint64_t workspace_bytes) {
  const AttentionChoice* known = attention_.Find(attention);
  if (known != nullptr) {
    return *known;
  }
  const std::string& no_cudnn = gpu_.no_cudnn();
  CHECK_MSG(!capturing_ || !no_cudnn.empty(), "attention is prepared before a capture");
  const auto build = [&](const RavelCudaAttention& part) -> absl::StatusOr<RavelCudaAttentionPlan> {
    if (!no_cudnn.empty()) {
      return absl::UnavailableError(no_cudnn);
    }
    RavelCudaAttentionPlan plan = {};
    RETURN_IF_ERROR(
        gpu_.library().ToStatus(functions().attention_plan(handle_, &part, &plan), "attention"));
    return plan;
  };
  const AttentionChoice& choice =
      attention_.Choose(attention, std::max(workspace_bytes, AttentionWorkspaceBytes()), build);
  const std::string text =
      absl::StrCat("attention ", cuda::AttentionKey(attention), ": ", choice.text);
  log::Write(choice.plan != nullptr ? log::Level::kInfo : log::Level::kWarning, text);
  return choice;
}

int64_t CudaStream::PrepareAttention(const RavelCudaAttention& attention,
                                     uint64_t workspace_bytes) {
  RavelCudaAttention asked = attention;
  asked.deterministic = attention_options_.deterministic ? 1 : 0;
  return static_cast<int64_t>(ChooseAttention(asked, workspace_bytes).whole_workspace_bytes);
}

bool CudaStream::RunAttention(const RavelCudaAttention& attention,
                              const RavelCudaAttentionBuffers& buffers) {
  if (rehearsed_ != nullptr) {
    return true;
  }
  RavelCudaAttention asked = attention;
  asked.deterministic = attention_options_.deterministic ? 1 : 0;
  const AttentionChoice& choice = ChooseAttention(asked, buffers.workspace_bytes);
  if (choice.plan == nullptr) {
    return false;
  }
  for (int64_t sequence = 0; sequence < asked.sequences; sequence += choice.part.sequences) {
    for (int64_t head = 0; head < asked.kv_heads; head += choice.part.kv_heads) {
      RavelCudaAttentionBuffers part = cuda::PartOf(asked, buffers, sequence, head);
      if (buffers.workspace_bytes < AttentionWorkspaceBytes()) {
        part.workspace = AttentionWorkspace();
        part.workspace_bytes = AttentionWorkspaceBytes();
      }
      CHECK_MSG(choice.workspace_bytes <= part.workspace_bytes,
                "attention was prepared with more workspace");
      Submit(
          CudaCall::Kind::kAttention, AttentionCall{choice.plan, part}, cuda::AttentionKey(asked));
    }
  }
  return true;
}

}  // namespace ravel::kernels
