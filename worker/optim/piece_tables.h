#pragma once

// The pieces that a rank updates, as tables that kernels read: made once, when a plan is bound.

#include <cstdint>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/update.h"
#include "worker/shard/host_access.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Thread-compatible.
class PieceTables {
 public:
  PieceTables() = default;
  // The tables of all trainable groups.
  static PieceTables OnHost(const plan::ShardingPlan& plan, const shard::ParameterGroups& groups);
  // The same in memory of a device, with pieces cut for blocks. ResourceExhausted where the device
  // has no room.
  static absl::StatusOr<PieceTables> OnDevice(const plan::ShardingPlan& plan,
                                              const shard::ParameterGroups& groups,
                                              shard::HostAccess& memory,
                                              kernels::CudaGpu& gpu);

  kernels::PieceTable of(plan::GroupId group) const { return tables_[group]; }
  // On a device, of a group with a recipe: its quantized pieces, in their order, each as rows that
  // are `row` global indices apart, if an update can take each of them as a matrix; else none.
  std::span<const kernels::UpdatePiece> weights(plan::GroupId group) const {
    return weights_[group];
  }
  // Device memory beside the arena.
  int64_t device_bytes() const { return device_.bytes(); }

 private:
  // Adds a group's pieces.
  void Append(const std::vector<kernels::UpdatePiece>& pieces);
  // The tables of the groups in order, whose pieces lie at `all`.
  void PlaceTables(const kernels::UpdatePiece* all);

  std::vector<int64_t> begins_;  // of each group's pieces
  std::vector<kernels::UpdatePiece> host_;
  kernels::CudaMemory device_;
  plan::IdVector<plan::GroupId, kernels::PieceTable> tables_;
  plan::IdVector<plan::GroupId, std::vector<kernels::UpdatePiece>> weights_;
};

}  // namespace ravel::optim
