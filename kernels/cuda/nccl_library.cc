// Opens libnccl.so.2 and adapts its functions to the C interface of libravel_cuda.so. Communicators
// are non-blocking: every call may return "in progress", and State is polled until it is settled. A
// split is delicate: NCCL writes the child's handle from its own thread when the split completes,
// so the child reads it atomically and polls the parent until then. The text of the last error is
// kept per thread, for NcclErrorText.

#include "kernels/cuda/nccl_library.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <dlfcn.h>

namespace ravel::kernels::cuda {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
constexpr char kToolkitFolder[] = "/usr/local/cuda/lib64/";

// NCCL writes the handle of a split when that is through, from a thread of its own.
struct NcclHandle {
  int32_t device = 0;
  void* comm = nullptr;
  NcclHandle* parent = nullptr;  // of a split that may not be through

  void* Comm() { return std::atomic_ref(comm).load(); }
};

std::string& LastText() {
  thread_local std::string text;
  return text;
}

int32_t FailWith(std::string text) {
  LastText() = std::move(text);
  return kNcclOtherError;
}

template <typename Function>
void Find(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr && missing.empty()) {
    missing = std::string("NCCL: ") + kSoname + " has no " + name;
  }
}

void FindAll(void* handle, NcclFunctions& f, std::string& missing) {
  Find(handle, "ncclGetVersion", f.version, missing);
  Find(handle, "ncclGetErrorString", f.error_text, missing);
  Find(handle, "ncclGetLastError", f.last_error, missing);
  Find(handle, "ncclGetUniqueId", f.unique_id, missing);
  Find(handle, "ncclCommInitRankConfig", f.init, missing);
  Find(handle, "ncclCommSplit", f.split, missing);
  Find(handle, "ncclCommGetAsyncError", f.async_error, missing);
  Find(handle, "ncclCommFinalize", f.finalize, missing);
  Find(handle, "ncclCommDestroy", f.destroy, missing);
  Find(handle, "ncclCommAbort", f.abort, missing);
  Find(handle, "ncclGroupStart", f.group_start, missing);
  Find(handle, "ncclGroupEnd", f.group_end, missing);
  Find(handle, "ncclAllGather", f.all_gather, missing);
  Find(handle, "ncclSend", f.send, missing);
  Find(handle, "ncclRecv", f.receive, missing);
}

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// Returns the names that are opened in turn when none is chosen; LD_LIBRARY_PATH is part of the
// loader's search.
std::vector<std::string> Places(const std::string& chosen) {
  if (!chosen.empty()) {
    return {chosen};
  }
  std::vector<std::string> places = {kSoname};
  const char* toolkit = std::getenv("CUDA_HOME");
  if (toolkit != nullptr && *toolkit != '\0') {
    places.push_back(std::string(toolkit) + "/lib64/" + kSoname);
  }
  places.push_back(std::string(kToolkitFolder) + kSoname);
  return places;
}

const NcclLibrary& TheLibrary() {
  static const NcclLibrary library = [] {
    const char* chosen = std::getenv(kNcclLibrarySetting);
    return OpenNccl(chosen == nullptr ? "" : chosen);
  }();
  return library;
}

NcclHost& TheHost() {
  static NcclHost host = {};
  return host;
}

// 0, or kNcclErrors plus the result, with the library's own words kept for NcclErrorText. Under way
// is no error.
int32_t ErrorOf(int result, void* comm) {
  if (result == kNcclSuccess || result == kNcclInProgress) {
    return 0;
  }
  const NcclFunctions& f = TheLibrary().functions;
  const char* last = f.last_error(comm);
  LastText() = std::string("NCCL: ") + f.error_text(result);
  if (last != nullptr && *last != '\0') {
    LastText() += std::string(": ") + last;
  }
  return kNcclErrors + result;
}

// Before every call that starts something on a device.
int32_t Prepare(int32_t device) {
  if (!TheLibrary().missing.empty()) {
    return FailWith(TheLibrary().missing);
  }
  return TheHost().use_device(device);
}

