// Looks for NaN and infinity in what each instruction of one step wrote, and names the first one by
// unit, tensor and index. Values of a device are copied to the host piece by piece.

#include "worker/shard/finite_check.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;

// Coordinates of a row-major index.
std::string CoordinateText(const Shape& shape, int64_t index) {
  std::vector<int64_t> coordinates(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    coordinates[i] = index % shape[i];
    index /= shape[i];
  }
  return absl::StrCat("[", absl::StrJoin(coordinates, ", "), "]");
}

}  // namespace

const float* FiniteCheck::Fetch(const void* values, DType dtype, int64_t count) {
  if (dtype == DType::kF32 && args_.memory.in_place()) {
    return static_cast<const float*>(values);
  }
  fetched_.resize(Size(count));
  if (dtype == DType::kF32) {
    failure_.Update(args_.memory.Read(values, std::as_writable_bytes(std::span<float>(fetched_))));
    return failure_.ok() ? fetched_.data() : nullptr;
  }
  CHECK(dtype == DType::kBF16 || dtype == DType::kF16);
  narrow_.resize(Size(count));
  failure_.Update(args_.memory.Read(values, std::as_writable_bytes(std::span<uint16_t>(narrow_))));
  std::transform(narrow_.begin(), narrow_.end(), fetched_.begin(), [dtype](uint16_t bits) {
    return dtype == DType::kBF16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  });
  return failure_.ok() ? fetched_.data() : nullptr;
}

void FiniteCheck::CheckValues(const void* from, DType dtype, int64_t count, const Place& place) {
  if (found_.has_value()) {
    return;
  }
  const float* values = Fetch(from, dtype, count);
  if (values == nullptr) {
    return;
  }
  for (int64_t i = 0; i < count && !found_.has_value(); ++i) {
    if (!std::isfinite(values[i])) {
      const int64_t index = place.piece == nullptr ? i : place.piece->IndexOf(place.shape, i);
      found_ = NonFinite{
          .order = order_,
          .text = absl::StrCat(
              where_, ": ", place.name, " ", CoordinateText(place.shape, index), " = ", values[i])};
    }
  }
}

bool FiniteCheck::RanHere(const Instruction& instruction, const ReplayTurn& turn) const {
  const bool lane = plan::LaneOf(args_.plan, turn.slot.turn, args_.rank) >= 0;
  return lane && (turn.used.empty() || turn.used[instruction.unit]);
}

absl::Status FiniteCheck::Completed(const BoundInstruction& bound, const ReplayTurn& turn) {
  ++order_;
  if (found_.has_value()) {
    return absl::OkStatus();
  }
  const Instruction& instruction = bound.instruction;
  const plan::UnitId unit = instruction.unit;
  where_ = absl::StrCat("rank ",
                        args_.rank,
                        ", lane ",
                        plan::LaneOf(args_.plan, turn.slot.turn, args_.rank),
                        ", micro-batch ",
                        turn.slot.micro_batch,
                        ", unit ",
                        unit < 0 ? "-" : args_.plan.inventory.units[unit].name,
                        ", call ",
                        instruction.call,
                        ", ",
                        plan::OpName(plan::LabelOf(args_.plan.moves, instruction)),
                        " of phase ",
                        plan::PhaseName(turn.slot.phase),
                        ", turn ",
                        turn.slot.turn);
  switch (instruction.op) {
    case OpCode::kForward:
    case OpCode::kRecompute:
    case OpCode::kBackward:
      if (bound.last_step && RanHere(instruction, turn)) {
        CheckUnit(bound);
      }
      break;
    default:
      if (instruction.group >= 0) {
        CheckGroup(instruction, turn);
      }
      break;
  }
  return failure_;
}

void FiniteCheck::CheckActivations(const std::vector<plan::ActivationSpec>& specs,
                                   const std::vector<TensorView>& views,
                                   const char* role) {
  for (size_t i = 0; i < views.size() && i < specs.size(); ++i) {
    const DType dtype = views[i].dtype;
    if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) {
      CheckValues(views[i].data,
                  views[i].dtype,
                  views[i].elements(),
                  {.name = absl::StrCat(role, " ", specs[i].name), .shape = specs[i].shape});
    }
  }
}

