#pragma once

// What libnccl_emulated.so shares with the emulated CUDA library and with tests. It exports the
// ncclX functions that nccl_api.h declares, over memory of the host and sockets, between threads
// and between processes. It is as unfriendly as NCCL may be: calls are under way for a while and
// refuse others meanwhile, ranks that disagree or lose a peer hang until they abort, and a handle
// that is gone is refused. A collective that one rank launches as part of a graph and another does
// not is such a disagreement; destroying and aborting wait until graphs of the communicator are
// gone.

#include <cstddef>
#include <cstdint>
#include <functional>

namespace ravel::kernels::cuda::emulated {

struct NcclAccess {
  const void* data;
  size_t bytes;
  bool writes;
};

// A cudaStream_t of the emulation points at one of these, valid during the call.
struct NcclStream {
  void* stream;
  int32_t (*issue)(void* stream,
                   const char* name,
                   const NcclAccess* accesses,
                   size_t count,
                   std::function<std::function<void()>()> prepare);
  bool (*capturing)(void* stream);
  const char* (*error_text)(int32_t error);
};

extern "C" {

// What goes wrong on communicators of this process; each is off where negative.
struct EmulatedNcclFaults {
  int32_t init_hangs_on_rank;   // never comes out of init
  int32_t split_hangs_on_rank;  // of the parent
  int32_t hangs_on_rank;        // every collective from now on
  int32_t error_on_rank;        // the next collective: a system error, and a hang
  int32_t delay_microseconds;   // of each collective, at most; random
};
using EmulatedNcclInjectFunction = void (*)(const EmulatedNcclFaults* faults);

struct EmulatedNcclCounts {
  int32_t inits;
  int32_t splits;
  int32_t aborts;
  int32_t destroys;
  int32_t max_ctas;  // of the last communicator that was made
  int32_t captured;  // collectives
  int32_t replayed;  // of those
};
using EmulatedNcclCountsFunction = void (*)(EmulatedNcclCounts* counts);

}  // extern "C"

inline constexpr char kEmulatedNcclInject[] = "ravel_emulated_nccl_inject";
inline constexpr char kEmulatedNcclCounts[] = "ravel_emulated_nccl_counts";
// Environment: the version that is told, in place of 22809.
inline constexpr char kEmulatedNcclVersion[] = "RAVEL_EMULATED_NCCL_VERSION";

}  // namespace ravel::kernels::cuda::emulated