NcclConfig MakeConfig(const RavelNcclOptions& options) {
  NcclConfig config;
  config.blocking = 0;
  if (options.max_ctas > 0) {
    config.max_ctas = options.max_ctas;
  }
  config.comm_name = options.name;
  return config;
}

// -- the functions of the table

int32_t Version(int32_t* version) {
  if (!TheLibrary().missing.empty()) {
    return FailWith(TheLibrary().missing);
  }
  *version = TheLibrary().version;
  return 0;
}

int32_t UniqueId(int32_t device, void* id) {
  const int32_t error = Prepare(device);
  if (error != 0) {
    return error;
  }
  NcclId made;
  const int32_t failure = ErrorOf(TheLibrary().functions.unique_id(&made), nullptr);
  std::memcpy(id, made.bytes, sizeof(made.bytes));
  return failure;
}

int32_t Init(int32_t device, const void* id, const RavelNcclOptions* options, void** comm) {
  const int32_t error = Prepare(device);
  if (error != 0) {
    return error;
  }
  auto handle = std::make_unique<NcclHandle>();
  handle->device = device;
  NcclId the_id;
  std::memcpy(the_id.bytes, id, sizeof(the_id.bytes));
  NcclConfig config = MakeConfig(*options);
  const int32_t failure = ErrorOf(
      TheLibrary().functions.init(&handle->comm, options->ranks, the_id, options->rank, &config),
      nullptr);
  if (failure == 0) {
    *comm = handle.release();
  }
  return failure;
}

int32_t Split(void* comm, int32_t color, const RavelNcclOptions* options, void** part) {
  auto* parent = static_cast<NcclHandle*>(comm);
  const int32_t error = Prepare(parent->device);
  if (error != 0) {
    return error;
  }
  auto handle = std::make_unique<NcclHandle>();
  handle->device = parent->device;
  handle->parent = parent;
  NcclConfig config = MakeConfig(*options);
  void* of = parent->Comm();
  const int32_t failure =
      ErrorOf(TheLibrary().functions.split(of, color, options->rank, &handle->comm, &config), of);
  if (failure == 0) {
    *part = handle.release();
  }
  return failure;
}

int32_t StateOf(void* comm, int32_t* under_way) {
  int result = kNcclSuccess;
  const int32_t error = ErrorOf(TheLibrary().functions.async_error(comm, &result), comm);
  *under_way = result == kNcclInProgress ? 1 : 0;
  return error != 0 ? error : ErrorOf(result, comm);
}

int32_t State(void* comm, int32_t* under_way) {
  auto* handle = static_cast<NcclHandle*>(comm);
  void* own = handle->Comm();
  if (own != nullptr) {
    return StateOf(own, under_way);
  }
  const int32_t error = StateOf(handle->parent->Comm(), under_way);
  own = handle->Comm();  // written before the parent's state changes
  if (error != 0 || *under_way != 0) {
    return error;
  }
  return own != nullptr ? StateOf(own, under_way) : FailWith("NCCL: a split gave no communicator");
}

int32_t Finalize(void* comm) {
  auto* handle = static_cast<NcclHandle*>(comm);
  const int32_t error = Prepare(handle->device);
  void* own = handle->Comm();
  return error != 0 ? error : ErrorOf(TheLibrary().functions.finalize(own), own);
}

int32_t End(void* comm, int (*how)(void*)) {
  auto* handle = static_cast<NcclHandle*>(comm);
  int32_t error = Prepare(handle->device);
  void* own = std::atomic_ref(handle->comm).exchange(nullptr);
  if (error == 0 && own != nullptr) {
    error = ErrorOf(how(own), nullptr);
  }
  return error;
}

int32_t Destroy(void* comm) {
  return End(comm, TheLibrary().functions.destroy);
}

int32_t Abort(void* comm) {
  return End(comm, TheLibrary().functions.abort);
}

