#pragma once

// What each instruction of a program does on one rank.

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "worker/model/module.h"
#include "worker/shard/bound_program.h"
#include "worker/shard/flat_buffer.h"
#include "worker/shard/mesh_communicators.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/replay_backend.h"
#include "worker/shard/replay_state.h"

namespace ravel::shard {

// What a program asks of the optimizer. Implemented in worker/optim. Streams are those of the
// instructions; on a device no call waits for them.
class StepActions {
 public:
  virtual ~StepActions() = default;
  // kStatsReduce: this rank's message, of equal length on all ranks, of what `stream` has been
  // given before. The messages of all ranks are exchanged after it.
  virtual StatisticsMessages Measure(kernels::Stream& stream) = 0;
  // kDecideStep, after the former.
  virtual absl::Status Decide(kernels::Stream& stream) = 0;
  // The rest that is wanted of a quantized group; of other groups neither is set. The
  // update of each of its pieces either goes to `target`, as kernels::WeightUpdate, or its elements
  // are visited once, or neither where a host knows that the step is skipped.
  struct QuantizedUpdate {
    // Called with `count` elements of a piece, from `first` on, after their update, when they are
    // in memory and, on a host, in the caches.
    std::function<void(const quant::QuantPiece& piece, int64_t first, int64_t count)> visit;
    // Called before the update of a piece.
    std::function<kernels::WeightTarget(const quant::QuantPiece& piece)> target;
  };
  // kOptimizerStep, after the former: updates what this rank stores of a group, or nothing in a
  // skipped step.
  virtual absl::Status UpdateGroup(kernels::Stream& stream,
                                   plan::GroupId group,
                                   const QuantizedUpdate& quantized) = 0;
  // kOffloadGradient: the group's gradient is final for the stream of copies to the host.
  virtual void OffloadGradient(plan::GroupId) {}
  // Calls `visit` with quantized pieces of a group, or rows of them, whose main weights are in
  // memory: with all of them, or with some rows at a time where the main weights are offloaded to a
  // file.
  using VisitPieces = std::function<void(std::span<const quant::QuantPiece>)>;
  virtual absl::Status ReadMainWeights(plan::GroupId group,
                                       std::span<const quant::QuantPiece> pieces,
                                       const VisitPieces& visit) {
    (void)group;
    visit(pieces);
    return absl::OkStatus();
  }
  // True of quantized groups whose main weights a device's host has. Their updates take amaxes and
  // make the codes that they can; QuantizedUpdate and ReadMainWeights are not for them.
  virtual bool EncodesOnHost(plan::GroupId) const { return false; }
  // Outside of steps: takes the amaxes of the weights of all such groups as they are now, and has
  // RefreshOnHost make all codes anew.
  virtual absl::Status MeasureHostWeights() { return absl::OkStatus(); }
  // After all updates: raises amaxes of weights (u32, of the device) to those of such groups.
  virtual void AddHostAmaxes(kernels::Stream& stream, const TensorView& amaxes) {
    (void)stream;
    (void)amaxes;
  }
  // The scales of all ranks are there: the host takes them. On the stream of the former.
  virtual void TakeScales(kernels::Stream& stream, const quant::QuantState& scales) {
    (void)stream;
    (void)scales;
  }
  // kRefreshWeights of such a group: the codes that its update has left.
  virtual void RefreshOnHost(plan::GroupId) {}
  // Between Measure and the exchange of messages: counts what is not 0 among flags by tensor of the
  // inventory (u32), as values that were not finite, and makes it 0.
  virtual void CountNonFinite(kernels::Stream& stream, const TensorView& flags) {
    (void)stream;
    (void)flags;
  }
  // At the same time: words that all ranks have alike, by index, which the messages compare.
  virtual void DigestScales(kernels::Stream& stream,
                            const TensorView& words,
                            uint64_t first_index) {
    (void)stream;
    (void)words;
    (void)first_index;
  }
  // Memory of the streams' device: after Decide not 0 (i32) if the step's updates are applied, and
  // from the beginning of a step on its number, from 1. Absent and null: applied, and 0.
  virtual TensorView apply() const { return {}; }
  virtual const int64_t* step_number() const { return nullptr; }
  // The device's own loss scale of the step; null: it is the turn's (ReplayTurn).
  virtual const float* device_loss_scale() const { return nullptr; }
};

// Thread-safe for instructions of different streams.
class InstructionRunner {
 public:
  // All outlive the runner; `actions` may be null where only kEval runs and nothing is quantized.
  // One module per unit.
  struct Args {
    const plan::ShardingPlan& plan;
    MeshCommunicators& communicators;
    ReplayBackend& backend;
    const ArenaBuffers& buffers;
    ParameterGroups& groups;
    const model::Modules& modules;
    StepActions* actions = nullptr;
    uint64_t seed = 0;  // of the job: keys random bits of activations
  };
  explicit InstructionRunner(const Args& args);

