#pragma once

// Norms of every tensor in the steps that ask for them: measured on each rank around the update,
// combined from the messages of the step after it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/optim/norm_tree.h"
#include "worker/optim/step_messages.h"
#include "worker/shard/host_access.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Norms of every tensor in one step, by index in the inventory.
struct TensorNorms {
  int64_t step = 0;              // finished steps, that one included
  std::vector<double> gradient;  // of the divided gradient, before clipping
  std::vector<double> weight;    // before the update
  std::vector<double> update;    // of what the update changed: 0 in a skipped step
};

// Used only from the thread of its rank, or in the order of the program's events.
class NormRecorder {
 public:
  // All outlive it.
  struct Args {
    const plan::ShardingPlan& plan;
    const NormTree& tree;
    const shard::ParameterGroups& groups;
    int rank = 0;
    shard::HostAccess& memory;  // of the arena
  };
  explicit NormRecorder(const Args& args);

  // Runs the update of a group and measures weights before it and what it changes. On a device the
  // host waits and measures, since only some steps do this.
  absl::Status Measure(const shard::ParameterGroup& group, const std::function<void()>& update);
  // This rank's nodes of the groups measured last.
  std::span<const double> weight_nodes() const { return weight_nodes_; }
  std::span<const double> update_nodes() const { return update_nodes_; }

  // A step's gradient norms are known; those of weights and updates are still on each rank.
  void Begin(int64_t step, const StepFacts& facts);
  bool pending() const { return pending_.has_value(); }
  // Nodes of all ranks, if some are pending.
  void Combine(const RankNodes& weights, const RankNodes& updates);
  // This rank's message of what is pending, and those of all ranks.
  std::vector<std::byte> Pack() const;
  void Unpack(std::span<const std::byte> all);
  // The norms of the last complete step. Taken once.
  std::optional<TensorNorms> Take();

 private:
  const Args args_;
  std::vector<double> weight_nodes_;
  std::vector<double> update_nodes_;
  plan::IdVector<plan::GroupId, size_t> first_node_;
  std::optional<TensorNorms> pending_;
  std::optional<TensorNorms> complete_;
};

}  // namespace ravel::optim
