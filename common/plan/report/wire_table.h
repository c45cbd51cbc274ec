#pragma once

// Bytes that a plan's collectives move, by group and mesh axis.

#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"

namespace ravel::plan {

// Bytes of weights, gradients and activations that a rank reads from others in one step. In-place
// gathers move nothing.
struct WireBytes {
  int64_t gathers = 0;        // weights over the shard axis
  int64_t reduces = 0;        // gradients over the shard axis
  int64_t outer_gathers = 0;  // weights over the replicate axis
  int64_t outer_reduces = 0;  // gradients over the replicate axis
  // Over the tensor axis. An all-reduce of a gradient's addends is a reduce.
  int64_t tensor_gathers = 0;  // activations, and what the loss knows of parts of the vocabulary
  int64_t tensor_reduces = 0;  // addends of activations and of gradients
  int64_t shard() const { return gathers + reduces; }
  int64_t replicate() const { return outer_gathers + outer_reduces; }
  int64_t tensor() const { return tensor_gathers + tensor_reduces; }
  int64_t total() const { return shard() + replicate() + tensor(); }
  WireBytes& operator+=(const WireBytes& other);
  WireBytes operator*(int64_t times) const;
  bool operator==(const WireBytes&) const = default;
};

// True if lanes' gradients leave a rank as bf16: lanes in blocks are summed before and stay fp32.
bool RoundsGradients(const ShardingPlan& plan);

// Memory traffic of a rank in one step that rounding staged gradients costs, which wires do not
// show: between ranks that read each other's memory it is more than what a bf16 wire saves.
int64_t RoundedInPlaceBytes(const ShardingPlan& plan);

// Bytes that a collective on a group, or the move of a step of a unit, receives from other ranks,
// in place or not, when `contributors` ranks of the replica have a gradient; 0 for all other
// instructions.
int64_t ReceivedBytes(const ShardingPlan& plan, const Instruction& at, int64_t contributors);
// The bytes that do move: of one run of an instruction when `contributors` ranks of the replica
// have a gradient.
WireBytes WireOf(const ShardingPlan& plan, const Instruction& instruction, int64_t contributors);
// Bytes of one step by group, for a rank that has a lane in every turn; without activations, which
// are of no group.
IdVector<GroupId, WireBytes> WireTable(const ShardingPlan& plan);
// Bytes of one step, all groups and activations.
WireBytes StepWire(const ShardingPlan& plan);

}  // namespace ravel::plan