  // The state of quantized weights; nullptr where nothing is quantized.
  quant::QuantState* quant() const { return quant_.get(); }
  const kernels::ActivationDraws* draws() const { return &draws_; }
  const float* loss_scale() const { return &loss_scale_; }
  // Collective. Codes and scales of all weights follow main weights that somebody else wrote. kNew:
  // histories of delayed scales begin; kLoaded: they were loaded, with the scales of the codes.
  enum class Refresh { kNew, kLoaded };
  absl::Status RefreshAll(Refresh refresh);

  ReplayState& state() { return state_; }
  const ReplayState& state() const { return state_; }
  bool HasLane(const ReplayTurn& turn) const;

  // All but kFree and kEndPhase, which belong to the host. Of a device: issues it on its stream and
  // waits for nothing; the order of what is issued is what the replay state checks.
  absl::Status Run(const BoundInstruction& bound, const ReplayTurn& turn);
  // Gives a lane's kForward, kRecompute or kBackward to its stream, without a move; checks nothing.
  void IssueCompute(const BoundInstruction& bound, plan::Phase phase) const;
  // Time that the collectives on an instruction's communicator have waited for other ranks since
  // the last call.
  comm::PeerWait TakePeerWait(const plan::Instruction& instruction);
  // The name of an instruction in texts.
  const char* OpNameOf(const plan::Instruction& instruction) const {
    return plan::OpName(plan::WorkLabelOf(args_.plan.moves, instruction));
  }
  // Bytes that a collective receives from other ranks.
  int64_t BytesOf(const plan::Instruction& instruction, const ReplayTurn& turn) const;

 private:
  using Instruction = plan::Instruction;
  ParameterGroup& Group(const Instruction& instruction) { return args_.groups[instruction.group]; }
  // The buffer that an instruction has in a role; nullptr where it has none.
  float* FloatsOf(const Instruction& instruction, plan::Role role) const;
  kernels::Stream& StreamOf(const Instruction& instruction) const {
    return args_.backend.stream(instruction.stream);
  }
  comm::CollectiveTag TagOf(const Instruction& instruction, const ReplayTurn& turn) const;
  const plan::ProgramMove& MoveAt(const Instruction& instruction) const {
    return args_.plan.moves.moves[instruction.move];
  }
  comm::Communicator& RanksOf(const Instruction& instruction) const {
    return args_.communicators.Of(MoveAt(instruction));
  }
  absl::Status Gather(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status GatherWeights(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status RenewWeights(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status GatherGradient(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status AccumulateGrad(const Instruction& instruction, const ReplayTurn& turn);
  // Reduce lanes, and the sums that those leave.
  absl::Status SumAddends(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status ReduceLanes(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status ReduceSums(const Instruction& instruction, const ReplayTurn& turn);
  // The staging of this rank's lane as it goes on the wire, rounded now where it was not written
  // so; nullptr without a lane.
  float* PackedStaging(const Instruction& instruction, const ReplayTurn& turn);
  void AddPieces(const Instruction& instruction, int64_t turn, const comm::PieceViews& views);
  void DigestScales(kernels::Stream& stream);
  absl::Status ReduceStatistics(const Instruction& instruction, const ReplayTurn& turn);
  absl::Status Compute(const BoundInstruction& bound, const ReplayTurn& turn);
  void IssueCompute(const BoundInstruction& bound,
                    plan::Phase phase,
                    const model::UnitMemory& memory) const;
  // A step of a unit between exchanges of activations with the other ranks of the tensor axis.
  absl::Status MoveActivation(const BoundInstruction& bound, const ReplayTurn& turn);
  absl::Status PassUnused(const Instruction& instruction);
  absl::Status Update(const Instruction& instruction);
  absl::Status Quantize(kernels::Stream& stream, const ParameterGroup& group);
  void ClearQuantization(kernels::Stream& stream, Refresh refresh);
  // Makes room for new amaxes, once before the first of a weight is taken.
  void BeginAmaxes(kernels::Stream& stream);
  absl::Status ReduceAmaxes(const Instruction& instruction, comm::CollectiveTag tag);
  void FinishAmaxes(kernels::Stream& stream, const TensorView& apply);
  int64_t WireElements(const Instruction& instruction, int64_t elements);
  kernels::ActivationDraws DrawsOf(const ReplayTurn& turn) const;

  const Args args_;
  std::unique_ptr<quant::QuantState> quant_;
  kernels::ActivationDraws draws_;  // of the micro-batch under way
  float loss_scale_ = 1;            // likewise
  // Rows of a quantized piece that have their new codes.
  struct Encoded {
    size_t piece;
    int64_t first;
    int64_t end;
  };
  // The rows that an update has left to kRefreshWeights.
  std::vector<quant::QuantPiece> LeftToQuantize(const ParameterGroup& group) const;
  // The rows that are done, from the update of a group to its kRefreshWeights.
  plan::IdVector<plan::GroupId, std::vector<Encoded>> encoded_;
  // Not 0: its update had targets that encode.
  plan::IdVector<plan::GroupId, uint8_t> has_targets_;
  // From the first amax of an updated weight to the exchange of all: which groups are measured, and
  // on a host the digest of the scales that codes had until then.
  bool amaxes_begun_ = false;
  plan::IdVector<plan::GroupId, bool> measured_;
  uint64_t scales_digest_ = 0;
  ReplayState state_;
};

}  // namespace ravel::shard
