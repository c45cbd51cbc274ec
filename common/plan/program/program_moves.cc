// The table of a plan's collectives. For each group: moves from stored to used weights, and of the
// gradient from addends of `tensor` to staged, between turns, measured, to the step. Equal moves
// share an id, since they share a communicator, a type and a stream.

#include "common/plan/program/program_moves.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/recipes.h"
#include "common/plan/program/program_buffers.h"

namespace ravel::plan {
namespace {

// True if ranks of the axis hold parts or addends: a rank alone has no use for it.
bool NeedsRanks(const Move& move) {
  return move.from.in_flat_family() || move.from.kind == PlacementKind::kPartial;
}

class TableMaker {
 public:
  explicit TableMaker(const MoveRequest& request) : request_(request) {}

  absl::StatusOr<MoveTable> Make() {
    for (const GroupId group : request_.roles.ids()) {
      ASSIGN_OR_RETURN(GroupMoves moves, OfGroup(group));
      table_.of_groups.push_back(std::move(moves));
    }
    table_.statistics = Find(OfAll(MoveOf::kStatistics, MoveKind::kAllGather, DType::kU8));
    if (IsQuantized(request_.inventory)) {
      table_.amax = Find(OfAll(MoveOf::kAmax, MoveKind::kAllReduce, DType::kU32));
    }
    RETURN_IF_ERROR(AddActivations());
    return std::move(table_);
  }

 private:
  // Over the tensor axis. Products run beside sums; what is gathered is read at once, so gathers
  // are in the stream of the products.
  absl::Status AddActivations() {
    // A tensor alone, whose moves are only looked at, has no activations.
    if (request_.mesh.AxisSize(kTensorAxis) == 1 || request_.inventory.units.empty()) {
      return absl::OkStatus();
    }
    const PlacedTensor hidden = {.name = "hidden", .shape = StreamShape(request_.inventory)};
    const int64_t ranks = request_.mesh.AxisSize(kTensorAxis);
    const int64_t chunks = request_.inventory.cut.chunks;
    if (hidden.shape[0] % (ranks * chunks) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("axis ",
                       kTensorAxis,
                       " of ",
                       ranks,
                       " ranks does not divide the ",
                       hidden.shape[0],
                       " tokens of a micro-batch",
                       chunks > 1 ? absl::StrCat(" in ", chunks, " chunks") : ""));
    }
    const auto add = [&](const Placement& from,
                         const Placement& to,
                         DType type,
                         StreamId stream) -> absl::StatusOr<MoveId> {
      ASSIGN_OR_RETURN(Move move,
                       PlanMove(hidden,
                                request_.mesh,
                                {{kTensorAxis, from}},
                                {kTensorAxis, to},
                                BufferUse::kActivation));
      return Find({.of = MoveOf::kActivation,
                   .axes = {kTensorAxis},
                   .move = std::move(move),
                   .type = type,
                   .stream = stream});
    };
    const bool sequence = request_.inventory.cut.sequence;
    const Placement rows = Placement::Shard(0);
    ASSIGN_OR_RETURN((sequence ? table_.activation_scatter : table_.activation_sum),
                     add(Placement::Partial(),
                         sequence ? rows : Placement::Replicate(),
                         DType::kF32,
                         StreamId::kTensor));
    ASSIGN_OR_RETURN(
        table_.activation_gather,
        add(rows, Placement::Replicate(), request_.options.weight_type, StreamId::kCompute));
    return absl::OkStatus();
  }

  ProgramMove OfAll(MoveOf of, MoveKind kind, DType type) const {
    ProgramMove move = {
        .of = of, .axes = {}, .move = {}, .type = type, .stream = StreamId::kReduce};
    move.move.kind = kind;
    for (const MeshAxis& axis : request_.mesh.axes()) {
      move.axes.push_back(axis.name);
    }
    return move;
  }

  absl::StatusOr<GroupMoves> OfGroup(GroupId group) {
    const GroupRoles& roles = request_.roles[group];
    const TensorSpec& tensor = request_.inventory.tensors[request_.groups[group].tensors.front()];
    const PlacedTensor placed = {.name = tensor.name, .shape = tensor.shape};
    weight_type_ = WeightTypeOf(request_.groups[group], request_.options);
    rounds_ = roles.between != roles.staged && request_.options.gradient_wire == WireType::kBF16;
    GroupMoves moves;
    ASSIGN_OR_RETURN(moves.weights, Plan(placed, MoveOf::kWeights, roles.stored, roles.used));
    ASSIGN_OR_RETURN(const std::vector<MoveId> for_use,
                     Plan(placed, MoveOf::kWeights, roles.parameter, roles.used));
    RETURN_IF_ERROR(CheckInnermost(placed, for_use, "weights are gathered for each use"));
    if (request_.groups[group].trainable) {
      const auto gradient = [&](const Placements& from, const Placements& to) {
        return Plan(placed, MoveOf::kGradient, from, to);
      };
      if (tensor.cut.partial_gradient) {
        ASSIGN_OR_RETURN(const MoveId sum, SumOfAddends(tensor, roles.staged));
        moves.each_lane = {sum};
      }
      ASSIGN_OR_RETURN(moves.each_turn, gradient(roles.staged, roles.between));
      ASSIGN_OR_RETURN(moves.each_step, gradient(roles.between, roles.measured));
      ASSIGN_OR_RETURN(moves.whole, gradient(roles.measured, roles.at_step));
      RETURN_IF_ERROR(CheckInnermost(placed, moves.each_turn, "gradients leave in each turn"));
      RETURN_IF_ERROR(CheckInnermost(placed, moves.whole, "measured gradients become whole"));
    }
    return moves;
  }

