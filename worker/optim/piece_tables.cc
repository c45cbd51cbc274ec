#include "worker/optim/piece_tables.h"

#include <span>
#include <utility>

#include "common/model/state_groups.h"
#include "common/signed_size.h"

namespace ravel::optim {
namespace {

static_assert(plan::kStateGroup == kernels::kUpdateGroup);

std::vector<kernels::UpdatePiece> PiecesOf(const plan::ShardingPlan& plan,
                                           const shard::ParameterGroup& group) {
  std::vector<kernels::UpdatePiece> pieces;
  if (!group.layout().trainable) {
    return pieces;
  }
  const std::vector<plan::OwnedPiece>& scales = group.scale_pieces();
  const bool in_groups = plan::UpdatesInGroups(plan.options.optimizer, plan.options.state_types);
  for (size_t i = 0; i < group.pieces().size(); ++i) {
    const plan::OwnedPiece& piece = group.pieces()[i];
    const plan::TensorSpec& tensor = plan.inventory.tensors[piece.tensor];
    int64_t scale = scales.empty() ? 0 : scales[i].shard_offset;
    piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
      pieces.push_back({.offset = run.offset,
                        .elements = run.elements,
                        .first_index = run.first,
                        .site = tensor.site,
                        .decays = tensor.decay ? 1u : 0u,
                        .row = in_groups ? plan::StateRow(tensor.shape) : 0,
                        .first_scale = scale});
      if (!scales.empty()) {
        scale += plan::StateGroups(tensor.shape, run.first, run.first + run.elements);
      }
    });
  }
  return pieces;
}

// Groups of state that columns of another rank cut do not begin where a row's do here.
std::vector<kernels::UpdatePiece> WeightsOf(const plan::ShardingPlan& plan,
                                            const shard::ParameterGroup& group) {
  std::vector<kernels::UpdatePiece> weights;
  if (!group.layout().trainable || group.recipe() == plan::Recipe::kNone) {
    return weights;
  }
  const std::vector<plan::OwnedPiece>& scales = group.scale_pieces();
  for (size_t i = 0; i < group.pieces().size(); ++i) {
    const plan::OwnedPiece& piece = group.pieces()[i];
    const plan::TensorSpec& tensor = plan.inventory.tensors[piece.tensor];
    const bool whole_rows = piece.item.length[1] == tensor.shape[1];
    const bool whole_groups = piece.item.length[1] % plan::kStateGroup == 0 &&
                              piece.item.offset[1] % plan::kStateGroup == 0;
    if (!scales.empty() && !whole_rows && !whole_groups) {
      return {};
    }
    weights.push_back({.offset = piece.shard_offset,
                       .elements = piece.elements(),
                       .first_index = piece.elements() > 0 ? piece.IndexOf(tensor.shape, 0) : 0,
                       .site = tensor.site,
                       .decays = tensor.decay ? 1u : 0u,
                       .row = tensor.shape[1],
                       .first_scale = scales.empty() ? 0 : scales[i].shard_offset});
  }
  return weights;
}

}  // namespace

void PieceTables::Append(const std::vector<kernels::UpdatePiece>& pieces) {
  begins_.push_back(std::ssize(host_));
  host_.insert(host_.end(), pieces.begin(), pieces.end());
}

void PieceTables::PlaceTables(const kernels::UpdatePiece* all) {
  for (size_t group = 0; group < begins_.size(); ++group) {
    const int64_t end = group + 1 < begins_.size() ? begins_[group + 1] : std::ssize(host_) - 1;
    tables_.push_back({.pieces = all + begins_[group], .count = end - begins_[group]});
  }
}

PieceTables PieceTables::OnHost(const plan::ShardingPlan& plan,
                                const shard::ParameterGroups& groups) {
  PieceTables made;
  for (const shard::ParameterGroup& group : groups) {
    made.Append(PiecesOf(plan, group));
  }
  made.host_.push_back({});  // so that a rank that owns nothing has tables, too: those of no pieces
  made.PlaceTables(made.host_.data());
  return made;
}

absl::StatusOr<PieceTables> PieceTables::OnDevice(const plan::ShardingPlan& plan,
                                                  const shard::ParameterGroups& groups,
                                                  shard::HostAccess& memory,
                                                  kernels::CudaGpu& gpu) {
  PieceTables made;
  for (const shard::ParameterGroup& group : groups) {
    made.Append(kernels::CutForBlocks(PiecesOf(plan, group)));
    made.weights_.push_back(WeightsOf(plan, group));
  }
  made.host_.push_back({});  // as on a host
  const auto bytes = std::as_bytes(std::span<const kernels::UpdatePiece>(made.host_));
  auto device = gpu.AllocateDevice(static_cast<int64_t>(bytes.size()));
  if (!device.ok()) {
    return Annotate(device.status(), "piece tables");
  }
  made.device_ = *std::move(device);
  RETURN_IF_ERROR(memory.Write(bytes, made.device_.data()));
  made.PlaceTables(static_cast<const kernels::UpdatePiece*>(made.device_.data()));
  return made;
}

}  // namespace ravel::optim
