#include "kernels/cuda_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/status.h"

namespace ravel::kernels {

using cuda::GemmChoice;
using cuda::RavelCudaAlgorithm;
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

absl::StatusOr<int64_t> CudaGpu::FreeBytes() const {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().memory_info(index_, &free_bytes, &total_bytes), "free memory"));
  return static_cast<int64_t>(free_bytes);
}

absl::StatusOr<CudaMemory> CudaGpu::AllocateDevice(int64_t bytes) const {
  CHECK_GE(bytes, 0);
  void* data = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().device_allocate(index_, static_cast<uint64_t>(bytes), &data),
      absl::StrCat("allocating ", bytes, " bytes on device ", index_)));
  return CudaMemory(data, bytes, library_.functions().device_free);
}

absl::StatusOr<CudaMemory> CudaGpu::AllocatePinned(int64_t bytes) const {
  CHECK_GE(bytes, 0);
  void* data = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().pinned_allocate(index_, static_cast<uint64_t>(bytes), &data),
      absl::StrCat("allocating ", bytes, " bytes of pinned host memory")));
  return CudaMemory(data, bytes, library_.functions().pinned_free);
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaGpu::MakeStream(Priority priority, void* scratch) {
  CHECK_MSG(scratch != nullptr, "a stream needs scratch memory");
  ASSIGN_OR_RETURN(CudaMemory word, AllocatePinned(sizeof(uint64_t)));
  void* handle = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().stream_create(index_, priority == Priority::kHigh ? 1 : 0, &handle),
      absl::StrCat("making a stream of device ", index_)));
  return std::unique_ptr<CudaStream>(new CudaStream(*this, handle, scratch, std::move(word)));
}

absl::StatusOr<CudaEvent> CudaGpu::MakeEvent(Timing timing) const {
  void* handle = nullptr;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().event_create(index_, timing == Timing::kOn ? 1 : 0, &handle),
      absl::StrCat("making an event of device ", index_)));
  return CudaEvent(library_, handle);
}

CudaMemory& CudaMemory::operator=(CudaMemory&& other) noexcept {
  if (this != &other) {
    Free();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    free_ = other.free_;
  }
  return *this;
}

void CudaMemory::Free() {
  if (data_ != nullptr) {
    free_(data_);  // fails only where the process is lost already
    data_ = nullptr;
  }
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
  functions().stream_destroy(handle_);
}

void CudaStream::Require(int32_t error, const std::string& what) const {
  if (error != 0) {
    const absl::Status status =
        gpu_.library().ToStatus(error, absl::StrCat(what, " on device ", gpu_.index()));
    CheckFailed(__FILE__, __LINE__, "the device works", std::string(status.message()).c_str());
  }
}

void CudaStream::Record(CudaEvent& event) {
  Require(functions().event_record(event.handle_, handle_), "recording an event");
}

void CudaStream::Wait(const CudaEvent& event) {
  Require(functions().stream_wait(handle_, event.handle_), "waiting for an event");
}

absl::StatusOr<bool> CudaStream::Done() const {
  int32_t done = 0;
  RETURN_IF_ERROR(gpu_.library().ToStatus(functions().stream_done(handle_, &done),
                                          absl::StrCat("device ", gpu_.index())));
  return done != 0;
}

absl::Status CudaStream::Synchronize() const {
  return gpu_.library().ToStatus(functions().stream_synchronize(handle_),
                                 absl::StrCat("device ", gpu_.index()));
}

void CudaStream::BeginCapture() {
  Require(functions().capture_begin(handle_), "beginning a capture");
}

absl::StatusOr<CudaGraph> CudaStream::EndCapture() {
  void* graph = nullptr;
  RETURN_IF_ERROR(
      gpu_.library().ToStatus(functions().capture_end(handle_, &graph), "ending a capture"));
  return CudaGraph(gpu_, graph);
}

void CudaStream::Launch(const CudaGraph& graph) {
  Require(functions().graph_launch(graph.handle_, handle_), "launching a graph");
}

void CudaStream::PushRange(const char* name) {
  functions().range_push(name);
}

void CudaStream::PopRange() {
  functions().range_pop();
}

void CudaStream::RunKernel(const cuda::LaunchShape& shape,
                           const void* params,
                           uint64_t param_bytes) {
  const cuda::RavelCudaLaunch launch = {.kernel = cuda::KernelId(shape.kernel, shape.variant),
                                        .grid = {shape.grid[0], shape.grid[1], shape.grid[2]},
                                        .block = shape.block,
                                        .shared_bytes = shape.shared_bytes,
                                        .params = params,
                                        .param_bytes = param_bytes};
  Require(functions().launch(handle_, &launch), absl::StrCat("kernel ", launch.kernel));
}

