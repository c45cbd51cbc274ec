#pragma once

// The update of groups whose state is outside of memory: chunk after chunk, each fetched before and
// released after it.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "kernels/update.h"
#include "worker/optim/piece_tables.h"
#include "worker/quant/quant_state.h"
#include "worker/shard/offload_tier.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Seconds of a rank since they were taken last.
struct OffloadTimes {
  double moving = 0;   // fetching and releasing
  double waiting = 0;  // of the update, for what it needs next: the part that nothing hides
  double updating = 0;
};

// With overlap one thread fetches the chunk after the one that is updated, and another releases the
// one before it: plan::kOffloadChunksAlive are in memory. The first chunks of a step are fetched
// during its forward and backward pass, and the last one is released during the next. What neither
// thread has begun when the update needs it, as on cores that are all busy, the update does itself.
// Without overlap each chunk is fetched and released in turn. The bits are those of an update of
// the whole group: an element's depend on no other, and chunks are cut where state groups are. Used
// only from the thread of its rank, or in the order of the program's events.
class OffloadPipeline {
 public:
  // All outlive it.
  struct Args {
    const plan::ShardingPlan& plan;
    const shard::ParameterGroups& groups;
    const PieceTables& pieces;  // on the host
    shard::OffloadTier& tier;
    bool overlap = true;
    int64_t chunk_elements = plan::kOffloadChunkElements;
  };
  explicit OffloadPipeline(const Args& args);
  ~OffloadPipeline();
  OffloadPipeline(const OffloadPipeline&) = delete;
  OffloadPipeline& operator=(const OffloadPipeline&) = delete;

  bool Offloads(plan::GroupId group) const { return !of_group_[group].empty(); }
  // A step begins, `step` from 1: its first chunks are fetched meanwhile.
  void BeginStep(int64_t step);
  // The step is decided. If it applies, an Update of each group that is offloaded follows, in the
  // order of the program. A step that is skipped updates nothing, and what was fetched is released.
  absl::Status Decide(bool apply);
  using UpdateChunk = std::function<void(kernels::PieceTable)>;
  // Calls `update` for each chunk of the group, when its state is in memory.
  absl::Status Update(plan::GroupId group, const UpdateChunk& update);
  // Calls `visit` with quantized pieces of a group: a piece whose main weights are offloaded in
  // parts of rows, each of at most chunk_elements where a row has no more, fetched before the call
  // and released after it.
  using VisitPieces = std::function<void(std::span<const quant::QuantPiece>)>;
  absl::Status ReadMainWeights(plan::GroupId group,
                               std::span<const quant::QuantPiece> pieces,
                               const VisitPieces& visit);
  // Returns when all that was updated is released.
  absl::Status Drain();

  size_t chunk_count() const { return chunks_.size(); }
  OffloadTimes TakeTimes();
  // Records what is done with each chunk from here on, which outlives it; nullptr: nothing.
  void set_recorder(trace::Recorder* recorder);

 private:
  struct Chunk {
    plan::GroupId group;
    std::vector<kernels::UpdatePiece> pieces;
    std::vector<std::span<const std::byte>> memory;  // of the tier
  };
  // Range of chunks_.
  struct Chunks {
    size_t begin = 0;
    size_t end = 0;
    bool empty() const { return begin == end; }
  };

  using Time = std::chrono::steady_clock::time_point;
  void AddChunks(const shard::ParameterGroup& group);
  absl::Status Fetch(const Chunk& chunk);
  absl::Status Release(const Chunk& chunk);
  // The body of a thread: moves chunk after chunk until it is stopped.
  enum class Way { kIn, kOut };
  void MoveAll(Way way);
  absl::Status ReleaseFetched();
  Chunk& At(size_t chunk) { return chunks_[chunk % chunks_.size()]; }
  // Adds that time to `sum`, and tells the recorder.
  void Note(plan::GroupId group, const char* op, Time begin, Time end, double& sum)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next chunk that may go that way, or nothing where the thread is to end. The caller moves
  // it, as nobody else will.
  std::optional<size_t> WaitForWork(Way way);
  std::optional<size_t> Claim(Way way) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Move(Way way, size_t chunk);
  bool MayMove(Way way) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool overlaps() const { return !threads_.empty(); }
  // Returns when so many chunks went that way, or with the first error.
  absl::Status HelpUntil(Way way, size_t moved);
  absl::Status WaitForChunk(size_t chunk);
  absl::Status UpdateInline(const Chunk& chunk, const UpdateChunk& update);
  absl::Status ReadPart(plan::GroupId group,
                        const quant::QuantPiece& part,
                        const VisitPieces& visit);

  const Args args_;
  std::vector<Chunk> chunks_;  // in the order of updates
  plan::IdVector<plan::GroupId, Chunks> of_group_;
  bool begun_ = false;

  Mutex mutex_;
  CondVar changed_;
  // Counts chunks of all steps: each step has chunks_.size() of them, a skipped one none.
  size_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;  // to be fetched, in all
  size_t fetched_ ABSL_GUARDED_BY(mutex_) = 0;
  bool fetching_ ABSL_GUARDED_BY(mutex_) = false;  // the chunk after those
  size_t updated_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t released_ ABSL_GUARDED_BY(mutex_) = 0;
  bool releasing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  OffloadTimes times_ ABSL_GUARDED_BY(mutex_);
  trace::Recorder* recorder_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;  // with overlap: one for each way
};

}  // namespace ravel::optim
