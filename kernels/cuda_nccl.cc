#include "kernels/cuda_nccl.h"

#include <thread>
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

namespace {

// What NCCL is given goes around the stream's log.
void RefuseGraphs(const CudaStream& stream) {
  if (stream.log() != nullptr) {
    stream.log()->Refuse("a collective of NCCL");
  }
}

}  // namespace

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

absl::Status NcclGroup::AllGather(CudaStream& stream,
                                  const void* shard,
                                  void* gathered,
                                  int64_t bytes) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  RefuseGraphs(stream);
  return ToStatus(gpu_.library().functions().nccl_all_gather(
                      handle_, stream.handle_, shard, gathered, static_cast<uint64_t>(bytes)),
                  "all_gather");
}

absl::Status NcclGroup::EndGroup(absl::Status status) const {
  const absl::Status ended = ToStatus(gpu_.library().functions().nccl_group_end(), "exchange");
  return status.ok() ? ended : status;
}

absl::Status NcclGroup::Exchange(CudaStream& stream,
                                 std::span<const Message> sends,
                                 std::span<const Message> receives) {
  const cuda::RavelCudaFunctions& functions = gpu_.library().functions();
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  RefuseGraphs(stream);
  RETURN_IF_ERROR(ToStatus(functions.nccl_group_begin(), "exchange"));
  absl::Status status;
  for (const Message& message : receives) {
    if (status.ok()) {
      status = ToStatus(functions.nccl_receive(handle_,
                                               stream.handle_,
                                               message.data,
                                               static_cast<uint64_t>(message.bytes),
                                               message.peer),
                        "receive");
    }
  }
  for (const Message& message : sends) {
    if (status.ok()) {
      status = ToStatus(functions.nccl_send(handle_,
                                            stream.handle_,
                                            message.data,
                                            static_cast<uint64_t>(message.bytes),
                                            message.peer),
                        "send");
    }
  }
  return EndGroup(std::move(status));
}

absl::Status NcclGroup::BeginClose() {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  closing_ = true;
  return ToStatus(gpu_.library().functions().nccl_finalize(handle_), "closing");
}

void NcclGroup::Abort() {
  MutexLock lock(mutex_);
  if (!aborted_) {
    aborted_ = true;
    gpu_.library().functions().nccl_abort(handle_);  // what is aborted has failed already
  }
}

void NcclGroup::AbortTogether(std::span<NcclGroup* const> groups) {
  // Each raises its flag at once and then waits: for kernels, or for NCCL's thread that connects
  // peers. Grouped calls would raise them one after another, behind the second kind of wait.
  std::vector<std::thread> threads;
  threads.reserve(groups.size());
  for (NcclGroup* group : groups) {
    threads.emplace_back([group] { group->Abort(); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace ravel::kernels
