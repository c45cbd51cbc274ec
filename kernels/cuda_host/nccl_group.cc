// NcclGroup serialises NCCL calls of one communicator under a mutex and never blocks under it:
// calls return at once and Settled polls. Abort runs ncclCommAbort on a thread of its own, since it
// waits for kernels to leave; several groups are aborted side by side, because one blocked abort
// would keep the others from raising their flags. Collectives pass through the stream's call log
// first, as its other calls do, so that they can become part of a CUDA graph.

#include "kernels/cuda_host/nccl_group.h"

#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/status.h"

namespace ravel::kernels {
namespace {

// NCCL keeps the address of the name for as long as the communicator lives.
cuda::RavelNcclOptions ToOptions(const NcclGroup::Options& options, const std::string& name) {
  return {.ranks = options.ranks,
          .rank = options.rank,
          .max_ctas = options.max_ctas,
          .reserved = 0,
          .name = name.c_str()};
}

}  // namespace

absl::StatusOr<int> NcclVersion(const CudaLibrary& library) {
  if (library.functions().nccl_version == nullptr) {
    return absl::UnavailableError("CUDA: this library knows no NCCL");
  }
  int32_t version = 0;
  RETURN_IF_ERROR(library.ToStatus(library.functions().nccl_version(&version), "opening NCCL"));
  return version;
}

absl::StatusOr<std::string> MakeNcclId(const CudaGpu& gpu) {
  RETURN_IF_ERROR(NcclVersion(gpu.library()).status());
  std::string id(cuda::kRavelNcclIdBytes, '\0');
  RETURN_IF_ERROR(gpu.library().ToStatus(
      gpu.library().functions().nccl_unique_id(gpu.index(), id.data()), "making an id"));
  return id;
}

absl::StatusOr<std::shared_ptr<NcclGroup>> NcclGroup::Begin(const CudaGpu& gpu,
                                                            const std::string& id,
                                                            Options options) {
  CHECK(options.rank >= 0 && options.rank < options.ranks);
  if (id.size() != static_cast<size_t>(cuda::kRavelNcclIdBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("NCCL id of group ",
                                                   options.name,
                                                   ": ",
                                                   id.size(),
                                                   " bytes, expected ",
                                                   cuda::kRavelNcclIdBytes));
  }
  RETURN_IF_ERROR(NcclVersion(gpu.library()).status());
  std::shared_ptr<NcclGroup> group(new NcclGroup(gpu, options.name));
  const cuda::RavelNcclOptions how = ToOptions(options, group->name_);
  MutexLock lock(group->mutex_);
  RETURN_IF_ERROR(group->ToStatus(
      gpu.library().functions().nccl_init(gpu.index(), id.data(), &how, &group->handle_), "init"));
  return group;
}

absl::StatusOr<std::shared_ptr<NcclGroup>> NcclGroup::BeginSplit(int color, Options options) {
  std::shared_ptr<NcclGroup> part(new NcclGroup(gpu_, options.name));
  const cuda::RavelNcclOptions how = ToOptions(options, part->name_);
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  MutexLock part_lock(part->mutex_);
  RETURN_IF_ERROR(ToStatus(
      gpu_.library().functions().nccl_split(handle_, color, &how, &part->handle_), "split"));
  return part;
}

void NcclGroup::End() {
  std::shared_future<void> abort;  // shared with who aborts
  {
    MutexLock lock(mutex_);
    ending_ = true;
    abort = abort_;
  }
  if (abort.valid()) {
    abort.wait();
  }
  MutexLock lock(mutex_);
  if (handle_ == nullptr) {
    return;
  }
  const cuda::RavelCudaFunctions& functions = gpu_.library().functions();
  if (closed_ && !aborted_) {
    functions.nccl_destroy(handle_);  // there is nobody to tell of a failure
  } else if (!aborted_) {
    functions.nccl_abort(handle_);
  }
  functions.nccl_forget(handle_);
  handle_ = nullptr;
  aborted_ = true;
}

absl::Status NcclGroup::ToStatus(int32_t error, const char* what) const {
  return gpu_.library().ToStatus(error, absl::StrCat(what, " of group ", name_));
}

absl::Status NcclGroup::CheckOpen() const {
  CHECK_MSG(!closing_, "a group that is closed is used");
  return aborted_ ? absl::AbortedError(absl::StrCat("group ", name_, " is aborted"))
                  : absl::OkStatus();
}

absl::StatusOr<bool> NcclGroup::Settled() {
  MutexLock lock(mutex_);
  if (aborted_) {
    return absl::AbortedError(absl::StrCat("group ", name_, " is aborted"));
  }
  int32_t under_way = 0;
  RETURN_IF_ERROR(
      ToStatus(gpu_.library().functions().nccl_state(handle_, &under_way), "collectives"));
  closed_ = closing_ && under_way == 0;
  return under_way == 0;
}

namespace {

// Calls are compared byte by byte, and name their group first.
struct GatherCall {
  NcclGroup* group;
  const void* shard;
  void* gathered;
  int64_t bytes;
};
// The messages follow: those that are sent, then those that are received.
struct ExchangeCall {
  NcclGroup* group;
  int64_t sends;
  int64_t receives;
};
static_assert(std::has_unique_object_representations_v<GatherCall> &&
              std::has_unique_object_representations_v<ExchangeCall> &&
              std::has_unique_object_representations_v<NcclGroup::Message>);

template <typename Arguments>
Arguments Take(std::span<const std::byte>& bytes) {
  Arguments arguments;
  CHECK(bytes.size() >= sizeof(arguments));
  std::memcpy(&arguments, bytes.data(), sizeof(arguments));
  bytes = bytes.subspan(sizeof(arguments));
  return arguments;
}

}  // namespace

NcclGroup& NcclGroup::Of(const CudaCall& call) {
  std::span<const std::byte> arguments = call.arguments;
  return *Take<NcclGroup*>(arguments);
}

absl::Status NcclGroup::AllGather(CudaStream& stream,
                                  const void* shard,
                                  void* gathered,
                                  int64_t bytes) {
  const GatherCall call = {this, shard, gathered, bytes};
  return Submit(stream, CudaCall::Kind::kGather, std::as_bytes(std::span(&call, 1)));
}

absl::Status NcclGroup::Exchange(CudaStream& stream,
                                 std::span<const Message> sends,
                                 std::span<const Message> receives) {
  const ExchangeCall call = {
      this, static_cast<int64_t>(sends.size()), static_cast<int64_t>(receives.size())};
  std::vector<std::byte> arguments;
  for (const std::span<const std::byte> part :
       {std::as_bytes(std::span(&call, 1)), std::as_bytes(sends), std::as_bytes(receives)}) {
    arguments.insert(arguments.end(), part.begin(), part.end());
  }
  return Submit(stream, CudaCall::Kind::kExchange, arguments);
}

absl::Status NcclGroup::Submit(CudaStream& stream,
                               CudaCall::Kind kind,
                               std::span<const std::byte> arguments) {
  if (CudaCallLog* log = stream.log(); log != nullptr) {
    if (!log->keeps_collectives()) {
      log->Refuse("a collective of NCCL");
    } else if (!log->Takes({.kind = kind, .stream = &stream, .arguments = arguments})) {
      MutexLock lock(mutex_);
      return CheckOpen();
    }
  }
  return Issue(stream, kind, arguments);
}

absl::Status NcclGroup::Issue(const CudaStream& stream,
                              CudaCall::Kind kind,
                              std::span<const std::byte> arguments) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  if (kind == CudaCall::Kind::kExchange) {
    return IssueExchange(stream, arguments);
  }
  CHECK(kind == CudaCall::Kind::kGather);
  const auto call = Take<GatherCall>(arguments);
  return ToStatus(
      gpu_.library().functions().nccl_all_gather(
          handle_, stream.handle_, call.shard, call.gathered, static_cast<uint64_t>(call.bytes)),
      "all_gather");
}

