#pragma once

// The life of weights, activations and gradients while programs are replayed, as state machines.
// Every instruction announces what it begins and ends; what is out of order is an
// error that says so, and a bug of plan or engine.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::shard {

// Counts the steps that wrote the weights of a group; a gathered copy carries the generation it was
// made from.
enum class Generation : int64_t {};

// Thread-safe: instructions of different streams report at the same time. The plan outlives it.
class ReplayState {
 public:
  explicit ReplayState(const plan::ShardingPlan& plan);

  // The lane and micro-batch that the following instructions are about.
  struct Pass {
    plan::Phase phase = plan::Phase::kOnly;
    plan::LanePart part = plan::LanePart::kWhole;
    int64_t turn = 0;
    int64_t micro_batch = 0;
    bool has_lane = true;
  };
  void BeginProgram(const Pass& pass);

  Generation generation(plan::GroupId group) const;

  absl::Status BeginGather(const plan::Instruction& gather);
  void EndGather(const plan::Instruction& gather);
  // The gather over replicas: the model weight has the newest generation.
  void EndRenewal(plan::GroupId group);
  // kForward, kRecompute, kBackward: one step of a pass, of which the first begins what the last
  // ends.
  absl::Status BeginCompute(const plan::Instruction& compute);
  void EndCompute(const plan::Instruction& compute);

  absl::Status AllocStaging(plan::BufferId staging);
  // kReduce of addends, before their gradient leaves the rank.
  absl::Status BeginAddends(const plan::Instruction& reduce);
  void EndAddends(const plan::Instruction& reduce);
  // kAccumulateGrad and kReduce of lanes, of staging or of a local sum.
  absl::Status BeginReduce(const plan::Instruction& reduce);
  void EndReduce(const plan::Instruction& reduce);
  absl::Status BeginReduceOfSums(const plan::Instruction& reduce);
  void EndReduceOfSums(const plan::Instruction& reduce);
  absl::Status JoinGradients(plan::GroupId group);
  absl::Status GatherGradient(plan::GroupId group);
  // Statistics are of sums that are complete.
  absl::Status CheckSumsComplete();
  // kOffloadGradient: its sums are complete.
  absl::Status CheckGradient(plan::GroupId group);
  // kOptimizerStep: weights at rest, sums complete; the generation advances, also in a skipped
  // step.
  absl::Status BeginUpdate(plan::GroupId group);
  void EndUpdate(plan::GroupId group);
  // kAmaxReduce: every quantized group has been updated. kRefreshWeights: after that; the
  // generation of a quantized group advances here.
  absl::Status CheckAmaxes();
  absl::Status BeginRefresh(plan::GroupId group);
  void EndRefresh(plan::GroupId group);

  absl::Status Free(plan::BufferId buffer);
  // Everything at rest.
  absl::Status EndPhase();

 private:
  enum class Content { kNone, kFilling, kFull, kDraining };
  // State of one buffer.
  struct BufferState {
    Content content = Content::kNone;
    bool freed = true;         // gathered: nobody reads this content any more
    int uses = 0;              // instructions that read it now
    bool addends = false;      // staging: the sum over ranks of `tensor` is still to come
    plan::GroupId group = {};  // gathered: whose weights, ...
    Generation generation{};
    int call = -1;  // activations: of which call and pass
    int64_t pass = -1;
  };
  // Sums over lanes of one gradient call.
  struct SumState {
    int64_t local_turns = 0;
    int64_t inner_turns = 0;
    bool outer = false;
  };
  struct GroupState {
    Generation generation{};
    Generation model_generation{};  // of the model weight, where replicas cut it
    bool updating = false;
    bool stale = false;  // codes are those of main weights before the update
    bool joined = false;
    bool whole = false;          // every rank has the whole gradient
    std::vector<SumState> sums;  // by gradient call
  };

  bool Busy(plan::BufferId buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Begins a new content of a temporary: nobody may still need what shares its bytes.
  absl::Status Claim(plan::BufferId buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Bytes of a kind of temporary that are alive stay within the plan's window; what one instruction
  // cannot do without may be alive alone.
  absl::Status CheckWindow(plan::BufferId buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWeights(plan::BufferId buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginActivations(const plan::Instruction& compute)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginGradients(const plan::Instruction& compute)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ClaimReceive(const plan::Instruction& reduce) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveReceive(const plan::Instruction& reduce) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSums(plan::GroupId group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckFinal(plan::GroupId group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SumState& SumOf(const plan::Instruction& reduce) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLastStep(const plan::Instruction& compute) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Fault(const char* what, plan::BufferId buffer) const;
  absl::Status GroupFault(const char* what, plan::GroupId group) const;

  const plan::ShardingPlan& plan_;
  plan::IdVector<plan::BufferId, std::vector<plan::BufferId>>
      overlaps_;                                       // temporaries that share addresses
  plan::IdVector<plan::BufferId, bool> has_backward_;  // saved buffers that a backward reads
  // The last segment with which a step of a unit begins, by op and whether it is of an evaluation.
  std::map<std::tuple<plan::OpCode, plan::UnitId, bool>, plan::SegmentId> last_steps_;
  int64_t most_gathered_ = 0;  // bytes of temporaries alive at once
  int64_t most_staged_ = 0;

  mutable Mutex mutex_;
  Pass pass_ ABSL_GUARDED_BY(mutex_);
  int64_t pass_number_ ABSL_GUARDED_BY(mutex_) = 0;
  plan::IdVector<plan::BufferId, BufferState> buffers_ ABSL_GUARDED_BY(mutex_);
  plan::IdVector<plan::GroupId, GroupState> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::shard
