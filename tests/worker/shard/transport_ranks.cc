#include "tests/worker/shard/transport_ranks.h"

#include <barrier>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "worker/comm/communicator_factory.h"
#include "worker/comm/local_communicator.h"
#include "worker/shard/host_replay.h"
#include "worker/shard/unit_executor.h"

namespace ravel::shard {

void RunRanks(const std::string& transport,
              size_t size,
              const std::function<void(comm::Communicator&)>& body) {
  std::vector<std::string> records(size);
  std::barrier all_there(static_cast<std::ptrdiff_t>(size));
  std::vector<std::unique_ptr<comm::Communicator>> groups(size);
  if (transport == "local") {
    groups = *comm::CreateLocalGroup(static_cast<int>(size));
  }
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto meet = [&, rank](std::string_view,
                                  std::string record) -> absl::StatusOr<std::vector<std::string>> {
        records[rank] = std::move(record);
        all_there.arrive_and_wait();
        return records;
      };
      if (groups[rank] == nullptr) {
        auto made = comm::CreateCommunicator({.transport = transport,
                                              .rank = static_cast<int>(rank),
                                              .size = static_cast<int>(size),
                                              .rendezvous = meet,
                                              .host_address = "127.0.0.1",
                                              .timeout = std::chrono::seconds(20)});
        ASSERT_TRUE(made.ok()) << made.status();
        groups[rank] = *std::move(made);
      }
      body(*groups[rank]);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

absl::Status RunPrograms(const ProgramRun& run, comm::Communicator& communicator) {
  const plan::ShardingPlan& plan = run.plan;
  ASSIGN_OR_RETURN(MeshCommunicators mesh,
                   MeshCommunicators::Create(communicator, plan.mesh, plan.moves));
  RETURN_IF_ERROR(communicator.AllocateArena({.private_bytes = plan.memory.private_bytes,
                                              .symmetric_bytes = plan.memory.symmetric_bytes,
                                              .common_bytes = plan.memory.common_bytes,
                                              .common_copies = plan.lanes.replicas}));
  const ArenaBuffers buffers(plan, communicator);
  ParameterGroups groups;
  groups.reserve(plan.groups.size());
  for (const plan::GroupId group : plan.groups.ids()) {
    groups.emplace_back(plan, buffers, group, communicator.rank());
  }
  model::Modules modules;
  for (const plan::UnitId unit : plan.inventory.units.ids()) {
    modules.push_back(run.module(unit, communicator.rank() % plan::TensorRanks(plan.inventory)));
  }
  const std::unique_ptr<StepActions> actions = run.actions(groups);
  HostReplay backend;
  UnitExecutor executor({.plan = plan,
                         .communicators = mesh,
                         .backend = backend,
                         .buffers = buffers,
                         .groups = groups,
                         .modules = modules,
                         .actions = actions.get()},
                        {.poison = true});
  RETURN_IF_ERROR(executor.Prepare());
  for (int64_t step = 1; step <= 2; ++step) {
    for (int64_t program = 0; program < plan.lanes.programs(); ++program) {
      RETURN_IF_ERROR(
          executor.Run({.slot = plan::SlotOf(plan.lanes, program), .used = {}, .step = step}));
    }
    RETURN_IF_ERROR(
        executor.Run({.slot = {.phase = plan::Phase::kEval}, .used = {}, .step = step}));
  }
  return absl::OkStatus();
}

}  // namespace ravel::shard
