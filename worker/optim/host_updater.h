#pragma once

// The update, by a device's host, of groups whose state is offloaded: gradients are copied down,
// chunk after chunk, the host updates its state, new weights are copied up.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/mutex.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/step_statistics.h"
#include "worker/optim/host_codes.h"
#include "worker/optim/loss_scale.h"
#include "worker/optim/offload_chunks.h"
#include "worker/optim/piece_tables.h"
#include "worker/optim/update_pool.h"
#include "worker/optim/update_rule.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/host_state.h"
#include "worker/shard/numa_node.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Counts of a rank's updates on the host since they were taken last.
struct HostUpdateCounts {
  int64_t chunks = 0;
  int64_t early = 0;   // updated before their step was decided, for good
  int64_t redone = 0;  // updated before, restored and updated again, or left as they were
  double update_seconds = 0;
  double early_seconds = 0;  // of these, before their step was decided
};

// Three streams do it: copies down, work of the host, copies up; events order the chunks on them,
// so the thread that issues a step waits for nothing. Slots of pinned memory hold what is under
// way. With overlap, chunks whose gradients are final go down during backward, and are updated at
// once by the scalars that the step will most likely have: nothing is clipped or skipped, and as
// many tokens as in the step before. What such an update overwrites is kept; where the step is
// decided otherwise, that is copied back, and the chunk is updated as the step says, or not at all.
// After a wrong guess the next step guesses nothing. New weights go up only when their step is
// decided, in forward order. An element's update depends on no other, so the bits are those of an
// update of whole groups on the device.
//
// Where there are fewer slots than chunks, the last chunks of the model, whose gradients are final
// first, have one each; the others share a few, so that most of them come down, in forward order,
// when the step is decided. They go up before the last ones, as the next forward wants it.
//
// Used only from the thread that issues the rank's work, but for counts and what streams call.
class HostUpdater {
 public:
  // All outlive it.
  struct Args {
    const plan::ShardingPlan& plan;
    const shard::ParameterGroups& groups;
    shard::DeviceStreams& streams;
    const shard::HostState& state;
    HostCodes* codes = nullptr;  // where some of the groups have recipes
    shard::NumaNode node = {};
    bool overlap = true;
    int64_t chunk_elements = plan::kHostChunkElements;
    int64_t most_slots = 0;  // 0: as many as are planned
    int threads = 1;
  };
  // ResourceExhausted where the host has no room.
  static absl::StatusOr<std::unique_ptr<HostUpdater>> Create(const Args& args);
  // The streams have done their work.
  ~HostUpdater() = default;
  HostUpdater(const HostUpdater&) = delete;
  HostUpdater& operator=(const HostUpdater&) = delete;

  // Once, before the first step. Outlives the work of the streams. `clips`: the rule's steps may be
  // clipped. `tokens`: of a step whose lanes are full.
  void UseRule(const UpdateRule& rule, int64_t tokens);
  // `step` from 1; `updates`: applied so far, where the device does not know them; `loss_scale`
  // likewise. kDecided: somebody reads weights before and after updates, which begin when the step
  // is decided.
  enum class Updates { kAsEarlyAsTheyCan, kDecided };
  void BeginStep(int64_t step,
                 double learning_rate,
                 std::optional<int64_t> updates,
                 const std::optional<LossScale>& loss_scale,
                 Updates begin);
  // kOffloadGradient: the group's gradient is final for the stream of copies down.
  void AddGradient(plan::GroupId group);
  // kDecideStep: `stream` has decided.
  void Decide(kernels::CudaStream& stream, const kernels::StepOutcome& outcome);
  bool Has(plan::GroupId group) const { return !of_group_[group].absent; }
  // Updates of these groups take amaxes and make codes.
  bool MakesCodes(plan::GroupId group) const {
    return args_.codes != nullptr && args_.codes->Has(group);
  }
  // kOptimizerStep, in the order of the program.
  void Update(plan::GroupId group);
  // The rest is for groups of which it makes the codes (StepActions). MeasureWeights waits for all
  // work.
  absl::Status MeasureWeights();
  void AddAmaxes(kernels::CudaStream& stream, const TensorView& amaxes);
  void TakeScales(kernels::CudaStream& stream, const quant::QuantState& scales);
  void Refresh(plan::GroupId group);

  int64_t chunk_count() const { return std::ssize(chunks_); }
  // Of the host beside the state: pinned, and kept for updates that are undone.
  int64_t pinned_bytes() const {
    return pinned_.bytes() + (args_.codes == nullptr ? 0 : args_.codes->pinned_bytes());
  }
  int64_t kept_bytes() const { return std::ssize(slots_) * ring_.kept_bytes; }
  HostUpdateCounts TakeCounts();
  // Records each chunk's work on the host from here on; nullptr: none.
  void set_recorder(trace::Recorder* recorder);

 private:
  struct Slot {
    std::byte* pinned = nullptr;
    std::byte* kept = nullptr;
    kernels::CudaEvent downloaded;
    kernels::CudaEvent updated;
    kernels::CudaEvent free;  // what goes up has gone
  };
  struct Run {  // elements of a chunk that lie side by side, from its begin
    int64_t begin = 0;
    int64_t elements = 0;
  };
  struct Chunk {
    OffloadChunk cut;
    plan::HostChunkBytes bytes;
    std::vector<Run> runs;
    std::vector<std::span<std::byte>> state;  // of the host
    HostCodes::Work work;                     // of quantized weights; else none
    std::vector<Run> codes;                   // that its update makes
    Slot* slot = nullptr;
    HostUpdater* owner = nullptr;
    bool down = false;     // is in its slot, or on the way there
    bool guessed = false;  // updated before its step is decided
  };
  struct Chunks {
    size_t begin = 0;
    size_t end = 0;
    bool absent = true;
  };
  // Rows of a piece whose codes are made by themselves.
  struct Rows {
    quant::QuantPiece piece;
    Slot* slot = nullptr;
    HostUpdater* owner = nullptr;
  };
  // All of a group, and those that its updates leave.
  struct GroupRows {
    std::vector<Rows> all;
    std::vector<Rows> left;
  };
  // Facts of a step that are known before it is decided.
  struct Beginning {
    int64_t step = 0;
    double learning_rate = 0;
    std::optional<int64_t> updates;
    std::optional<LossScale> loss_scale;
  };

