#include "tests/worker/shard/synthetic_ranks.h"

#include <array>
#include <memory>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/plan/check/program_checker.h"
#include "worker/comm/local_communicator.h"
#include "worker/shard/host_replay.h"

namespace ravel::shard {
namespace {

// What a rank's modules write now.
struct Writing {
  float value = 0;
};

class ConstantUnit final : public model::Module {
 public:
  explicit ConstantUnit(const Writing* writing)
      : Module({{plan::UnitPass::kBackward, {plan::SegmentKind::kTable}}}), writing_(writing) {}
  void RunSegment(kernels::Stream&,
                  const model::UnitMemory&,
                  plan::UnitPass,
                  plan::SegmentKind) const override {}
  void RunSegment(kernels::Stream&,
                  const model::UnitMemory&,
                  plan::SegmentKind,
                  const std::vector<model::FreshGradient>& gradients) const override {
    for (const model::FreshGradient& gradient : gradients) {
      for (int64_t i = 0; gradient.view.present() && i < gradient.view.elements(); ++i) {
        gradient.view.As<float>()[i] = writing_->value;
      }
    }
  }
  void RunSegment(kernels::Stream&,
                  const model::UnitMemory&,
                  plan::SegmentKind,
                  const std::vector<model::AccumulatingGradient>& gradients) const override {
    for (const model::AccumulatingGradient& gradient : gradients) {
      for (int64_t i = 0; gradient.view.present() && i < gradient.view.elements(); ++i) {
        gradient.view.As<float>()[i] += writing_->value;
      }
    }
  }

 private:
  const Writing* writing_;
};

class Inspector final : public StepActions {
 public:
  explicit Inspector(std::function<void()> inspect) : inspect_(std::move(inspect)) {}
  StatisticsMessages Measure(kernels::Stream&) override {
    return {.mine = &mine_, .all = all_.data(), .words = 1};
  }
  absl::Status Decide(kernels::Stream&) override {
    inspect_();
    return absl::OkStatus();
  }
  absl::Status UpdateGroup(kernels::Stream&, plan::GroupId, const QuantizedUpdate&) override {
    return absl::OkStatus();
  }

 private:
  std::function<void()> inspect_;
  int64_t mine_ = 0;
  std::array<int64_t, 64> all_ = {};  // of any number of ranks here
};

absl::Status RunRank(const SyntheticRun& run,
                     const plan::ShardingPlan& plan,
                     comm::Communicator& communicator) {
  RETURN_IF_ERROR(communicator.AllocateArena({.private_bytes = plan.memory.private_bytes,
                                              .symmetric_bytes = plan.memory.symmetric_bytes,
                                              .common_bytes = plan.memory.common_bytes,
                                              .common_copies = plan.lanes.replicas}));
  ASSIGN_OR_RETURN(MeshCommunicators mesh,
                   MeshCommunicators::Create(communicator, plan.mesh, plan.moves));
  const ArenaBuffers buffers(plan, communicator);
  const int rank = communicator.rank();
  ParameterGroups groups;
  groups.reserve(plan.groups.size());
  for (size_t group = 0; group < plan.groups.size(); ++group) {
    groups.emplace_back(plan, buffers, static_cast<int>(group), rank);
  }
  Writing writing;
  model::Modules modules;
  for (size_t unit = 0; unit < plan.inventory.units.size(); ++unit) {
    modules.push_back(std::make_unique<ConstantUnit>(&writing));
  }
  Inspector actions([&] { run.inspect(plan, rank, groups); });
  HostReplay backend;
  UnitExecutor executor({.plan = plan,
                         .communicators = mesh,
                         .backend = backend,
                         .buffers = buffers,
                         .groups = groups,
                         .modules = modules,
                         .actions = &actions},
                        run.executor);
  RETURN_IF_ERROR(executor.Prepare());
  for (int64_t step = 0; step < run.steps; ++step) {
    for (int64_t program = 0; program < plan.lanes.programs(); ++program) {
      ReplayTurn turn = {.slot = plan::SlotOf(plan.lanes, program), .used = {}, .step = step + 1};
      const int64_t lane = plan.lanes.LaneOf(turn.slot.turn, rank);
      writing.value = static_cast<float>((lane + 1) * (turn.slot.micro_batch + 1));
      for (size_t unit = 0; run.used != nullptr && unit < plan.inventory.units.size(); ++unit) {
        turn.used.push_back(run.used(static_cast<int>(unit), lane, turn.slot.micro_batch));
      }
      RETURN_IF_ERROR(executor.Run(turn));
    }
  }
  return absl::OkStatus();
}

}  // namespace

plan::JobSpec SyntheticJob(int64_t lanes, int64_t micro_batches) {
  plan::ModelConfig model;
  model.vocab_size = 19;
  model.hidden_size = 10;
  model.intermediate_size = 13;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 2;
  model.head_dim = 6;
  model.max_position_embeddings = 8;
  model.tie_word_embeddings = true;
  plan::JobSpec spec;
  spec.model = model;
  spec.data.sequence_length = 4;
  spec.global_batch = lanes * micro_batches;
  spec.micro_batch = 1;
  spec.virtual_ranks = lanes;
  spec.steps = 1;
  spec.allow_padding = true;
  return spec;
}

absl::Status RunSynthetic(const SyntheticRun& run) {
  ASSIGN_OR_RETURN(plan::ShardingPlan plan,
                   plan::BuildShardingPlan({.spec = run.spec, .ranks = run.ranks}));
  if (run.adjust != nullptr) {
    run.adjust(plan);
    RETURN_IF_ERROR(plan::PlanPrograms(plan));
    RETURN_IF_ERROR(plan::CheckPlan(plan));
  }
  ASSIGN_OR_RETURN(const auto communicators, comm::CreateLocalGroup(run.ranks));
  std::vector<absl::Status> results(static_cast<size_t>(run.ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = RunRank(run, plan, *communicators[rank]);
      if (!results[rank].ok()) {
        communicators[rank]->Abort(std::string(results[rank].message()));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const absl::Status& result : results) {
    if (!result.ok() && !absl::IsAborted(result)) {
      return result;
    }
  }
  for (const absl::Status& result : results) {
    RETURN_IF_ERROR(result);
  }
  return absl::OkStatus();
}

double WholeSum(const plan::LaneMap& lanes) {
  const auto v = static_cast<double>(lanes.lanes);
  const auto k = static_cast<double>(lanes.micro_batches);
  return v * (v + 1) / 2 * k * (k + 1) / 2;
}

}  // namespace ravel::shard
