#pragma once

// Plans of whole worlds, as the controller needs them. Planning is slow for big jobs and runs on
// the pool, never on the strand.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/plan/program/program_offload.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::coordinator {

struct PlannedWorld {
  std::string bytes;           // serialized v1::ShardingPlan, what FetchPlan streams
  std::string digest;          // SHA-256 of `bytes`
  std::string save_plan_hash;  // what seals are held against; trainers make the same one, or none
  plan::ShardingPlan plan;
};

// Memory that one rank of a world needs, predicted.
struct RankMemory {
  int64_t peak_bytes = 0;  // of the worst rank's device
  int64_t host_bytes = 0;  // of that device's host, for what gpu jobs offload
};

// Thread-safe.
class Planner {
 public:
  virtual ~Planner() = default;
  // Shared because FetchPlan may stream a plan while its job is already planned anew.
  virtual absl::StatusOr<std::shared_ptr<const PlannedWorld>> Plan(const plan::JobSpec& spec,
                                                                   int64_t ranks,
                                                                   bool shared_memory) = 0;
  // Plans that world and returns the predicted memory of its worst rank, or why it has no plan.
  // Nothing is kept, so that checks do not push out what launches use.
  virtual absl::StatusOr<RankMemory> Check(const plan::JobSpec& spec,
                                           int64_t ranks,
                                           bool shared_memory) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const PlannedWorld> world,
                     Plan(spec, ranks, shared_memory));
    return MemoryOf(world->plan);
  }
  static RankMemory MemoryOf(const plan::ShardingPlan& plan) {
    return {.peak_bytes = plan::PeakBytes(plan),
            .host_bytes = plan::OffloadOf(plan.buffers, plan.groups, plan.options).host_bytes()};
  }
  // A plan that was made before and is still cached or held by somebody, or null.
  virtual std::shared_ptr<const PlannedWorld> Find(const std::string& digest) = 0;
  // JobRecord::planned and back.
  virtual std::string EncodeSpec(const plan::JobSpec& spec) = 0;
  virtual absl::StatusOr<plan::JobSpec> DecodeSpec(const std::string& planned) = 0;
};

// Plans every allowed size: the very code that runs later. The error names the job field and the
// size. Before each size `give_up` is asked; what it answers, when not OK, is the result.
absl::Status CheckAllSizes(
    Planner& planner, const plan::JobSpec& spec, const std::function<absl::Status()>& give_up = [] {
      return absl::OkStatus();
    });

}  // namespace ravel::coordinator
