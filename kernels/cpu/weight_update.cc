#include "kernels/cpu/weight_update.h"

#include <algorithm>
#include <vector>

#include "common/signed_size.h"
#include "kernels/cpu/grouped_update.h"
#include "kernels/cpu/mixed_ops.h"
#include "kernels/cpu/quantize.h"

namespace ravel::kernels::cpu {
namespace {

// One piece or, where global indices leave gaps, one for each row.
std::vector<UpdatePiece> PiecesOf(const WeightUpdateArgs& args, int64_t rows) {
  const ElementUpdateArgs& update = args.update.update;
  const bool together = args.row_step == args.columns;
  std::vector<UpdatePiece> pieces;
  for (int64_t row = 0; row < rows; row += together ? rows : 1) {
    pieces.push_back({.offset = row * args.columns,
                      .elements = together ? rows * args.columns : args.columns,
                      .first_index = update.first_index + row * args.row_step,
                      .site = update.site,
                      .decays = args.decays ? 1u : 0u,
                      .row = args.columns,
                      .first_scale = row * DivCeil(args.columns, kUpdateGroup)});
  }
  return pieces;
}

void Update(const WeightUpdateArgs& args, int64_t rows) {
  const std::vector<UpdatePiece> pieces = PiecesOf(args, rows);
  GroupedUpdateArgs update = args.update;
  update.update.table = {.pieces = pieces.data(), .count = std::ssize(pieces)};
  const TensorView& m = update.update.m;
  const TensorView& v = update.update.v;
  if (m.dtype == DType::kF8E4M3 || (v.present() && v.dtype != m.dtype)) {
    GroupedUpdate(update);
  } else {
    ElementUpdate(update.update);
  }
}

void Encode(const WeightTarget& target, const TensorView& weights, bool applies) {
  const int64_t edge = plan::BlockEdge(target.recipe);
  const int64_t step = std::max<int64_t>(1, edge);
  const int64_t begin = RoundUp(target.first_row, step);
  const int64_t end = (target.first_row + weights.size[0]) / step * step;
  const bool known = edge > 0 || (applies && *target.encode.As<float>() != 0.0f);
  if (known && begin < end) {
    const int64_t first = begin - target.first_row;
    QuantizeWeight(
        {.from = RowsOf(weights, first, end - begin),
         .first_row = begin,
         .scales = {.recipe = target.recipe, .amax = target.amax, .encode = target.encode},
         .codes = RowsOf(target.codes, first, end - begin)});
  }
}

}  // namespace

void WeightUpdate(const WeightUpdateArgs& args) {
  const ElementUpdateArgs& update = args.update.update;
  const WeightTarget& target = args.target;
  const int64_t rows = DivExact(update.g.elements(), args.columns);
  if (rows == 0) {
    return;
  }
  Update(args, rows);
  const TensorView weights = MatrixView(update.main_weight.As<float>(), rows, args.columns);
  BlockAmax({.from = weights,
             .first_row = target.first_row,
             .edge = plan::BlockEdge(target.recipe),
             .amax = target.amax,
             .epsilon = target.epsilon});
  if (target.whole_amax.present()) {
    BlockAmax({.from = weights, .amax = target.whole_amax});
  }
  if (target.codes.present()) {
    Encode(target, weights, update.apply == nullptr || *update.apply != 0);
  }
}

}  // namespace ravel::kernels::cpu
