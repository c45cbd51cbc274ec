#pragma once

// A CUDA device through libravel_cuda.so: memory, streams, events. What can fail because of the
// world (opening, allocating, waiting for results) returns a status; an error of work that is
// issued ends the process, which is one trainer. No default stream, and nothing waits but what says
// so.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "common/mutex.h"
#include "kernels/cuda_host/attention_plans.h"
#include "kernels/cuda_host/cuda_calls.h"
#include "kernels/cuda_host/cuda_library.h"
#include "kernels/cuda_host/gemm_algorithms.h"
#include "kernels/cuda_host/launch_stream.h"

namespace ravel::kernels {

class CudaMemory;
class CudaMemoryCount;
class CudaEvent;
class CudaGraph;
class CudaStream;

// One device of this process. Outlives what it makes. Thread-compatible.
class CudaGpu {
 public:
  // Makes the device current, loads the kernels and runs the self-test, so that a device this build
  // has no code for is refused by name.
  static absl::StatusOr<std::unique_ptr<CudaGpu>> Open(const CudaLibrary& library, int index);
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  int index() const { return index_; }
  const CudaDevice& properties() const { return properties_; }
  // Bytes that are free now, as the driver has it: it gives memory in blocks, and takes some
  // itself.
  absl::StatusOr<int64_t> FreeBytes() const;
  // Device memory that AllocateDevice has given: now, and at most so far. Thread-safe.
  struct MemoryUse {
    int64_t bytes = 0;
    int64_t allocations = 0;
    int64_t most_bytes = 0;
    int64_t pinned_bytes = 0;  // that AllocatePinned has given, now
    // Times that device or pinned memory was given or taken back: each may wait for all work of the
    // device, and for peers with it.
    int64_t changes = 0;
  };
  MemoryUse memory_use() const;
  // From here on `most_bytes` is that of later.
  void ForgetMostBytes();

  // An error of issued work ends the process: by `end`, which does not return, or else by a CHECK.
  void set_on_failure(std::function<void(const absl::Status&)> end) {
    on_failure_ = std::move(end);
  }
  [[noreturn]] void Fail(const absl::Status& status) const;

  // The device's arena of a plan: one allocation, 256-byte aligned. ResourceExhausted with what is
  // free where that is not enough.
  absl::StatusOr<CudaMemory> AllocateDevice(int64_t bytes) const;
  // Host memory that copies reach without a detour.
  absl::StatusOr<CudaMemory> AllocatePinned(int64_t bytes) const;

  enum class Priority { kNormal, kHigh };
  // `scratch` is device memory of kScratchBytes that the stream alone uses; it outlives the stream.
  absl::StatusOr<std::unique_ptr<CudaStream>> MakeStream(Priority priority, void* scratch);
  // For copies and collectives alone: an op that needs scratch is a bug there.
  absl::StatusOr<std::unique_ptr<CudaStream>> MakeCopyStream(Priority priority);
  enum class Timing { kOff, kOn };
  absl::StatusOr<CudaEvent> MakeEvent(Timing timing = Timing::kOff) const;

  // Algorithms of gemms, shared by the device's streams; identity as GemmAlgorithms wants it.
  cuda::GemmAlgorithms& algorithms() { return *algorithms_; }
  // Why gemms run on our own kernel; empty where cuBLASLt was found.
  const std::string& no_cublas() const { return no_cublas_; }
  uint64_t cublas_version() const { return cublas_version_; }  // 130100 for 13.1; 0: none
  // Why attention does; empty where cuDNN was found.
  const std::string& no_cudnn() const { return no_cudnn_; }

  const CudaLibrary& library() const { return library_; }

 private:
  CudaGpu(const CudaLibrary& library, int index, CudaDevice properties);
  std::string FreeText() const;

  CudaLibrary library_;
  int index_;
  CudaDevice properties_;
  std::unique_ptr<cuda::GemmAlgorithms> algorithms_;
  std::string no_cublas_;
  uint64_t cublas_version_ = 0;
  std::string no_cudnn_;
  std::unique_ptr<CudaMemoryCount> memory_count_;
  std::function<void(const absl::Status&)> on_failure_;
};

// Thread-safe.
class CudaMemoryCount {
 public:
  enum class Kind { kDevice, kPinned };
  void Add(Kind kind, int64_t bytes);
  void Remove(Kind kind, int64_t bytes);
  CudaGpu::MemoryUse use() const;
  void ForgetMost();

