// The declarations of nccl_api.h against NCCL's own header, where that is installed. Nothing is
// linked from here.

#include <cstddef>
#include <type_traits>

#include <nccl.h>

#include "kernels/cuda/nccl_api.h"

namespace ravel::kernels::cuda {
namespace {

static_assert(NCCL_MAJOR == 2 && NCCL_VERSION_CODE >= 22700);
static_assert(ncclSuccess == kNcclSuccess && ncclInternalError == kNcclInternalError);
static_assert(ncclUnhandledCudaError == kNcclUnhandledCudaError);
static_assert(ncclSystemError == kNcclSystemError);
static_assert(ncclInvalidArgument == kNcclInvalidArgument);
static_assert(ncclInvalidUsage == kNcclInvalidUsage && ncclRemoteError == kNcclRemoteError);
static_assert(ncclInProgress == kNcclInProgress && ncclUint8 == kNcclUint8);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(sizeof(ncclUniqueId) == sizeof(NcclId) && alignof(ncclUniqueId) == alignof(NcclId));
static_assert(NCCL_CONFIG_UNDEF_INT == kNcclUndefined);

// Ours is the beginning of theirs.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(offsetof(NcclConfig, traffic_class) == offsetof(ncclConfig_t, trafficClass));
static_assert(offsetof(NcclConfig, comm_name) == offsetof(ncclConfig_t, commName));
static_assert(offsetof(NcclConfig, collnet_enable) == offsetof(ncclConfig_t, collnetEnable));
static_assert(offsetof(NcclConfig, cta_policy) == offsetof(ncclConfig_t, CTAPolicy));
static_assert(offsetof(NcclConfig, shrink_share) == offsetof(ncclConfig_t, shrinkShare));
static_assert(offsetof(NcclConfig, nvls_ctas) == offsetof(ncclConfig_t, nvlsCTAs));

// Same arguments in the same order: enums are ints, handles are pointers.
using Comm = ncclComm_t;
using Stream = cudaStream_t;
using Result = ncclResult_t;
using Type = ncclDataType_t;
template <auto function, typename Expected>
constexpr bool kIs = std::is_same_v<decltype(function), Expected>;
static_assert(kIs<&ncclGetVersion, Result (*)(int*)>);
static_assert(kIs<&ncclGetErrorString, const char* (*)(Result)>);
static_assert(kIs<&ncclGetLastError, const char* (*)(Comm)>);
static_assert(kIs<&ncclGetUniqueId, Result (*)(ncclUniqueId*)>);
static_assert(
    kIs<&ncclCommInitRankConfig, Result (*)(Comm*, int, ncclUniqueId, int, ncclConfig_t*)>);
static_assert(kIs<&ncclCommSplit, Result (*)(Comm, int, int, Comm*, ncclConfig_t*)>);
static_assert(kIs<&ncclCommGetAsyncError, Result (*)(Comm, Result*)>);
static_assert(kIs<&ncclCommFinalize, Result (*)(Comm)>);
static_assert(kIs<&ncclCommDestroy, Result (*)(Comm)>);
static_assert(kIs<&ncclCommAbort, Result (*)(Comm)>);
static_assert(kIs<&ncclGroupStart, Result (*)()> && kIs<&ncclGroupEnd, Result (*)()>);
static_assert(kIs<&ncclAllGather, Result (*)(const void*, void*, size_t, Type, Comm, Stream)>);
static_assert(kIs<&ncclSend, Result (*)(const void*, size_t, Type, int, Comm, Stream)>);
static_assert(kIs<&ncclRecv, Result (*)(void*, size_t, Type, int, Comm, Stream)>);

}  // namespace
}  // namespace ravel::kernels::cuda
