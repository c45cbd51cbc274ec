#pragma once

// The part of libnccl.so.2 that is used, declared here because NCCL's header is not installed
// everywhere that this compiles. Where it is, nccl_api_check.cc compares the two.

#include <climits>
#include <cstddef>
#include <cstdint>

namespace ravel::kernels::cuda {

// ncclResult_t
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclUnhandledCudaError = 1;
inline constexpr int kNcclSystemError = 2;
inline constexpr int kNcclInternalError = 3;
inline constexpr int kNcclInvalidArgument = 4;
inline constexpr int kNcclInvalidUsage = 5;
inline constexpr int kNcclRemoteError = 6;
inline constexpr int kNcclInProgress = 7;
// ncclDataType_t
inline constexpr int kNcclUint8 = 1;

inline constexpr size_t kNcclIdBytes = 128;
struct NcclId {
  char bytes[kNcclIdBytes];
};

// ncclConfig_t as of 2.27; later versions only append, and take shorter ones by their `size`.
inline constexpr unsigned kNcclConfigMagic = 0xcafebeef;
inline constexpr unsigned kNcclConfigVersion = 22700;
inline constexpr int kNcclUndefined = INT_MIN;
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = kNcclConfigMagic;
  unsigned version = kNcclConfigVersion;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
  int traffic_class = kNcclUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kNcclUndefined;
  int cta_policy = kNcclUndefined;
  int shrink_share = kNcclUndefined;
  int nvls_ctas = kNcclUndefined;
};

// Communicators and streams are opaque; results are ncclResult_t.
struct NcclFunctions {
  int (*version)(int* version) = nullptr;
  const char* (*error_text)(int result) = nullptr;
  const char* (*last_error)(void* comm) = nullptr;
  int (*unique_id)(NcclId* id) = nullptr;
  int (*init)(void** comm, int ranks, NcclId id, int rank, NcclConfig* config) = nullptr;
  int (*split)(void* comm, int color, int key, void** part, NcclConfig* config) = nullptr;
  int (*async_error)(void* comm, int* result) = nullptr;
  int (*finalize)(void* comm) = nullptr;
  int (*destroy)(void* comm) = nullptr;
  int (*abort)(void* comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_gather)(
      const void* send, void* receive, size_t count, int type, void* comm, void* stream) = nullptr;
  int (*send)(const void* data, size_t count, int type, int peer, void* comm, void* stream) =
      nullptr;
  int (*receive)(void* data, size_t count, int type, int peer, void* comm, void* stream) = nullptr;
};

}  // namespace ravel::kernels::cuda