  absl::StatusOr<std::vector<MoveId>> Plan(const PlacedTensor& tensor,
                                           MoveOf of,
                                           const Placements& from,
                                           const Placements& to) {
    ASSIGN_OR_RETURN(const std::vector<Move> moves, PlanMoves(tensor, request_.mesh, from, to));
    std::vector<MoveId> ids;
    for (const Move& move : moves) {
      // A gradient that one rank has measured is whole.
      const bool is_whole =
          of == MoveOf::kGradient && move.from.in_flat_family() && move.axis_size == 1;
      if (!NeedsRanks(move) || is_whole) {
        continue;
      }
      ProgramMove planned = {.of = of,
                             .axes = {move.axis},
                             .move = move,
                             .type = DType::kF32,
                             .stream = StreamId::kGather};
      planned.type = TypeOf(planned);
      planned.stream = StreamOf(planned);
      ids.push_back(Find(std::move(planned)));
    }
    return ids;
  }

  // Over all ranks of the axis, or over those that have the same heads.
  absl::StatusOr<MoveId> SumOfAddends(const TensorSpec& tensor, const Placements& staged) {
    Placements addends = {{kTensorAxis, Placement::Partial()}};
    addends.insert(addends.end(), staged.begin(), staged.end());
    ASSIGN_OR_RETURN(Move move,
                     PlanMove({.name = tensor.name, .shape = tensor.shape},
                              request_.mesh,
                              Canonical(addends, request_.mesh),
                              {kTensorAxis, Placement::Replicate()}));
    if (tensor.cut.copies > 1) {
      move.axis_size = tensor.cut.copies;
    }
    return Find({.of = MoveOf::kGradient,
                 .axes = {kTensorAxis},
                 .move = std::move(move),
                 .type = kGradientType,
                 .stream = StreamId::kReduce});
  }

  // The engine makes one such move, over the innermost axis.
  absl::Status CheckInnermost(const PlacedTensor& tensor,
                              const std::vector<MoveId>& moves,
                              const char* what) const {
    for (const MoveId id : moves) {
      const ProgramMove& move = table_.moves[id];
      if (!IsInnermost(request_.mesh, move)) {
        return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                       tensor.name,
                                                       ": axis ",
                                                       move.move.axis,
                                                       ": from ",
                                                       PlacementText(move.move.from),
                                                       " to ",
                                                       PlacementText(move.move.to),
                                                       ": ",
                                                       what,
                                                       " over axis ",
                                                       InnermostDataAxis(request_.mesh),
                                                       " alone"));
      }
    }
    return absl::OkStatus();
  }

  // A wire that rounds does so to each lane's gradient, and to no sum of several.
  DType TypeOf(const ProgramMove& move) const {
    if (move.of == MoveOf::kWeights) {
      return weight_type_;
    }
    return rounds_ && SumsLanes(move) ? DType::kBF16 : kGradientType;
  }

  StreamId StreamOf(const ProgramMove& move) const {
    if (!IsInnermost(request_.mesh, move)) {
      return StreamId::kOuter;
    }
    return move.of == MoveOf::kWeights ? StreamId::kGather : StreamId::kReduce;
  }

  MoveId Find(ProgramMove move) {
    for (const MoveId id : table_.moves.ids()) {
      if (table_.moves[id] == move) {
        return id;
      }
    }
    return table_.moves.Add(std::move(move));
  }

  const MoveRequest& request_;
  // Facts of the group that is planned.
  bool rounds_ = false;
  DType weight_type_ = DType::kF32;
  MoveTable table_;
};

// All moves of a group by gathers, or by reduces.
std::vector<MoveId> MovesOfOp(const MoveTable& table, GroupId group, OpCode op) {
  std::vector<MoveId> found;
  if (!IsCollective(op) || !table.of_groups.Has(group)) {
    return found;
  }
  const GroupMoves& moves = table.of_groups[group];
  for (const auto* list :
       {&moves.weights, &moves.each_lane, &moves.each_turn, &moves.each_step, &moves.whole}) {
    for (const MoveId id : *list) {
      const bool reduces = table.moves[id].move.from.kind == PlacementKind::kPartial;
      if (reduces == (op == OpCode::kReduce)) {
        found.push_back(id);
      }
    }
  }
  return found;
}

}  // namespace