void CudaStream::CopyMemory(void* to, const void* from, int64_t bytes) {
  Require(functions().copy(handle_, to, from, static_cast<uint64_t>(bytes)), "copying");
}

void CudaStream::FillZero(void* to, int64_t bytes) {
  Require(functions().fill(handle_, to, 0, static_cast<uint64_t>(bytes)), "filling");
}

void* CudaStream::Scratch(int64_t bytes) {
  CHECK_MSG(bytes >= 0 && bytes <= cuda::kScratchBytes, "an op needs more scratch than there is");
  return scratch_;
}

uint64_t CudaStream::ReadWord(const void* device_word) {
  CopyMemory(word_.data(), device_word, sizeof(uint64_t));
  const absl::Status done = Synchronize();
  CHECK_MSG(done.ok(), std::string(done.message()).c_str());
  uint64_t word = 0;
  std::memcpy(&word, word_.data(), sizeof(word));
  return word;
}

bool CudaStream::RunProduct(const RavelCudaGemm& gemm, const void* a, const void* b, void* c) {
  if (!gpu_.no_cublas().empty()) {
    return false;
  }
  const RavelCudaGemmBuffers buffers = {.a = a,
                                        .b = b,
                                        .c = c,
                                        .workspace = scratch_,
                                        .workspace_bytes = uint64_t{cuda::kScratchBytes}};
  const std::string key = cuda::GemmKey(gemm);
  const std::optional<GemmChoice> known = gpu_.algorithms().Find(key);
  const bool measure = flush_ != nullptr && (!known.has_value() || known->microseconds == 0.0);
  if (known.has_value() && !measure) {
    Require(functions().gemm_run(handle_, &gemm, &known->algorithm, &buffers), key);
    return true;
  }
  const std::optional<GemmChoice> choice = ChooseAlgorithm(gemm, buffers);
  if (!choice.has_value()) {
    return false;
  }
  gpu_.algorithms().Set(key, *choice);
  Require(functions().gemm_run(handle_, &gemm, &choice->algorithm, &buffers), key);
  return true;
}

std::optional<GemmChoice> CudaStream::ChooseAlgorithm(const RavelCudaGemm& gemm,
                                                      const RavelCudaGemmBuffers& buffers) {
  std::array<RavelCudaAlgorithm, kMaxCandidates> candidates;
  int32_t count = 0;
  Require(functions().gemm_candidates(gpu_.index(),
                                      &gemm,
                                      buffers.workspace_bytes,
                                      candidates.data(),
                                      flush_ != nullptr ? kMaxCandidates : 1,
                                      &count),
          cuda::GemmKey(gemm));
  if (count == 0) {
    return std::nullopt;
  }
  if (flush_ == nullptr) {
    return GemmChoice{candidates[0], 0.0};
  }
  GemmChoice best;
  for (int32_t i = 0; i < count; ++i) {
    const RavelCudaAlgorithm& algorithm = candidates[static_cast<size_t>(i)];
    const double microseconds = MeasureMicroseconds(gemm, algorithm, buffers);
    if (best.microseconds == 0.0 || microseconds < best.microseconds) {
      best = {algorithm, microseconds};
    }
  }
  return best;
}

// The median of five runs after one that warms up, each from a cold cache.
double CudaStream::MeasureMicroseconds(const RavelCudaGemm& gemm,
                                       const RavelCudaAlgorithm& algorithm,
                                       const RavelCudaGemmBuffers& buffers) {
  constexpr size_t kRuns = 5;
  absl::StatusOr<CudaEvent> begin = gpu_.MakeEvent(CudaGpu::Timing::kOn);
  absl::StatusOr<CudaEvent> end = gpu_.MakeEvent(CudaGpu::Timing::kOn);
  CHECK_MSG(begin.ok() && end.ok(), "events for measuring");
  std::vector<double> samples;
  for (size_t run = 0; run <= kRuns; ++run) {
    FillZero(flush_->data(), flush_->bytes());
    Record(*begin);
    Require(functions().gemm_run(handle_, &gemm, &algorithm, &buffers), cuda::GemmKey(gemm));
    Record(*end);
    const absl::Status done = end->Synchronize();
    CHECK_MSG(done.ok(), std::string(done.message()).c_str());
    const absl::StatusOr<float> milliseconds = end->MillisecondsSince(*begin);
    CHECK_MSG(milliseconds.ok(), "time between events");
    if (run > 0) {
      samples.push_back(1e3 * static_cast<double>(*milliseconds));
    }
  }
  std::sort(samples.begin(), samples.end());
  return samples[kRuns / 2];
}

}  // namespace ravel::kernels
