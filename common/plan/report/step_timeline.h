#pragma once

// When each instruction of a step would run on a device: streams in order, waits, and durations
// from FLOPs and bytes. A prediction to look at, not a promise.

#include <cstdint>
#include <vector>

#include "common/plan/device_kind.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

struct TimedInstruction {
  InstructionId index = {};
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};
// One run of a program from time 0, in the order of the program; frees take no time.
// `contributors`: ranks of the replica that have a lane.
IdVector<InstructionId, TimedInstruction> SimulateProgram(const ShardingPlan& plan,
                                                          const StepProgram& program,
                                                          const DeviceKind& device,
                                                          int64_t contributors);

struct StepTimes {
  int64_t step_ns = 0;     // all programs of a step, one after another
  int64_t compute_ns = 0;  // of it on the compute stream
  int64_t exposed_ns() const { return step_ns - compute_ns; }
};
StepTimes PredictStep(const ShardingPlan& plan, const DeviceKind& device);

}  // namespace ravel::plan