  // A fault point.
  static constexpr char kHalfOfAChunk[] = "offload.host_chunk_half";

  explicit HostUpdater(const Args& args);
  absl::Status Allocate();
  static plan::HostRing RingOf(const Args& args);
  void AddChunks(const shard::ParameterGroup& group);
  // The parts of a chunk of quantized weights, and the codes that its update makes.
  void AddCodes(const OffloadChunk& cut, Chunk& chunk) const;
  // The rows of a group whose chunks are there, and the slots of all rows.
  void AddRows(const shard::ParameterGroup& group);
  void PlaceRows();
  // Gives each chunk a slot, and sets the order in which chunks come down.
  void OrderChunks();
  bool early() const { return args_.overlap && may_guess_ && !decided_; }
  // Gives copies down to their stream, as far as there are slots and gradients.
  void Pump();
  bool HasRoom(size_t chunk) const;
  // Memory that the host's work with a slot reads and writes.
  std::vector<kernels::cuda::RavelCudaHostAccess> AccessesOf(const Slot& slot) const;
  void GoDown(Chunk& chunk);
  void GoUp(Chunk& chunk);
  void CopyDown(kernels::CudaStream& stream, const Chunk& chunk);
  void CopyUp(kernels::CudaStream& stream, const Chunk& chunk);
  std::byte* MainOf(const Chunk& chunk) const;
  std::byte* ModelOf(const Chunk& chunk) const;
  // The codes that an update makes; nullptr where it knows no scales.
  std::byte* CodesOf(const Chunk& chunk) const;
  // False where the update cannot tell yet what codes there will be.
  bool SendsCodes(plan::GroupId group) const;

  // On the stream of host work.
  static void GuessChunk(void* chunk);
  static void FinishChunk(void* chunk);
  void Guess(Chunk& chunk);
  void Finish(Chunk& chunk);
  std::optional<kernels::StepOutcome> Expected();
  // The factor of the gradients of such a step.
  double ScaleOf(const Beginning& beginning) const;
  static void EncodeRows(void* rows);
  void Encode(const Rows& rows);
  void Apply(Chunk& chunk, const kernels::StepOutcome& outcome);
  // A step that is not applied sends up what the device has.
  void SendAgain(Chunk& chunk);
  // After `apply` of the pieces of each part: amaxes and, unless `codes` is nullptr, codes.
  using ApplyPieces = std::function<void(std::span<const kernels::UpdatePiece> pieces)>;
  void DoWork(const Chunk& chunk, const ApplyPieces& apply, std::byte* codes, HostCodes::Cast cast);
  enum class Way { kKeep, kRestore };
  void Move(const Chunk& chunk, Way way);
  shard::ParameterGroup::Stored StoredOf(const Chunk& chunk) const;
  static int64_t NowNs();
  int64_t StepUnderWay() const;
  void Note(plan::UnitId unit, const char* op, int64_t step, int64_t begin_ns, int64_t end_ns);

  const Args args_;
  const plan::HostRing ring_;
  const PieceTables pieces_;
  const UpdateRule* rule_ = nullptr;
  int64_t full_tokens_ = 0;
  std::vector<Chunk> chunks_;  // in the order of updates
  size_t late_ = 0;            // of these, the first ones, which share slots
  std::vector<size_t> down_order_;
  plan::IdVector<plan::GroupId, GroupRows> rows_;
  plan::IdVector<plan::GroupId, Chunks> of_group_;
  kernels::CudaMemory pinned_;
  std::unique_ptr<shard::HostState> kept_;
  std::vector<Slot> slots_;
  kernels::CudaEvent decision_there_;
  kernels::CudaEvent all_updated_;
  kernels::CudaEvent scales_there_;
  kernels::StepOutcome* decision_ = nullptr;  // pinned

  // Of the step that is issued.
  plan::IdVector<plan::GroupId, bool> ready_;
  bool may_guess_ = false;
  bool decided_ = false;
  bool codes_ahead_ = false;  // HostCodes::ahead, as the step begins
  bool all_rows_ = false;     // no update has made codes
  size_t down_ = 0;           // of down_order_, issued
  size_t up_ = 0;             // of chunks_, issued

  // Of the step that the stream of host work is at, and used by that alone.
  size_t finished_ = 0;
  std::optional<kernels::StepOutcome> last_;  // decided
  std::optional<kernels::StepOutcome> expected_;
  bool guesses_ = true;

  mutable Mutex mutex_;
  std::array<Beginning, 4> beginnings_ ABSL_GUARDED_BY(mutex_);  // by step, the newest ones
  int64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  HostUpdateCounts counts_ ABSL_GUARDED_BY(mutex_);
  trace::Recorder* recorder_ ABSL_GUARDED_BY(mutex_) = nullptr;

  UpdatePool pool_;  // last: threads end first
};

}  // namespace ravel::optim
