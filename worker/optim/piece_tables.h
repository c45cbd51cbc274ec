#pragma once

// The pieces that a rank updates, as tables that kernels read: made once, when a plan is bound.

#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_device.h"
#include "kernels/update.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Thread-compatible.
class PieceTables {
 public:
  PieceTables() = default;
  // Makes the tables of all trainable groups. `gpu`: where the arena is on a device; then the
  // tables are in memory of its own, with pieces cut for blocks. ResourceExhausted where the device
  // has no room.
  static absl::StatusOr<PieceTables> Create(const plan::ShardingPlan& plan,
                                            const shard::ParameterGroups& groups,
                                            shard::HostAccess& memory,
                                            kernels::CudaGpu* gpu);

  kernels::PieceTable of(plan::GroupId group) const { return tables_[group]; }
  // Device memory beside the arena.
  int64_t device_bytes() const { return device_.bytes(); }

 private:
  std::vector<kernels::UpdatePiece> host_;
  kernels::CudaMemory device_;
  plan::IdVector<plan::GroupId, kernels::PieceTable> tables_;
};

}  // namespace ravel::optim