absl::Status NcclGroup::EndGroup(absl::Status status) const {
  const absl::Status ended = ToStatus(gpu_.library().functions().nccl_group_end(), "exchange");
  return status.ok() ? ended : status;
}

absl::Status NcclGroup::IssueExchange(const CudaStream& stream,
                                      std::span<const std::byte> arguments) {
  const cuda::RavelCudaFunctions& functions = gpu_.library().functions();
  const auto call = Take<ExchangeCall>(arguments);
  std::vector<Message> messages(static_cast<size_t>(call.sends + call.receives));
  for (Message& message : messages) {
    message = Take<Message>(arguments);
  }
  RETURN_IF_ERROR(ToStatus(functions.nccl_group_begin(), "exchange"));
  absl::Status status;
  void* const handle = handle_;
  const auto issue = [&](std::span<const Message> part, auto function, const char* what) {
    for (const Message& message : part) {
      if (!status.ok()) {
        return;
      }
      status = ToStatus(function(handle,
                                 stream.handle_,
                                 message.data,
                                 static_cast<uint64_t>(message.bytes),
                                 static_cast<int32_t>(message.peer)),
                        what);
    }
  };
  const auto sends = static_cast<size_t>(call.sends);
  issue(std::span(messages).subspan(sends), functions.nccl_receive, "receive");
  issue(std::span(messages).first(sends), functions.nccl_send, "send");
  return EndGroup(std::move(status));
}

absl::Status NcclGroup::Do(const CudaCall& call) {
  {
    MutexLock lock(mutex_);
    captured_ = true;
  }
  RETURN_IF_ERROR(Issue(*call.stream, call.kind, call.arguments));
  for (;;) {
    ASSIGN_OR_RETURN(const bool settled, Settled());
    if (settled) {
      return absl::OkStatus();
    }
    std::this_thread::yield();
  }
}

absl::Status NcclGroup::BeginClose() {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  closing_ = true;
  return ToStatus(gpu_.library().functions().nccl_finalize(handle_), "closing");
}

void NcclGroup::BeginAbort() {
  MutexLock lock(mutex_);
  if (aborted_ || ending_) {
    return;
  }
  aborted_ = true;
  // An aborted group has failed already, so the result of the abort is not read.
  abort_ =
      std::async(std::launch::async,
                 [how = gpu_.library().functions().nccl_abort, handle = handle_] { how(handle); });
}

void NcclGroup::WaitForAbort() {
  std::shared_future<void> abort;  // shared with End
  {
    MutexLock lock(mutex_);
    if (!captured_) {
      abort = abort_;
    }
  }
  if (abort.valid()) {
    abort.wait();
  }
}

void NcclGroup::Abort() {
  BeginAbort();
  WaitForAbort();
}

void NcclGroup::AbortTogether(std::span<NcclGroup* const> groups) {
  // Each raises its flag at once and then waits: for kernels, or for NCCL's thread that connects
  // peers. Grouped calls would raise them one after another, behind the second kind of wait.
  for (NcclGroup* group : groups) {
    group->BeginAbort();
  }
  for (NcclGroup* group : groups) {
    group->WaitForAbort();
  }
}

}  // namespace ravel::kernels
