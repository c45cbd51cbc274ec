#pragma once

// One rank's share of a parameter group: the weights it updates with their moments, the shard that
// it offers to gathers (the same memory, or bf16), and the sums of its gradients.

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/model/recipes.h"
#include "common/plan/layout/owned_boxes.h"
#include "common/plan/sharding_plan.h"
#include "common/signed_size.h"
#include "kernels/stream.h"
#include "worker/quant/quant_state.h"
#include "worker/shard/flat_buffer.h"
#include "worker/shard/lane_counter.h"

namespace ravel::shard {

class ParameterGroup {
 public:
  ParameterGroup(const plan::ShardingPlan& plan,
                 const ArenaBuffers& buffers,
                 plan::GroupId group,
                 int rank);

  const plan::GroupLayout& layout() const { return *layout_; }
  plan::GroupId index() const { return index_; }

  // Pieces that this rank updates, or, if frozen, holds: offsets are into main_weight, the states
  // and optimizer_gradient, each [shard_elements]; the latter two are null for frozen groups.
  // main_weight is null where it is kept as remainders: StoredAt has all of them
  // (worker/optim/stored_state.h: their values).
  const std::vector<plan::OwnedPiece>& pieces() const { return pieces_; }
  const std::vector<ShardRun>& runs() const { return runs_; }
  int64_t shard_elements() const { return shard_elements_; }
  float* main_weight() const { return main_weight_; }
  plan::OptimizerKind optimizer() const { return optimizer_; }
  // True if updates take whole groups: a state is fp8, or they are of two types.
  bool updates_in_groups() const { return updates_in_groups_; }
  // `elements` from `at` of what this rank stores, in their types; absent: not there.
  struct Stored {
    TensorView main_weight;   // fp32
    TensorView model_weight;  // bf16
    TensorView remainder;     // i16: main weights are model weights and these
    // By BufferStatesOf: fp32, bf16 or fp8; and all scales of those that are fp8, wherever `at` is.
    std::array<TensorView, plan::kMaxBufferStates> states;
    std::array<TensorView, plan::kMaxBufferStates> scales;
  };
  Stored StoredAt(int64_t at, int64_t elements) const;
  // The scales of each of pieces(), as pieces of the tensors of scales, with offsets into those of
  // this rank; empty where no state is fp8.
  const std::vector<plan::OwnedPiece>& scale_pieces() const { return scale_pieces_; }
  // Those of some of pieces(), or of parts of them.
  std::vector<plan::OwnedPiece> ScalesOf(std::span<const plan::OwnedPiece> pieces) const;
  // Scales of one state.
  int64_t scale_count() const;
  // visit(begin, end, scale) for each group of elements [begin, end) of what this rank stores.
  void VisitScales(const std::function<void(int64_t, int64_t, int64_t)>& visit) const;
  float* optimizer_gradient() const { return optimizer_gradient_; }

  // This rank's input to the gather of the group: [slice_elements] of
  // ProgramOptions::weight_type.
  std::byte* model_weight() const { return model_weight_; }
  // The part that this rank stores of it, [shard_elements]: the main weight where both are fp32,
  // else the bf16 that it is rounded to, half away from zero, whenever it changes; or codes.
  std::byte* stored_model_weight() const { return stored_model_weight_; }
  bool rounds_weights() const { return rounds_weights_; }
  // True if that bf16 and a remainder are the main weight: nothing has to be rounded after it.
  bool keeps_remainders() const { return remainder_ != nullptr; }
  int64_t slice_elements() const { return slice_elements_; }
  // Bytes of so many elements of model weights.
  int64_t ModelWeightBytes(int64_t elements) const {
    return recipe_ == plan::Recipe::kNone ? elements * weight_bytes_
                                          : plan::CodeBytes(recipe_, elements);
  }
  // kNone: model weights are what modules compute in, else the recipe's codes.
  plan::Recipe recipe() const { return recipe_; }
  // This rank's part of a quantized group, tensor by tensor: whole rows.
  const std::vector<quant::QuantPiece>& quant_pieces() const { return quant_pieces_; }

  // Gradient calls: a tied table has two, the head's and then its own.
  int calls() const { return static_cast<int>(gradients_.size()); }
  // Counter over this rank's lanes, full-size; nullptr where gradients are reduced in every turn.
  LaneCounter* local(int call) { return Ptr(Of(call).local); }
  // Counter over the ranks of this replica, a slice.
  LaneCounter& inner(int call) { return *Of(call).inner; }
  // Counter over replicas, this replica's sub-piece of the slice; nullptr without replicas.
  LaneCounter* outer(int call) { return Ptr(Of(call).outer); }
  float* full_gradient() const { return full_gradient_; }
  // Adds the sums of all calls into the first.
  void JoinCalls(kernels::Stream& stream);
  // The gradient sum of a call after all reduces: a slice, or its sub-piece.
  float* reduced(int call) const;

  // Pieces of the final gradient that the statistics count on this rank, each element on exactly
  // one: offsets into reduced(0).
  const std::vector<plan::OwnedPiece>& measured_pieces() const { return measured_pieces_; }

 private:
  struct GradientCall {
    std::optional<LaneCounter> local;
    std::optional<LaneCounter> inner;
    std::optional<LaneCounter> outer;
  };
  static LaneCounter* Ptr(std::optional<LaneCounter>& counter) {
    return counter.has_value() ? &*counter : nullptr;
  }
  GradientCall& Of(int call) { return At(gradients_, call); }
  const GradientCall& Of(int call) const { return At(gradients_, call); }
  void BindScales(const plan::ShardingPlan& plan, const ArenaBuffers& buffers, int slot);
  void BindCodes();
  void BindGradients(const plan::ShardingPlan& plan, const ArenaBuffers& buffers, int rank);

  const plan::GroupId index_;
  const plan::ModelInventory* inventory_;
  const plan::GroupLayout* layout_;
  bool cuts_sums_ = false;  // the final sums are this replica's parts of a slice
  std::vector<plan::OwnedPiece> pieces_;
  std::vector<plan::OwnedPiece> measured_pieces_;
  std::vector<plan::OwnedPiece> scale_pieces_;
  std::vector<int64_t> scale_rows_;  // elements of a row of each piece
  std::vector<ShardRun> runs_;
  int64_t shard_elements_ = 0;
  int64_t slice_elements_ = 0;
  float* main_weight_ = nullptr;
  std::byte* model_weight_ = nullptr;
  std::byte* stored_model_weight_ = nullptr;
  bool rounds_weights_ = false;
  DType weight_type_ = DType::kBF16;  // where it rounds
  plan::Recipe recipe_ = plan::Recipe::kNone;
  int64_t weight_bytes_ = 4;  // of an element that is no code
  std::vector<quant::QuantPiece> quant_pieces_;
  std::byte* remainder_ = nullptr;
  struct State {
    std::byte* data = nullptr;
    DType dtype = DType::kF32;
    std::byte* scales = nullptr;
    int64_t scale_count = 0;
  };
  plan::OptimizerKind optimizer_;
  bool updates_in_groups_ = false;
  std::array<State, plan::kMaxBufferStates> states_ = {};
  float* full_gradient_ = nullptr;
  float* optimizer_gradient_ = nullptr;
  std::vector<GradientCall> gradients_;
};
using ParameterGroups = plan::IdVector<plan::GroupId, ParameterGroup>;

}  // namespace ravel::shard