int32_t Forget(void* comm) {
  const int32_t error =
      Abort(comm);  // of a split that came after its handle's abort, or of nothing
  delete static_cast<NcclHandle*>(comm);
  return error;
}

int32_t GroupBegin() {
  if (!TheLibrary().missing.empty()) {
    return FailWith(TheLibrary().missing);
  }
  return ErrorOf(TheLibrary().functions.group_start(), nullptr);
}

int32_t GroupEnd() {
  return ErrorOf(TheLibrary().functions.group_end(), nullptr);
}

int32_t AllGather(void* comm, void* stream, const void* send, void* receive, uint64_t bytes) {
  auto* handle = static_cast<NcclHandle*>(comm);
  const int32_t error = Prepare(handle->device);
  void* own = handle->Comm();
  return error != 0
             ? error
             : ErrorOf(TheLibrary().functions.all_gather(
                           send, receive, bytes, kNcclUint8, own, TheHost().stream_of(stream)),
                       own);
}

int32_t Send(void* comm, void* stream, const void* data, uint64_t bytes, int32_t peer) {
  auto* handle = static_cast<NcclHandle*>(comm);
  const int32_t error = Prepare(handle->device);
  void* own = handle->Comm();
  return error != 0 ? error
                    : ErrorOf(TheLibrary().functions.send(
                                  data, bytes, kNcclUint8, peer, own, TheHost().stream_of(stream)),
                              own);
}

int32_t Receive(void* comm, void* stream, void* data, uint64_t bytes, int32_t peer) {
  auto* handle = static_cast<NcclHandle*>(comm);
  const int32_t error = Prepare(handle->device);
  void* own = handle->Comm();
  return error != 0 ? error
                    : ErrorOf(TheLibrary().functions.receive(
                                  data, bytes, kNcclUint8, peer, own, TheHost().stream_of(stream)),
                              own);
}

}  // namespace

std::string NcclVersionFault(int version) {
  if (version < kOldestNccl) {
    return "version " + VersionText(version) + ", needed is " + VersionText(kOldestNccl) +
           " or later";
  }
  if (version >= 30000) {
    return "version " + VersionText(version) + ", needed is NCCL 2";
  }
  if (version >= 22803 && version <= 22808) {
    return "version " + VersionText(version) + ", of which 2.28.3 to 2.28.8 are refused";
  }
  return "";
}

NcclLibrary OpenNccl(const std::string& chosen) {
  NcclLibrary library;
  library.missing = std::string("NCCL not found (") + kNcclLibrarySetting + " can name it); tried";
  for (const std::string& place : Places(chosen)) {
    void* handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      library.missing += " " + place + " (" + (why != nullptr ? why : "no reason given") + ")";
      continue;
    }
    library.missing.clear();
    FindAll(handle, library.functions, library.missing);
    if (!library.missing.empty()) {
      return library;
    }
    if (library.functions.version(&library.version) != kNcclSuccess) {
      library.missing = "NCCL: " + place + " does not tell its version";
    } else if (const std::string fault = NcclVersionFault(library.version); !fault.empty()) {
      library.missing = "NCCL: " + place + " has " + fault;
    }
    return library;
  }
  return library;
}

void AddNcclFunctions(const NcclHost& host, RavelCudaFunctions& functions) {
  TheHost() = host;
  functions.nccl_version = Version;
  functions.nccl_unique_id = UniqueId;
  functions.nccl_init = Init;
  functions.nccl_split = Split;
  functions.nccl_state = State;
  functions.nccl_finalize = Finalize;
  functions.nccl_destroy = Destroy;
  functions.nccl_abort = Abort;
  functions.nccl_forget = Forget;
  functions.nccl_group_begin = GroupBegin;
  functions.nccl_group_end = GroupEnd;
  functions.nccl_all_gather = AllGather;
  functions.nccl_send = Send;
  functions.nccl_receive = Receive;
}

const char* NcclErrorText(int32_t) {
  return LastText().c_str();
}

}  // namespace ravel::kernels::cuda
