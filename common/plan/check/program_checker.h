#pragma once

// Proves that the programs of a plan are safe, by happens-before and never by list order. Errors
// begin with the rule:
//   K1  a use is after its gather and of the newest generation; weights are written after all that
//       reads them; instructions name the buffers of their group; calls of units, and the steps of
//       each, are in order and have their moves
//   K2  no lifetime ends before its last access; no two accesses race
//   K3  buffers with overlapping addresses are ordered
//   K4  equal collectives on all ranks
//   K5  waits point backwards: no circle; with other ranks' programs: nobody waits for ever
//   K6  live gathered and staged bytes within the windows
//   K7  every gradient is summed once, every trained group updated once, after one decision
//   K8  all at rest when a program ends, but staging between micro-batches of a lane
//   K9  staging is opened before its first writer, which overwrites, and read after its last;
//       rounded staging has one writer
//   K10 prefetch does not wait for what it should overlap
//   K11 statistics count each element once
//   K12 what lies inside another buffer is a rank's own part of it
//   K13 offsets are aligned, inside their arenas, and apart
//   K14 the eval program writes no state

#include <memory>

#include "common/plan/program/step_program.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

absl::Status CheckPlan(const ShardingPlan& plan);

// Checks one program with a plan's buffers and addresses.
absl::Status CheckProgram(const ShardingPlan& plan, const StepProgram& program);

// Checks programs with a plan's buffers and addresses, one after another. Facts of the plan alone
// are found and checked once. The plan must outlive the checker and must not change.
class ProgramChecker {
 public:
  static absl::StatusOr<ProgramChecker> Create(const ShardingPlan& plan);
  ProgramChecker(ProgramChecker&& other) noexcept;
  ProgramChecker& operator=(ProgramChecker&& other) noexcept;
  ~ProgramChecker();

  absl::Status Check(const StepProgram& program) const;

 private:
  struct PlanFacts;
  friend absl::Status CheckPlan(const ShardingPlan& plan);
  explicit ProgramChecker(const ShardingPlan& plan);

  std::unique_ptr<const PlanFacts> facts_;
};

}  // namespace ravel::plan