void FiniteCheck::CheckUnit(const BoundInstruction& bound) {
  const plan::ModelInventory& inventory = args_.plan.inventory;
  const plan::UnitSpec& unit = inventory.units[bound.instruction.unit];
  const bool backward = bound.instruction.op == OpCode::kBackward;
  // A backward may use `saved` as scratch.
  if (!backward) {
    CheckActivations(unit.saved, bound.memory.saved, "saved activation");
    CheckActivations(unit.remade, bound.memory.remade, "activation");
  }
  const std::string stream = backward ? "dhidden" : "hidden";
  for (size_t i = 0; i < inventory.shared.size(); ++i) {
    if (inventory.shared[i].name == stream) {
      CheckActivations({inventory.shared[i]}, {bound.memory.shared[i]}, "residual stream");
    }
  }
  size_t next = 0;
  for (const std::vector<plan::TensorId>* tensors : {&unit.tensors, &unit.borrowed}) {
    for (const plan::TensorId tensor : *tensors) {
      if (!backward || !bound.gradients[next].present()) {
        ++next;
        continue;
      }
      const TensorView& view = bound.gradients[next++];
      CheckPieces("gradient of", PartsOf(tensor), view.data, view.dtype);
    }
  }
}

std::vector<plan::OwnedPiece> FiniteCheck::PartsOf(plan::TensorId tensor) const {
  const plan::ShardingPlan& plan = args_.plan;
  std::vector<plan::OwnedPiece> parts;
  for (const plan::GroupId group : plan.groups.ids()) {
    const std::vector<plan::TensorId>& tensors = plan.groups[group].tensors;
    if (std::find(tensors.begin(), tensors.end(), tensor) != tensors.end()) {
      parts = plan::PiecesOf(plan, group, args_.rank, {});
      break;
    }
  }
  std::erase_if(parts, [&](const plan::OwnedPiece& part) { return part.tensor != tensor; });
  const int64_t start = parts.empty() ? 0 : parts.front().shard_offset;
  for (plan::OwnedPiece& part : parts) {
    part.shard_offset -= start;
  }
  return parts;
}

void FiniteCheck::CheckPieces(const char* role,
                              const std::vector<plan::OwnedPiece>& pieces,
                              void* base,
                              DType dtype) {
  for (const plan::OwnedPiece& piece : pieces) {
    const plan::TensorSpec& spec = args_.plan.inventory.tensors[piece.tensor];
    CheckValues(ElementAt(base, piece.shard_offset, dtype),
                dtype,
                piece.elements(),
                {.name = absl::StrCat(role, " ", spec.name), .shape = spec.shape, .piece = &piece});
  }
}

void FiniteCheck::CheckGroup(const Instruction& instruction, const ReplayTurn& turn) {
  const plan::ShardingPlan& plan = args_.plan;
  ParameterGroup& group = args_.groups[instruction.group];
  const auto pieces = [&](plan::Placements placements) {
    return plan::PiecesOf(plan, instruction.group, args_.rank, std::move(placements));
  };
  switch (plan::LabelOf(plan.moves, instruction)) {
    case plan::OpLabel::kGather:
      if (group.recipe() != plan::Recipe::kNone) {
        break;  // codes
      }
      CheckPieces("weight",
                  pieces({}),
                  args_.buffers.bytes(plan::BufferOf(instruction, plan::Role::kWeights)),
                  plan.options.weight_type);
      break;
    case plan::OpLabel::kReduceScatter: {
      const int64_t turns = plan.lanes.Inner().turns();
      if (turns == 1 || turn.slot.turn + 1 == turns) {  // else the sum is not complete
        CheckPieces("summed gradient of",
                    pieces(plan::SlicePlacements()),
                    group.inner(instruction.call).sum());
      }
      break;
    }
    case plan::OpLabel::kJoinGradients:
    case plan::OpLabel::kOuterReduce:
      CheckPieces("gradient summed over replicas and calls of",
                  pieces(plan::MeasuredPlacements(plan, instruction.group)),
                  group.reduced(instruction.op == OpCode::kJoinGradients ? 0 : instruction.call));
      break;
    default:
      break;
  }
}

}  // namespace ravel::shard
