#pragma once

// The C interface of libravel_cuda.so, which hosts open at run time
// (kernels/cuda_host/cuda_library.h). Nothing but C types crosses it. Every change of a function,
// of a struct or of kernel_params.h raises the version; a library of another version is refused.

#include <cstdint>

namespace ravel::kernels::cuda {

inline constexpr int32_t kCudaAbiVersion = 19;

// Errors of NCCL: kNcclErrors plus an ncclResult_t, or kNcclOtherError; all below kNcclErrorsEnd.
inline constexpr int32_t kNcclErrors = 15000;
inline constexpr int32_t kNcclInCuda = 15001;
inline constexpr int32_t kNcclOtherError = 15999;
inline constexpr int32_t kNcclErrorsEnd = 16000;

extern "C" {

struct RavelCudaDevice {
  char name[256];  // ends with a zero
  uint64_t memory_bytes;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t cache_bytes;  // of the cache that all multiprocessors share
  char pci[16];         // "0000:17:00.0", ends with a zero; empty: unknown
};

// A range of pinned memory that work of the host reads or writes.
struct RavelCudaHostAccess {
  const void* data;
  uint64_t bytes;
  int32_t writes;
  int32_t reserved;
};

// A function that a thread of the driver calls when the stream gets there; the stream goes on when
// it returns. It calls nothing of this interface, and waits for no work of a device. `accesses`
// are what an emulated device checks; the driver does not look at them.
struct RavelCudaHostWork {
  void (*run)(void* argument);
  void* argument;
  const RavelCudaHostAccess* accesses;  // read during the call only
  int32_t access_count;
  int32_t reserved;
};

struct RavelCudaLaunch {
  int32_t kernel;  // KernelId of kernel_params.h
  uint32_t grid[3];
  uint32_t block;
  uint32_t shared_bytes;
  const void* params;
  uint64_t param_bytes;
};

// c [m, n] (=|+=) op(a) * op(b), row-major, sums in fp32. Types are those of common/dtype.h: fp32,
// bf16 or fp16, one for a and b; or codes (E4M3, E5M2), each with a type of its own, where c (=|+=)
// *scale_a * *scale_b * (op(a) * op(b)), or products are scaled block by block: forms are
// those of common/gemm_scales.h. Codes of two to a byte have the type u8 and the form kBlocks16;
// their strides are in codes, and c = factors[0] * (op(a) * op(b)) + factors[1] * c.
struct RavelCudaGemm {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
  int32_t transpose_a;
  int32_t transpose_b;
  int32_t input_type;
  int32_t output_type;
  int32_t accumulate;
  int32_t a_align;  // bytes that the addresses and strides are multiples of, at most 256
  int32_t b_align;
  int32_t c_align;
  int32_t multiprocessors;    // that the gemm may use; 0: all
  int32_t b_type;             // 0: input_type, which then is that of a and b
  int32_t fast_accumulation;  // of codes: sums may lose low bits
  int32_t a_form;             // of the scales
  int32_t b_form;
  int32_t reserved;
};

// Opaque; valid for one version of cuBLASLt and one description.
struct RavelCudaAlgorithm {
  uint64_t words[8];
  uint64_t workspace_bytes;
};

struct RavelCudaGemmBuffers {
  const void* a;
  const void* b;
  void* c;
  void* workspace;
  uint64_t workspace_bytes;
  const void* scale_a;  // of codes, in memory of the device; else null
  const void* scale_b;
  const float* factors;  // [2], of kBlocks16, in memory of the device; else null
};

// Causal attention of bf16 or fp16 heads through cuDNN; shapes as kernels/attention.h has them.
// Strides are in elements from one token to the next; the heads of a token lie side by side.
// log_sum_exp is fp32 and packed: [sequences][query_heads][sequence_tokens]. Gradients' strides are
// 0 in a forward description.
struct RavelCudaAttention {
  int64_t sequences;
  int64_t sequence_tokens;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_size;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t out_stride;
  int64_t dout_stride;
  int64_t dq_stride;
  int64_t dk_stride;
  int64_t dv_stride;
  float scale;
  int32_t backward;
  int32_t deterministic;
  int32_t type;  // of common/dtype.h
};

struct RavelCudaAttentionPlan {
  void* plan;
  uint64_t workspace_bytes;
  int32_t unified;  // one node, in place of the chain of operations
  int32_t engine;   // cuDNN's index of it
};

// Addresses are multiples of 16 bytes. In backward q to dout are read.
struct RavelCudaAttentionBuffers {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* log_sum_exp;
  const void* dout;
  void* dq;
  void* dk;
  void* dv;
  void* workspace;
  uint64_t workspace_bytes;
};

inline constexpr int32_t kRavelNcclIdBytes = 128;

// Options of a new communicator.
struct RavelNcclOptions {
  int32_t ranks;     // not of a split
  int32_t rank;      // of a split: what orders its ranks
  int32_t max_ctas;  // blocks that a collective may occupy; 0: the library's choice
  int32_t reserved;
  const char* name;  // in the library's messages; nullptr: none
};

// Handles are addresses of the CUDA runtime's objects. Functions return 0, or an error code that
// `error_text` names. Those that take a device, or a handle of one, make it the current one of
// the calling thread first: also what frees and destroys, on whichever thread that is. Nothing runs
// on the default stream, and only `*_wait`s below that say so block the host.
struct RavelCudaFunctions {
  int32_t (*versions)(int32_t* driver,
                      int32_t* runtime);  // 13020 is 13.2; driver 0: none is installed
  int32_t (*device_count)(int32_t* count);
  int32_t (*device)(int32_t index, RavelCudaDevice* device);
  // Runs a small kernel on the device and checks its result: tells whether this build's device code
  // fits the device.
  int32_t (*self_test)(int32_t index);
  const char* (*error_text)(int32_t error);  // until the thread's next call

  int32_t (*use_device)(int32_t index);  // and prepares this build's kernels on it
  int32_t (*memory_info)(int32_t index, uint64_t* free_bytes, uint64_t* total_bytes);
  int32_t (*device_allocate)(int32_t index, uint64_t bytes, void** memory);
  int32_t (*device_free)(int32_t index, void* memory);  // of that device
  int32_t (*pinned_allocate)(int32_t index, uint64_t bytes, void** memory);
  int32_t (*pinned_free)(int32_t index, void* memory);

  int32_t (*stream_create)(int32_t index, int32_t high_priority, void** stream);
  int32_t (*stream_destroy)(void* stream);
  int32_t (*stream_done)(void* stream, int32_t* done);
  int32_t (*stream_synchronize)(void* stream);  // blocks the host
  int32_t (*event_create)(int32_t index, int32_t timed, void** event);
  int32_t (*event_destroy)(void* event);
  int32_t (*event_record)(void* event, void* stream);
  int32_t (*event_done)(void* event, int32_t* done);
  int32_t (*event_synchronize)(void* event);  // blocks the host
  int32_t (*event_elapsed)(void* begin, void* end, float* milliseconds);
  int32_t (*stream_wait)(void* stream, void* event);  // the stream waits, not the host

  // Host memory is pinned, or the copy would block the host.
  int32_t (*copy)(void* stream, void* to, const void* from, uint64_t bytes);
  int32_t (*fill)(void* stream, void* to, int32_t byte, uint64_t bytes);
  int32_t (*host_work)(void* stream, const RavelCudaHostWork* work);
  int32_t (*launch)(void* stream, const RavelCudaLaunch* launch);
  // Returns 1 if the library has the kernel with an argument of this size. Needs no device.
  int32_t (*has_kernel)(int32_t kernel, uint64_t param_bytes);

  // Work issued to the stream between the two calls is recorded, not run.
  int32_t (*capture_begin)(void* stream);
  int32_t (*capture_end)(void* stream, void** graph);
  int32_t (*graph_launch)(void* graph, void* stream);
  int32_t (*graph_destroy)(void* graph);

  // cuBLASLt, opened on first use. `version` is 130100 for 13.1.
  int32_t (*gemm_version)(uint64_t* version);
  int32_t (*gemm_candidates)(int32_t index,
                             const RavelCudaGemm* gemm,
                             uint64_t workspace_bytes,
                             RavelCudaAlgorithm* algorithms,
                             int32_t limit,
                             int32_t* count);
  int32_t (*gemm_run)(void* stream,
                      const RavelCudaGemm* gemm,
                      const RavelCudaAlgorithm* algorithm,
                      const RavelCudaGemmBuffers* buffers);

  // cuDNN, opened on first use. `version` is 91900 for 9.19.
  int32_t (*attention_version)(uint64_t* version);
  // Builds a plan for the stream's device, which may take seconds; an error where no engine takes
  // the description. Plans run on any stream of the device, within captures, too.
  int32_t (*attention_plan)(void* stream,
                            const RavelCudaAttention* attention,
                            RavelCudaAttentionPlan* plan);
  int32_t (*attention_plan_destroy)(void* plan);
  int32_t (*attention_run)(void* stream, void* plan, const RavelCudaAttentionBuffers* buffers);

  // Named ranges for profilers.
  void (*range_push)(const char* name);
  void (*range_pop)();
  // Address of a function of the driver, which is not linked; version as in cuda.h (13000).
  int32_t (*driver_function)(const char* name, int32_t version, void** function);

  // NCCL, opened on first use. Communicators never block: what makes one, splits one, or issues
  // work on one may be under way when it returns, and until nccl_state says that it is not, nothing
  // else is issued on it. One thread at a time per communicator.
  int32_t (*nccl_version)(int32_t* version);           // 22809 is 2.28.9
  int32_t (*nccl_unique_id)(int32_t index, void* id);  // kRavelNcclIdBytes; a secret
  int32_t (*nccl_init)(int32_t index, const void* id, const RavelNcclOptions*, void** comm);
  // Collective over the communicator; ranks of one color (at least 0) become a part, whose parent
  // outlives the making.
  int32_t (*nccl_split)(void* comm, int32_t color, const RavelNcclOptions*, void** part);
  // An error of this communicator, be it of work long issued; or whether something is under way.
  int32_t (*nccl_state)(void* comm, int32_t* under_way);
  int32_t (*nccl_finalize)(void* comm);  // lets go of peers once all work is through
  int32_t (*nccl_destroy)(void* comm);   // after that
  int32_t (*nccl_abort)(void* comm);     // instead of both; ends work that runs or is enqueued
  int32_t (*nccl_forget)(void* comm);    // the handle, after either
  // Calls between the two, on communicators of this thread, become one launch.
  int32_t (*nccl_group_begin)();
  int32_t (*nccl_group_end)();
  int32_t (*nccl_all_gather)(
      void* comm, void* stream, const void* send, void* receive, uint64_t bytes);
  int32_t (*nccl_send)(void* comm, void* stream, const void* data, uint64_t bytes, int32_t peer);
  int32_t (*nccl_receive)(void* comm, void* stream, void* data, uint64_t bytes, int32_t peer);
};

// The two symbols of the library.
using RavelCudaAbiVersionFunction = int32_t (*)();
using RavelCudaFunctionsFunction = const RavelCudaFunctions* (*)();

}  // extern "C"

inline constexpr char kCudaAbiVersionSymbol[] = "ravel_cuda_abi_version";
inline constexpr char kCudaFunctionsSymbol[] = "ravel_cuda_functions";

}  // namespace ravel::kernels::cuda
