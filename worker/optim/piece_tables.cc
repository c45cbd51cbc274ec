#include "worker/optim/piece_tables.h"

#include <span>
#include <utility>

#include "common/signed_size.h"

namespace ravel::optim {
namespace {

std::vector<kernels::UpdatePiece> PiecesOf(const plan::ShardingPlan& plan,
                                           const shard::ParameterGroup& group) {
  std::vector<kernels::UpdatePiece> pieces;
  if (!group.layout().trainable) {
    return pieces;
  }
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const plan::TensorSpec& tensor = plan.inventory.tensors[piece.tensor];
    piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
      pieces.push_back({.offset = run.offset,
                        .elements = run.elements,
                        .first_index = run.first,
                        .site = tensor.site,
                        .decays = tensor.decay ? 1u : 0u});
    });
  }
  return pieces;
}

}  // namespace

absl::StatusOr<PieceTables> PieceTables::Create(const plan::ShardingPlan& plan,
                                                const shard::ParameterGroups& groups,
                                                shard::HostAccess& memory,
                                                kernels::CudaGpu* gpu) {
  PieceTables made;
  std::vector<int64_t> begins;
  for (const shard::ParameterGroup& group : groups) {
    std::vector<kernels::UpdatePiece> pieces = PiecesOf(plan, group);
    if (gpu != nullptr) {
      pieces = kernels::CutForBlocks(pieces);
    }
    begins.push_back(std::ssize(made.host_));
    made.host_.insert(made.host_.end(), pieces.begin(), pieces.end());
  }
  begins.push_back(std::ssize(made.host_));
  // One more, so that a rank that owns nothing has tables, too: those of no pieces.
  made.host_.push_back({});
  const kernels::UpdatePiece* all = made.host_.data();
  if (gpu != nullptr) {
    const auto bytes = std::as_bytes(std::span<const kernels::UpdatePiece>(made.host_));
    auto device = gpu->AllocateDevice(static_cast<int64_t>(bytes.size()));
    if (!device.ok()) {
      return Annotate(device.status(), "piece tables");
    }
    made.device_ = *std::move(device);
    RETURN_IF_ERROR(memory.Write(bytes, made.device_.data()));
    all = static_cast<const kernels::UpdatePiece*>(made.device_.data());
  }
  for (int64_t group = 0; group < std::ssize(groups); ++group) {
    made.tables_.push_back(
        {.pieces = all + At(begins, group), .count = At(begins, group + 1) - At(begins, group)});
  }
  return made;
}

}  // namespace ravel::optim
