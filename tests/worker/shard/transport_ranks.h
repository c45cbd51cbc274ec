#pragma once

// Ranks as threads on a transport of hosts, which run a plan with modules and statistics that a
// test makes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/model/module.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/parameter_group.h"

namespace ravel::shard {

// Runs `body` on every rank, each a thread with a communicator of its own: local, shm or gloo.
void RunRanks(const std::string& transport,
              size_t size,
              const std::function<void(comm::Communicator&)>& body);

struct ProgramRun {
  const plan::ShardingPlan& plan;
  // The module of a unit, on a rank of that place on the tensor axis.
  std::function<std::unique_ptr<model::Module>(plan::UnitId unit, int64_t coordinate)> module;
  std::function<std::unique_ptr<StepActions>(ParameterGroups& groups)> actions;
};
// One rank: its arena, then two steps, each with an evaluation behind it. Fresh staging is
// poisoned.
absl::Status RunPrograms(const ProgramRun& run, comm::Communicator& communicator);

}  // namespace ravel::shard
