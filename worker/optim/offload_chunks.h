#pragma once

// Groups whose state is offloaded, cut into the parts that are updated at a time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "kernels/update.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Elements [begin, end) of a group, in blocks (kernels::CutForBlocks).
struct OffloadChunk {
  plan::GroupId group;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<kernels::UpdatePiece> pieces;

  int64_t elements() const { return end - begin; }
};

// Trainable groups in the order in which a step updates them.
std::vector<plan::GroupId> UpdateOrder(const plan::ShardingPlan& plan);
// True if some state of the group is offloaded.
bool IsOffloaded(const plan::ShardingPlan& plan, plan::GroupId group);
// Blocks of pieces are put together until a chunk is full. `cuts`: ascending offsets, at rows of
// pieces; what lies between two of them is in one chunk where it is not longer than that.
std::vector<OffloadChunk> CutIntoChunks(plan::GroupId group,
                                        const kernels::PieceTable& pieces,
                                        int64_t chunk_elements,
                                        std::span<const int64_t> cuts = {});
// The offsets between which the weights of a group share no scales, and how far apart they are at
// most; empty where scales of a block are made of more than its own elements.
struct ScaleCuts {
  std::vector<int64_t> offsets;
  int64_t widest = 0;
};
ScaleCuts ScaleCutsOf(const shard::ParameterGroup& group);
// The same pieces in parts of a quantized group, after whose update the host finds the weights in
// its caches: not less than 2^16 elements, of which weights, gradient and moments of fp32 stay in a
// second level of 2 MiB. Scales of whole blocks are in one part where those are not longer than
// `most`.
std::vector<OffloadChunk> CutForCaches(const shard::ParameterGroup& group,
                                       const kernels::PieceTable& pieces,
                                       int64_t most);
using VisitUpdated =
    std::function<void(const quant::QuantPiece& piece, int64_t first, int64_t count)>;
// Calls `visit` with the elements of quantized pieces of a group that lie in its update pieces,
// which are of host memory and in order.
void VisitPiecesOf(const shard::ParameterGroup& group,
                   const kernels::PieceTable& pieces,
                   const VisitUpdated& visit);
// The ranges that a chunk's update reads and writes, of memory for which `holds` is true.
std::vector<std::span<std::byte>> MemoryOf(const shard::ParameterGroup& group,
                                           const OffloadChunk& chunk,
                                           const std::function<bool(const void*)>& holds);

}  // namespace ravel::optim
