// The symbols of libnccl_emulated.so.

#include "tests/testing/emulated_nccl/emulated_nccl.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/cuda/nccl_api.h"
#include "tests/testing/emulated_nccl/emulated_comm.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr int kVersion = 22809;
constexpr char kIdPrefix[] = "emulated:";

// Handles that have been given out and are not gone.
class Handles {
 public:
  void* Add(std::shared_ptr<EmulatedComm> comm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    void* handle = comm.get();
    live_[handle] = std::move(comm);
    return handle;
  }
  std::shared_ptr<EmulatedComm> Find(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }
  std::shared_ptr<EmulatedComm> Take(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(handle);
    if (found == live_.end()) {
      return nullptr;
    }
    std::shared_ptr<EmulatedComm> comm = std::move(found->second);
    live_.erase(found);
    return comm;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<EmulatedComm>> live_;
};

Handles& TheHandles() {
  static Handles& handles = *new Handles;
  return handles;
}

struct Counts {
  std::atomic<int32_t> inits = 0;
  std::atomic<int32_t> splits = 0;
  std::atomic<int32_t> aborts = 0;
  std::atomic<int32_t> destroys = 0;
  std::atomic<int32_t> max_ctas = 0;
};

Counts& TheCounts() {
  static Counts counts;
  return counts;
}

// What a thread has issued since the beginning of its group.
struct Group {
  struct Entry {
    std::shared_ptr<EmulatedComm> comm;
    NcclStream stream;
    NcclCall call;
  };
  int depth = 0;
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<EmulatedComm>> aborted;
};

Group& TheGroup() {
  thread_local Group group;
  return group;
}

NcclCall& EntryOf(const std::shared_ptr<EmulatedComm>& comm, const NcclStream& stream) {
  for (Group::Entry& entry : TheGroup().entries) {
    if (entry.comm == comm && entry.stream.stream == stream.stream) {
      return entry.call;
    }
  }
  TheGroup().entries.push_back({comm, stream, {}});
  return TheGroup().entries.back().call;
}

int EndGroup() {
  std::vector<std::shared_ptr<EmulatedComm>> aborted;
  aborted.swap(TheGroup().aborted);
  for (const std::shared_ptr<EmulatedComm>& comm : aborted) {
    comm->FinishAbort();
  }
  std::vector<Group::Entry> entries;
  entries.swap(TheGroup().entries);
  for (Group::Entry& entry : entries) {
    if (!entry.comm->Issue(entry.stream, std::move(entry.call))) {
      entry.comm->Fail(kNcclInvalidUsage, "a communicator is used while a call is under way");
      return kNcclInvalidUsage;
    }
  }
  return entries.empty() ? kNcclSuccess : kNcclInProgress;
}

// Runs `add` on the call that a collective belongs to.
template <typename Add>
int Collective(void* handle, void* stream, const Add& add) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  if (comm == nullptr) {
    return kNcclInvalidArgument;
  }
  add(EntryOf(comm, *static_cast<const NcclStream*>(stream)));
  return TheGroup().depth > 0 ? kNcclSuccess : EndGroup();
}

int AddMessage(void* handle, void* stream, int peer, void* data, size_t bytes, bool outgoing) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  if (comm == nullptr || peer < 0 || peer >= comm->ranks() || peer == comm->rank()) {
    return kNcclInvalidArgument;
  }
  return Collective(handle, stream, [&](NcclCall& call) {
    call.messages.push_back({peer, static_cast<std::byte*>(data), bytes, outgoing});
  });
}

bool IsConfig(const NcclConfig* config) {
  return config != nullptr && config->magic == kNcclConfigMagic && config->blocking == 0 &&
         config->size <= sizeof(NcclConfig);
}

}  // namespace
}  // namespace ravel::kernels::cuda::emulated

using namespace ravel::kernels::cuda;            // NOLINT(google-build-using-namespace): C symbols
using namespace ravel::kernels::cuda::emulated;  // NOLINT(google-build-using-namespace): C symbols