 private:
  mutable Mutex mutex_;
  CudaGpu::MemoryUse use_ ABSL_GUARDED_BY(mutex_);
};

// Device or pinned memory. Moves, never copies; goes on any thread.
class CudaMemory {
 public:
  CudaMemory() = default;
  CudaMemory(CudaMemory&& other) noexcept { *this = std::move(other); }
  CudaMemory& operator=(CudaMemory&& other) noexcept;
  ~CudaMemory() { Free(); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class CudaGpu;
  using FreeFunction = int32_t (*)(int32_t device, void* data);
  struct Owner {
    int32_t device = 0;
    FreeFunction free = nullptr;
    CudaMemoryCount* count = nullptr;  // of the device
    CudaMemoryCount::Kind kind = CudaMemoryCount::Kind::kDevice;
  };
  CudaMemory(void* data, int64_t bytes, Owner owner) : data_(data), bytes_(bytes), owner_(owner) {}
  void Free();

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Owner owner_;
};

// A point in a stream's work. Recorded again and again; a wait is for the last recording.
class CudaEvent {
 public:
  CudaEvent() = default;
  CudaEvent(CudaEvent&& other) noexcept { *this = std::move(other); }
  CudaEvent& operator=(CudaEvent&& other) noexcept;
  ~CudaEvent();

  // Returns true if the last recorded work is done; an error of the device is reported here, too.
  absl::StatusOr<bool> Done() const;
  // Blocks the host.
  absl::Status Synchronize() const;
  // Milliseconds from `begin` to this; both were made with timing, and are done.
  absl::StatusOr<float> MillisecondsSince(const CudaEvent& begin) const;

 private:
  friend class CudaGpu;
  friend class CudaStream;
  CudaEvent(const CudaLibrary& library, void* handle)
      : library_(std::make_unique<CudaLibrary>(library)), handle_(handle) {}

  std::unique_ptr<CudaLibrary> library_;
  void* handle_ = nullptr;
};

// Names the work that the host issues in this scope for profilers (NVTX). Costs a call where none
// is attached. The name outlives the scope.
class CudaRange {
 public:
  CudaRange(const CudaGpu& gpu, const std::string& name) : functions_(gpu.library().functions()) {
    functions_.range_push(name.c_str());
  }
  ~CudaRange() { functions_.range_pop(); }
  CudaRange(const CudaRange&) = delete;
  CudaRange& operator=(const CudaRange&) = delete;

 private:
  const cuda::RavelCudaFunctions& functions_;
};

// Recorded work of a stream, launched as one.
class CudaGraph {
 public:
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&&) = delete;
  ~CudaGraph();

 private:
  friend class CudaStream;
  CudaGraph(const CudaGpu& gpu, void* handle) : gpu_(&gpu), handle_(handle) {}
  const CudaGpu* gpu_;
  void* handle_;
};

// An ordered queue of a device. Used only from the thread that issues its work.
class CudaStream final : public cuda::LaunchStream {
 public:
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void Record(CudaEvent& event);
  // Later work of this stream waits, not the host.
  void Wait(const CudaEvent& event);
  absl::StatusOr<bool> Done() const;
  // Blocks the host until all work so far is done.
  absl::Status Synchronize() const;

  // Work between the two calls is recorded, not run. Gemms and attention of its shapes have run
  // before: what libraries load on first use, no capture may wait for.
  void BeginCapture();
  absl::StatusOr<CudaGraph> EndCapture();
  void Launch(const CudaGraph& graph);

  // Told of every call on this stream until it is taken away by nullptr; decides which are done.
  void set_log(CudaCallLog* log) { log_ = log; }
  CudaCallLog* log() const { return log_; }
  // A call that a log has kept, now; nobody is told.
  absl::Status Do(const CudaCall& call) const;
  const CudaGpu& gpu() const { return gpu_; }

  // Every byte of [to, to + bytes) becomes `byte`.
  void FillBytes(void* to, uint8_t byte, int64_t bytes);

  // Calls `run` on a thread of the driver when the stream gets there; later work waits for it. It
  // calls no function of this library and waits for no work of a device. `argument` stays until
  // then. `accesses`: the pinned memory that it reads and writes, for tests of order.
  void RunOnHost(void (*run)(void*),
                 void* argument,
                 std::span<const cuda::RavelCudaHostAccess> accesses);

  // Multiprocessors that gemms may use from here on; 0: all. Part of their keys.
  void UseMultiprocessors(int32_t count) { gemm_multiprocessors_ = count; }

  // The functions below are in cuda_device_gemms.cc; for start-up, never within a capture.

  // Times up to kMaxCandidates algorithms of a gemm on its own operands, which should hold
  // random numbers; `flush` is overwritten before each run, together larger than the cache. The
  // host waits, and an accumulating c ends with one gemm added per run.
  static constexpr int kMaxCandidates = 40;
  struct Measuring {
    std::vector<std::span<std::byte>> flush;
    int32_t most_candidates = kMaxCandidates;
  };
  // Given one, the first gemm of every new key measures, and keeps the best algorithm in the
  // device's table. Taken away by nullptr.
  void MeasureGemms(const Measuring* measuring) { measuring_ = measuring; }

