#pragma once

// Groups of CUDA devices through NCCL (libnccl.so.2, opened by libravel_cuda.so on first use).
// Nothing here blocks: what has begun is asked for, and can be aborted from another thread.

#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <string>

#include <absl/base/thread_annotations.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "common/mutex.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels {

// 22809 is 2.28.9. An error names the library and where it was sought, or why it is refused.
absl::StatusOr<int> NcclVersion(const CudaLibrary& library);
// Returns a new id, by which the ranks of one group find each other: made by one of them, used
// once, a secret.
absl::StatusOr<std::string> MakeNcclId(const CudaGpu& gpu);

// One rank of a group. Thread-safe; collectives of all ranks come in the same order. Errors say the
// group's name and NCCL's own text.
class NcclGroup {
 public:
  struct Options {
    std::string name;
    int ranks = 1;
    int rank = 0;
    int max_ctas = 0;  // blocks of the device that a collective may occupy; 0: NCCL's choice
  };
  // Begins to join the group of `id`; it can be used once Settled says so. The device outlives it.
  static absl::StatusOr<std::shared_ptr<NcclGroup>> Begin(const CudaGpu& gpu,
                                                          const std::string& id,
                                                          Options options);
  // Begins a split; ranks that give one `color` become a group, in the order of `options.rank`.
  // Collective over this group, which outlives the part.
  absl::StatusOr<std::shared_ptr<NcclGroup>> BeginSplit(int color, Options options);
  ~NcclGroup() { End(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Returns true if nothing is under way. While it is, no collective may be issued here. An error
  // of work that was issued long ago comes here, too.
  absl::StatusOr<bool> Settled();

  // Collectives begin to be issued, in the order of the stream's work; see Settled. A log of the
  // stream that keeps collectives may leave them to a graph.
  absl::Status AllGather(CudaStream& stream, const void* shard, void* gathered, int64_t bytes);
  struct Message {
    int64_t peer = 0;
    void* data = nullptr;  // of a message that is sent: only read
    int64_t bytes = 0;
  };
  // All messages at once.
  absl::Status Exchange(CudaStream& stream,
                        std::span<const Message> sends,
                        std::span<const Message> receives);

  // Returns the group of a collective that a log has kept.
  static NcclGroup& Of(const CudaCall& call);
  // Such a collective, now, and until nothing is under way: for captures. Graphs of
  // it are gone before End.
  absl::Status Do(const CudaCall& call);

  // Begins to let go of the peers, for which all work must be through; once settled, the rest of
  // closing does not wait. Nothing is issued afterwards.
  absl::Status BeginClose();
  // Ends work that runs or is enqueued; every later call is Aborted. May wait for the device to
  // leave that work. Where it was captured NCCL also waits for the graphs to go: then nothing is
  // waited for here, but in End.
  void Abort();
  // The same for several groups of one device, and the only way for groups whose work waits for
  // each other's: an abort ends when the group's enqueued work has left the device, which may be
  // behind work of a group that hangs until it is aborted, too.
  static void AbortTogether(std::span<NcclGroup* const> groups);
  // Lets go of all: by Abort, where it is not closed. No call follows.
  void End();

 private:
  NcclGroup(const CudaGpu& gpu, std::string name) : gpu_(gpu), name_(std::move(name)) {}
  absl::Status ToStatus(int32_t error, const char* what) const;
  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndGroup(absl::Status status) const;
  // The abort runs in a thread of its own, which nobody waits for where there are graphs.
  void BeginAbort();
  void WaitForAbort();
  // Has the stream's log decide.
  absl::Status Submit(CudaStream& stream,
                      CudaCall::Kind kind,
                      std::span<const std::byte> arguments);
  absl::Status Issue(const CudaStream& stream,
                     CudaCall::Kind kind,
                     std::span<const std::byte> arguments);
  absl::Status IssueExchange(const CudaStream& stream, std::span<const std::byte> arguments)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const CudaGpu& gpu_;
  const std::string name_;
  Mutex mutex_;
  void* handle_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // all work is through
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool captured_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_future<void> abort_ ABSL_GUARDED_BY(mutex_);  // ready once NCCL has let go of it
};

}  // namespace ravel::kernels