extern "C" {

#define EMULATED __attribute__((visibility("default")))

EMULATED int ncclGetVersion(int* version) {
  const char* told = std::getenv(kEmulatedNcclVersion);
  *version = told == nullptr ? kVersion : std::atoi(told);
  return kNcclSuccess;
}

EMULATED const char* ncclGetErrorString(int result) {
  switch (result) {
    case kNcclSuccess:
      return "no error";
    case 1:
      return "unhandled cuda error";
    case 2:
      return "unhandled system error";
    case kNcclInvalidArgument:
      return "invalid argument";
    case kNcclInvalidUsage:
      return "invalid usage";
    case kNcclRemoteError:
      return "remote process exited or there was a network error";
    case kNcclInProgress:
      return "NCCL operation in progress";
    default:
      return "internal error";
  }
}

EMULATED const char* ncclGetLastError(void* handle) {
  thread_local std::string text;
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  text = comm == nullptr ? "" : comm->last_error();
  return text.c_str();
}

EMULATED int ncclGetUniqueId(NcclId* id) {
  *id = {};
  const std::string text = kIdPrefix + StartNcclRoot();
  std::memcpy(id->bytes, text.data(), text.size());
  return kNcclSuccess;
}

EMULATED int ncclCommInitRankConfig(
    void** handle, int ranks, NcclId id, int rank, NcclConfig* config) {
  const std::string text(id.bytes, strnlen(id.bytes, sizeof(id.bytes)));
  if (!IsConfig(config) || !text.starts_with(kIdPrefix) || rank < 0 || rank >= ranks) {
    return kNcclInvalidArgument;
  }
  ++TheCounts().inits;
  TheCounts().max_ctas = config->max_ctas;
  auto comm = std::make_shared<EmulatedComm>(rank, ranks);
  *handle = TheHandles().Add(comm);
  comm->StartInit(text.substr(std::strlen(kIdPrefix)));
  return kNcclInProgress;
}

EMULATED int ncclCommSplit(void* handle, int color, int key, void** part, NcclConfig* config) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  if (comm == nullptr || !IsConfig(config)) {
    return kNcclInvalidArgument;
  }
  if (comm->Look() != kNcclSuccess) {
    return kNcclInvalidUsage;
  }
  ++TheCounts().splits;
  TheCounts().max_ctas = config->max_ctas;
  *part = nullptr;
  comm->StartSplit(color, key, [part](std::shared_ptr<EmulatedComm> made) {
    if (made != nullptr) {
      __atomic_store_n(part, TheHandles().Add(std::move(made)), __ATOMIC_RELEASE);
    }
  });
  return kNcclInProgress;
}

EMULATED int ncclCommGetAsyncError(void* handle, int* result) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  if (comm == nullptr) {
    return kNcclInvalidArgument;
  }
  *result = comm->Look();
  return kNcclSuccess;
}

EMULATED int ncclCommFinalize(void* handle) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Find(handle);
  if (comm == nullptr) {
    return kNcclInvalidArgument;
  }
  comm->Finalize();
  return kNcclInProgress;
}

EMULATED int ncclCommDestroy(void* handle) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Take(handle);
  if (comm == nullptr) {
    return kNcclInvalidArgument;
  }
  ++TheCounts().destroys;
  comm->BeginAbort();
  comm->WaitForGraphs();
  return kNcclSuccess;
}

EMULATED int ncclCommAbort(void* handle) {
  const std::shared_ptr<EmulatedComm> comm = TheHandles().Take(handle);
  if (comm == nullptr) {
    return kNcclInvalidArgument;
  }
  ++TheCounts().aborts;
  comm->BeginAbort();
  TheGroup().aborted.push_back(comm);
  return TheGroup().depth > 0 ? kNcclSuccess : EndGroup();
}

EMULATED int ncclGroupStart() {
  ++TheGroup().depth;
  return kNcclSuccess;
}

EMULATED int ncclGroupEnd() {
  if (TheGroup().depth == 0) {
    return kNcclInvalidUsage;
  }
  return --TheGroup().depth > 0 ? kNcclSuccess : EndGroup();
}

EMULATED int ncclAllGather(
    const void* send, void* receive, size_t count, int, void* handle, void* stream) {
  return Collective(handle, stream, [&](NcclCall& call) {
    call.gathers.push_back(
        {static_cast<const std::byte*>(send), static_cast<std::byte*>(receive), count});
  });
}

EMULATED int ncclSend(const void* data, size_t count, int, int peer, void* handle, void* stream) {
  // One type of message for both directions; this one is only read.
  return AddMessage(handle, stream, peer, const_cast<void*>(data), count, true);
}

EMULATED int ncclRecv(void* data, size_t count, int, int peer, void* handle, void* stream) {
  return AddMessage(handle, stream, peer, data, count, false);
}

EMULATED void ravel_emulated_nccl_inject(const EmulatedNcclFaults* faults) {
  NcclFaultSettings& settings = TheNcclFaults();
  settings.init_hangs_on_rank = faults->init_hangs_on_rank;
  settings.split_hangs_on_rank = faults->split_hangs_on_rank;
  settings.hangs_on_rank = faults->hangs_on_rank;
  settings.error_on_rank = faults->error_on_rank;
  settings.delay_microseconds = faults->delay_microseconds;
}

EMULATED void ravel_emulated_nccl_counts(EmulatedNcclCounts* counts) {
  *counts = {.inits = TheCounts().inits,
             .splits = TheCounts().splits,
             .aborts = TheCounts().aborts,
             .destroys = TheCounts().destroys,
             .max_ctas = TheCounts().max_ctas,
             .captured = TheNcclGraphCounts().captured,
             .replayed = TheNcclGraphCounts().replayed};
}

}  // extern "C"