absl::StatusOr<MoveTable> MovesOf(const MoveRequest& request) {
  return TableMaker(request).Make();
}

bool CutsSums(const MoveTable& table, GroupId group) {
  const std::vector<MoveId>& moves = table.of_groups[group].each_step;
  return std::any_of(moves.begin(), moves.end(), [&](MoveId id) {
    const ProgramMove& move = table.moves[id];
    return !SumsLanes(move) && move.move.to.in_flat_family();
  });
}

bool SumsLanes(const ProgramMove& move) {
  return move.of == MoveOf::kGradient && move.move.from.kind == PlacementKind::kPartial &&
         CutAxes(move.move.before).empty() && !SumsAddends(move);
}

bool SumsAddends(const ProgramMove& move) {
  return move.of == MoveOf::kGradient && move.axes == std::vector<std::string>{kTensorAxis};
}

bool IsInnermost(const Mesh& mesh, const ProgramMove& move) {
  return move.axes.size() == 1 && move.axes.front() == InnermostDataAxis(mesh);
}

MoveId MoveOfStep(const MoveTable& table, SegmentMove move) {
  switch (move) {
    case SegmentMove::kSumRows:
      return table.activation_sum;
    case SegmentMove::kScatterRows:
      return table.activation_scatter;
    case SegmentMove::kGather:
      return table.activation_gather;
    case SegmentMove::kNone:
      break;
  }
  return {};
}

SegmentMove MoveOfInstruction(const MoveTable& table, const Instruction& compute) {
  if (compute.move < 0) {
    return SegmentMove::kNone;
  }
  return compute.move == table.activation_sum       ? SegmentMove::kSumRows
         : compute.move == table.activation_scatter ? SegmentMove::kScatterRows
                                                    : SegmentMove::kGather;
}

bool HasMove(const MoveTable& table, const Instruction& instruction) {
  if (instruction.op == OpCode::kStatsReduce) {
    return instruction.move == table.statistics;
  }
  if (instruction.op == OpCode::kAmaxReduce) {
    return table.amax >= 0 && instruction.move == table.amax;
  }
  const std::vector<MoveId> moves = MovesOfOp(table, instruction.group, instruction.op);
  return std::find(moves.begin(), moves.end(), instruction.move) != moves.end();
}

OpLabel LabelOf(const MoveTable& table, const Instruction& instruction) {
  const auto plain = static_cast<OpLabel>(instruction.op);
  if (!table.moves.Has(instruction.move)) {
    return plain;
  }
  const ProgramMove& move = table.moves[instruction.move];
  const bool outer = move.axes == std::vector<std::string>{kReplicateAxis};
  if (instruction.op == OpCode::kReduce) {
    return SumsAddends(move) ? OpLabel::kTensorReduce : outer ? OpLabel::kOuterReduce : plain;
  }
  if (instruction.op == OpCode::kGather) {
    return move.of == MoveOf::kGradient ? OpLabel::kGatherGradient
           : outer                      ? OpLabel::kOuterGather
                                        : plain;
  }
  return plain;
}

OpLabel WorkLabelOf(const MoveTable& table, const Instruction& instruction) {
  if (!IsCompute(instruction.op)) {
    return LabelOf(table, instruction);
  }
  switch (MoveOfInstruction(table, instruction)) {
    case SegmentMove::kSumRows:
    case SegmentMove::kScatterRows:
      return OpLabel::kTensorReduce;
    case SegmentMove::kGather:
      return OpLabel::kTensorGather;
    case SegmentMove::kNone:
      break;
  }
  return LabelOf(table, instruction);
}

MoveId MoveOfLabel(const MoveTable& table, GroupId group, OpLabel label) {
  if (label == OpLabel::kStatsReduce) {
    return table.statistics;
  }
  if (label == OpLabel::kAmaxReduce) {
    return table.amax;
  }
  const OpCode op = OpOfLabel(label);
  for (const MoveId id : MovesOfOp(table, group, op)) {
    if (LabelOf(table, {.op = op, .move = id}) == label) {
      return id;
    }
  }
  return {};
}

OpCode OpOfLabel(OpLabel label) {
  switch (label) {
    case OpLabel::kOuterReduce:
    case OpLabel::kTensorReduce:
      return OpCode::kReduce;
    case OpLabel::kOuterGather:
    case OpLabel::kGatherGradient:
      return OpCode::kGather;
    default:
      return static_cast<OpCode>(label);
  }
}

}  // namespace ravel::plan
