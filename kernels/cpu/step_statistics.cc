#include "kernels/cpu/step_statistics.h"

#include <bit>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "common/signed_size.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::kernels::cpu {
namespace {

// The view may be a matrix of one row.
TensorView PartOf(const TensorView& flat, const UpdatePiece& piece) {
  return VectorView(flat.As<float>() + piece.offset, piece.elements);
}

}  // namespace

void AdamWUpdate(const AdamWArgs& args) {
  if (args.apply != nullptr && *args.apply == 0) {
    return;
  }
  AdamWArgs known = args;
  if (args.device_scalars != nullptr) {
    known.scalars = *args.device_scalars;
  }
  if (args.table.pieces == nullptr) {
    ActiveOps().adamw(known);
    return;
  }
  const float decay = known.scalars.weight_decay;
  for (const UpdatePiece& piece : std::span(args.table.pieces, Size(args.table.count))) {
    known.p = PartOf(args.p, piece);
    known.g = PartOf(args.g, piece);
    known.m = PartOf(args.m, piece);
    known.v = PartOf(args.v, piece);
    known.scalars.weight_decay = piece.decays != 0 ? decay : 0.0f;
    ActiveOps().adamw(known);
  }
}

void SumLoss(const SumLossArgs& args) {
  const float* loss = args.losses.As<float>();
  const int32_t* target = args.targets.As<int32_t>();
  for (int64_t i = 0; i < args.losses.elements(); ++i) {
    if (target[i] >= 0) {
      *args.sum += static_cast<double>(loss[i]);
      ++*args.tokens;
    }
  }
}

void CountFlags(const CountFlagsArgs& args) {
  auto* flags = args.flags.As<uint32_t>();
  for (int64_t i = 0; i < args.flags.elements(); ++i) {
    args.counts[i] += std::exchange(flags[i], 0u) != 0 ? 1 : 0;
  }
}

void SumRowNodes(const SumRowNodesArgs& args) {
  std::vector<double> wide;
  for (int64_t i = 0; i < args.count; ++i) {
    const float* first = args.row_sums + args.nodes[i].first_row;
    const int64_t rows = int64_t{1} << args.nodes[i].level;
    wide.assign(first, first + rows);
    args.out[i] = TreeSumDouble(wide.data(), rows);
  }
}

namespace {

double ValueOf(const DecideUpdateArgs& args, int32_t operand) {
  if (operand == kNoOperand) {
    return 0.0;
  }
  if (operand < 0) {
    return args.sums[-1 - operand];
  }
  return std::bit_cast<double>(static_cast<const int64_t*>(args.messages)[operand]);
}

}  // namespace

void DecideUpdate(const DecideUpdateArgs& args) {
  for (int64_t i = 0; i < args.step_count; ++i) {
    args.sums[i] = ValueOf(args, args.steps[i].a) + ValueOf(args, args.steps[i].b);
  }
  scalar::StepTotals totals = {.squared_norm = ValueOf(args, args.total)};
  StatisticsHeader header;
  for (int64_t rank = 0; rank < args.ranks; ++rank) {
    const int64_t* message = static_cast<const int64_t*>(args.messages) + rank * args.words;
    std::memcpy(static_cast<void*>(&header), message, sizeof(header));
    totals.target_tokens += header.target_tokens;
    for (int64_t tensor = 0; tensor < args.tensors; ++tensor) {
      totals.non_finite += message[kStatisticsHeaderWords + tensor];
    }
  }
  scalar::RecordOutcome(
      args.hyper, header.learning_rate, args.clip_norm, args.loss_scale, totals, *args.outcome);
}

}  // namespace ravel::kernels::cpu