  // A gemm as an op asked for it.
  struct GemmRequest {
    cuda::RavelCudaGemm gemm;
    const void* a;
    const void* b;
    void* c;
    const void* scale_a;
    const void* scale_b;
    const float* factors = nullptr;
    GemmPart part = {};
    // More than one part.
    bool whole() const { return part.present() && (gemm.m > part.rows || gemm.n > part.columns); }
  };
  // Keys of the gemm that the algorithm is chosen for, and of this one with its part.
  static std::string ChoiceKey(const GemmRequest& request);
  static std::string WholeKey(const GemmRequest& request);
  // False where operands have scales for each block: these lie as the whole operand has them.
  static bool CanBeCut(const GemmRequest& request);
  using GemmRequests = std::map<std::string, GemmRequest>;  // by whole key, the first of each
  // From here on nothing that ops ask for reaches the device: their gemms are listed, all else
  // is passed over, until nullptr comes. What an op reads back from the device is a bug there.
  void Rehearse(GemmRequests* requests);
  // The choice for a gemm: the best of those measured, or the library's first proposal where
  // `measuring` is nullptr. Kept in no table.
  cuda::GemmChoice ChooseGemm(const GemmRequest& request, const Measuring* measuring);
  // Runs it by that choice, at once or part by part, and waits; an error where cuBLASLt refuses to.
  enum class GemmForm { kAtOnce, kInParts };
  absl::Status TryGemm(const GemmRequest& request,
                       const cuda::GemmChoice& choice,
                       GemmForm form = GemmForm::kAtOnce);

  // Chooses how attention of bf16 and fp16 runs through cuDNN from here on; choices made so far are
  // forgotten. For start-up. With more workspace, here or with the operands, fewer descriptions run
  // in parts.
  struct AttentionOptions {
    bool deterministic = true;  // equal calls give equal bits
    void* workspace = nullptr;  // used by this stream alone; absent: the stream's scratch
    int64_t workspace_bytes = 0;
  };
  void UseAttention(const AttentionOptions& options);
  // One line for each description so far: what computes it, and why not cuDNN where it does not.
  std::string AttentionReport() const { return attention_.ToText(); }

  int multiprocessors() const override { return gpu_.properties().multiprocessors; }
  void RunKernel(const cuda::LaunchShape& shape, const void* params, uint64_t param_bytes) override;
  void CopyMemory(void* to, const void* from, int64_t bytes) override;
  void FillZero(void* to, int64_t bytes) override;
  bool RunGemm(const cuda::RavelCudaGemm& gemm,
               const cuda::RavelCudaGemmBuffers& operands,
               const GemmPart& part) override;
  bool RunAttention(const cuda::RavelCudaAttention& attention,
                    const cuda::RavelCudaAttentionBuffers& buffers) override;
  int64_t PrepareAttention(const cuda::RavelCudaAttention& attention,
                           uint64_t workspace_bytes) override;
  void* Scratch(int64_t bytes) override;
  uint64_t ReadWord(const void* device_word) override;

 private:
  friend class CudaGpu;
  friend class NcclGroup;
  CudaStream(CudaGpu& gpu, void* handle, void* scratch, CudaMemory word)
      : gpu_(gpu),
        handle_(handle),
        scratch_(scratch),
        word_(std::move(word)),
        attention_(gpu.library().functions().attention_plan_destroy) {}
  const cuda::RavelCudaFunctions& functions() const { return gpu_.library().functions(); }
  // Does the call, or leaves it to a graph. `tail` follows the arguments.
  template <typename Arguments>
  void Submit(CudaCall::Kind kind,
              const Arguments& arguments,
              const std::string& what,
              std::span<const std::byte> tail = {});
  int32_t Perform(CudaCall::Kind kind, std::span<const std::byte> arguments) const;
  // Ends the process where `error` is none of success.
  void Require(int32_t error, const std::string& what) const;
  cuda::RavelCudaGemmBuffers BuffersOf(const GemmRequest& request) const;
  void SubmitGemm(const GemmRequest& request,
                  const cuda::RavelCudaAlgorithm& algorithm,
                  const std::string& key);
  // An error where cuBLASLt proposed the algorithm and refuses to run it. One that is clearly
  // slower than `best` is not timed to the end.
  absl::StatusOr<double> MeasureMicroseconds(const GemmRequest& request,
                                             const cuda::RavelCudaAlgorithm& algorithm,
                                             const Measuring& measuring,
                                             double best);

  // The stream's own workspace, or the one that UseAttention gave it.
  void* AttentionWorkspace() const;
  uint64_t AttentionWorkspaceBytes() const;
  const cuda::AttentionChoice& ChooseAttention(const cuda::RavelCudaAttention& attention,
                                               uint64_t workspace_bytes);

  CudaGpu& gpu_;
  void* handle_;
  void* scratch_;
  CudaMemory word_;                       // pinned, for ReadWord
  int32_t gemm_multiprocessors_ = 0;      // of cuda::RavelCudaGemm
  const Measuring* measuring_ = nullptr;  // measuring is on where present
  GemmRequests* rehearsed_ = nullptr;     // a rehearsal is on where present
  bool capturing_ = false;
  CudaCallLog* log_ = nullptr;
  std::vector<std::byte> submitted_;  // arguments of the call that is made
  AttentionOptions attention_options_;
  cuda::AttentionPlans attention_;
};

}  // namespace ravel::kernels
