#pragma once

// The buffers of a step: how many bytes of which memory each group and unit needs.

#include "common/plan/program/program_request.h"
#include "common/plan/program/program_uses.h"

namespace ravel::plan {

// True if the group's gathered buffer stays: its weights are not cut, or gathers are in place.
bool IsResident(const ProgramRequest& request, GroupId group);

// Type of a group's model weights and gathered weights: codes of its recipe, or what modules
// compute in. Type of its main weights.
DType WeightTypeOf(const GroupLayout& group, const ProgramOptions& options);
DType MainTypeOf(const GroupLayout& group, const ProgramOptions& options);
// Bytes of so many elements of its model weights.
int64_t WeightBytes(const GroupLayout& group, const ProgramOptions& options, int64_t elements);

// Element type of a gradient's staging, and of what peers receive of it.
// ProgramOptions::staged_type where every element is written once per micro-batch and then leaves
// for the ranks, else fp32, to which more can be added: of several micro-batches of a lane, of
// several calls, of lanes in blocks. What is staged in fp32 and travels in bf16 is rounded by the
// reduce.
DType StagedType(const LaneMap& lanes, const ProgramOptions& options, const GradientCall& call);

// True if the gradient of a lane is the sum over lanes, and that of several micro-batches: a rank
// that reduces in each turn then stages it in the memory of that sum, since nothing is added to it.
// With V lanes on one rank, V > 1, staging and the counter are log2(V) + 1 buffers, the least that
// the fixed tree needs.
bool StagedInSum(const LaneMap& lanes);

// Elements of the addend of a sum of activations, and bytes of one rank's rows of the largest
// activation that is gathered; 0 where the inventory is not cut for a tensor axis.
int64_t AddendElements(const ModelInventory& inventory);
int64_t RowsBytes(const ModelInventory& inventory);
// Elements of the addend in that slot: 0, of all tokens; 1 and 2, of a chunk, where there are some.
int64_t AddendElements(const ModelInventory& inventory, int slot);
// Bytes of kInputGradient.
int64_t InputGradientBytes(const ModelInventory& inventory);

// Every buffer of every program.
ProgramBuffers BuildBuffers(const ProgramRequest& request);

}  // namespace ravel::plan
