#include "worker/shard/parameter_group.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/model/state_groups.h"
#include "common/plan/layout/state_scales.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_buffers.h"

namespace ravel::shard {
namespace {

using plan::BufferKind;

plan::BufferId FindOf(const plan::ShardingPlan& plan,
                      BufferKind kind,
                      plan::GroupId group,
                      int call = 0,
                      int slot = 0) {
  return plan::FindBuffer(plan.buffers, {.kind = kind, .owner = group, .call = call, .slot = slot});
}

}  // namespace

ParameterGroup::ParameterGroup(const plan::ShardingPlan& plan,
                               const ArenaBuffers& buffers,
                               plan::GroupId group,
                               int rank)
    : index_(group),
      inventory_(&plan.inventory),
      layout_(&plan.groups[group]),
      cuts_sums_(plan.groups[group].trainable && plan::CutsSums(plan.moves, group)),
      pieces_(plan::StoredPieces(plan, group, rank)),
      runs_(RunsOf(pieces_)),
      shard_elements_(plan::StoredRange(plan, group, rank).size()),
      slice_elements_(plan::InnerShardElements(plan, group)),
      optimizer_(plan.options.optimizer),
      updates_in_groups_(plan::UpdatesInGroups(plan.options.optimizer, plan.options.state_types)) {
  const plan::BufferId stored = plan::StoredWeight(plan, group);
  CHECK_EQ(buffers.elements(stored), shard_elements_);
  recipe_ = layout_->recipe;
  weight_bytes_ = DTypeBytes(plan.options.weight_type);
  if (plan::MainTypeOf(*layout_, plan.options) == DType::kF32) {
    main_weight_ = buffers.floats(stored);
  } else {
    remainder_ = buffers.bytes(stored);
  }
  const plan::BufferId source = plan::GatherSource(plan, group);
  model_weight_ = buffers.bytes(source);
  const bool quantized = recipe_ != plan::Recipe::kNone;
  rounds_weights_ = !quantized && plan.options.weight_type != DType::kF32;
  weight_type_ = rounds_weights_ ? plan.options.weight_type : DType::kBF16;
  stored_model_weight_ = reinterpret_cast<std::byte*>(main_weight_);
  if (rounds_weights_ || quantized) {
    const int64_t first =
        cuts_sums_ ? PlaceOf(plan.mesh, rank).outer * shard_elements_ : int64_t{0};
    CHECK_LE(ModelWeightBytes(first + shard_elements_), plan.buffers[source].bytes);
    stored_model_weight_ = model_weight_ + ModelWeightBytes(first);
  }
  if (quantized) {
    BindCodes();
  }
  if (layout_->trainable) {
    const auto states = static_cast<int>(plan::BufferStatesOf(optimizer_).size());
    for (int slot = 0; slot < states; ++slot) {
      At(states_, slot) = {.data = buffers.bytes(FindOf(plan, BufferKind::kState, group, 0, slot)),
                           .dtype = plan::StateBufferType(plan.options, slot)};
      CHECK(At(states_, slot).data != nullptr);
      BindScales(plan, buffers, slot);
    }
    BindGradients(plan, buffers, rank);
  }
}

void ParameterGroup::BindCodes() {
  for (const plan::OwnedPiece& piece : pieces_) {
    const int64_t columns = piece.item.length[1];
    const int64_t rows = DivExact(piece.elements(), columns);
    TensorView codes = MatrixView(nullptr, rows, plan::CodeBytes(recipe_, columns));
    codes.dtype = DType::kU8;
    codes.data = stored_model_weight_ + ModelWeightBytes(piece.shard_offset);
    quant_pieces_.push_back(
        {.tensor = piece.tensor,
         .first_row = DivExact(piece.range.begin, columns),
         .main_weight = MatrixView(main_weight_ + piece.shard_offset, rows, columns),
         .codes = codes});
  }
}

void ParameterGroup::BindScales(const plan::ShardingPlan& plan,
                                const ArenaBuffers& buffers,
                                int slot) {
  State& state = At(states_, slot);
  if (!plan::IsFp8State(state.dtype)) {
    return;
  }
  const plan::BufferId scales = FindOf(plan, BufferKind::kStateScale, index_, 0, slot);
  state.scales = buffers.bytes(scales);
  state.scale_count = buffers.elements(scales);
  scale_pieces_ = plan::ScalePieces(plan.inventory, pieces_, pieces_);
  scale_rows_.clear();
  for (const plan::OwnedPiece& piece : pieces_) {
    scale_rows_.push_back(plan::StateRow(plan.inventory.tensors[piece.tensor].shape));
  }
}

std::vector<plan::OwnedPiece> ParameterGroup::ScalesOf(
    std::span<const plan::OwnedPiece> pieces) const {
  return plan::ScalePieces(*inventory_, pieces_, pieces);
}

int64_t ParameterGroup::scale_count() const {
  return scale_pieces_.empty()
             ? 0
             : scale_pieces_.back().shard_offset + scale_pieces_.back().elements();
}

void ParameterGroup::VisitScales(
    const std::function<void(int64_t, int64_t, int64_t)>& visit) const {
  for (size_t i = 0; i < scale_pieces_.size(); ++i) {
    const int64_t row = scale_rows_[i];
    const int64_t elements = pieces_[i].elements();
    int64_t scale = scale_pieces_[i].shard_offset;
    for (int64_t done = 0; done < elements;) {
      const int64_t count = std::min({plan::kStateGroup, row - done % row, elements - done});
      const int64_t begin = pieces_[i].shard_offset + done;
      visit(begin, begin + count, scale++);
      done += count;
    }
  }
}

ParameterGroup::Stored ParameterGroup::StoredAt(int64_t at, int64_t elements) const {
  CHECK(at >= 0 && at + elements <= shard_elements_);
  const auto view = [&](std::byte* data, DType dtype) {
    TensorView found = VectorView(nullptr, elements);
    found.dtype = dtype;
    found.data = ElementAt(data, at, dtype);
    return found;
  };
  Stored stored = {
      .main_weight = view(reinterpret_cast<std::byte*>(main_weight_), DType::kF32),
      .model_weight = view(rounds_weights_ ? stored_model_weight_ : nullptr, weight_type_),
      .remainder = view(remainder_, DType::kI16),
      .states = {},
      .scales = {}};
  for (size_t slot = 0; slot < states_.size(); ++slot) {
    stored.states[slot] = view(states_[slot].data, states_[slot].dtype);
    stored.scales[slot] = VectorView(nullptr, states_[slot].scale_count);
    stored.scales[slot].dtype = DType::kU8;
    stored.scales[slot].data = states_[slot].scales;
  }
  return stored;
}

void ParameterGroup::BindGradients(const plan::ShardingPlan& plan,
                                   const ArenaBuffers& buffers,
                                   int rank) {
  const plan::LaneMap& lanes = plan.lanes;
  const MeshPlace place = PlaceOf(plan.mesh, rank);
  const std::vector<ShardRun> slice =
      RunsOf(plan::PiecesOf(plan, index_, rank, plan::SlicePlacements()));
  const auto counter = [&](BufferKind kind,
                           int call,
                           const plan::LaneMap& map,
                           const std::vector<ShardRun>& runs) -> std::optional<LaneCounter> {
    std::vector<float*> slots;
    for (int slot = 0; slot < plan::CounterBuffers(map); ++slot) {
      const plan::BufferId id = FindOf(plan, kind, index_, call, slot);
      if (id >= 0) {
        slots.push_back(buffers.floats(id));
      }
    }
    return slots.empty() ? std::nullopt
                         : std::make_optional<LaneCounter>(std::move(slots), map, runs);
  };
  const std::vector<ShardRun> whole = RunsOf(plan::PiecesOf(plan, index_, rank, {}));
  for (int call = 0;; ++call) {
    GradientCall made;
    made.inner = counter(BufferKind::kMainGrad, call, lanes.Inner(), slice);
    if (!made.inner.has_value()) {
      break;
    }
    if (plan.moves.of_groups[index_].each_turn.empty()) {
      made.local = counter(BufferKind::kLocalGrad, call, lanes.Local(), whole);
      CHECK(made.local.has_value());
    }
    if (lanes.replicas > 1) {
      const int64_t part = DivExact(slice_elements_, lanes.replicas);
      made.outer = counter(BufferKind::kOuterGrad,
                           call,
                           lanes.Outer(),
                           RunsWithin(slice, place.outer * part, (place.outer + 1) * part));
      CHECK(made.outer.has_value());
    }
    gradients_.push_back(std::move(made));
  }
  CHECK_MSG(!gradients_.empty(), "a trained group without a gradient buffer");
  full_gradient_ = buffers.floats(FindOf(plan, BufferKind::kFullGrad, index_));
  CHECK_EQ(reduced(0), buffers.floats(plan::MeasuredGradient(plan, index_)));
  optimizer_gradient_ = buffers.floats(plan::UpdateGradient(plan, index_));
  measured_pieces_ = plan::CountedPieces(plan, index_, rank);
}

float* ParameterGroup::reduced(int call) const {
  const GradientCall& gradient = Of(call);
  return cuts_sums_ ? gradient.outer->sum() : gradient.inner->sum();
}

void ParameterGroup::JoinCalls(kernels::Stream& stream) {
  const std::vector<ShardRun>& runs =
      cuts_sums_ ? gradients_.front().outer->runs() : gradients_.front().inner->runs();
  for (int call = 1; call < calls(); ++call) {
    AddRuns(stream, runs, reduced(call), reduced(0));
  }
}

}  // namespace ravel::shard
