// Operands of kernels over rows: norms, activations, rotary embedding, embedding, bias,
// cross-entropy.

#include <algorithm>

#include "common/check.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;

// Elements of an access.
int64_t WidthOf(int32_t variant) {
  constexpr int64_t kVectorBytes = 16;
  return HasVectors(variant) ? kVectorBytes / DTypeBytes(InputType(variant)) : 1;
}

void RmsNormForward(const RmsNormForwardParams& p, Operands& on) {
  on.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  on.Read("residual", p.residual, {p.rows, p.columns, p.residual_stride});
  on.Read("w", p.w, {1, p.columns, p.columns});
  on.Write("sum", p.sum, {p.rows, p.columns, p.sum_stride});
  on.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  on.Array(kWrite, "rstd", p.rstd, p.rows);
  on.Require(p.residual == nullptr || p.sum != nullptr, "a residual needs a place for the sum");
}

void RmsNormBackward(const RmsNormBackwardParams& p, Operands& on) {
  const int64_t partials = on.launch().grid[0];
  on.Require(partials <= p.rows, "more partial sums than rows");
  on.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  on.Read("sum", p.sum, {p.rows, p.columns, p.sum_stride});
  on.Read("w", p.w, {1, p.columns, p.columns});
  on.Array(kRead, "rstd", p.rstd, p.rows);
  on.Read("dresidual", p.dresidual, {p.rows, p.columns, p.dresidual_stride});
  on.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  on.Array(kWrite, "partials", p.partials, partials * p.columns);
}

void SumPartials(const SumPartialsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Array(kRead, "partials", p.partials, p.partial_rows * p.columns);
  on.Add(p.accumulate != 0 ? kUpdate : kWrite,
         "out",
         p.out,
         {1, p.columns, p.columns},
         OutputType(on.launch().variant));
}

void HeadNormForward(const HeadNormParams& p, Operands& on) {
  on.RequireBlock(kHeadNormWarps * kWarpThreads);
  const int64_t columns = p.heads * p.head_size;
  on.Read("x", p.x, {p.rows, columns, p.x_stride});
  on.Read("w", p.w, {1, p.head_size, p.head_size});
  on.Write("y", p.y, {p.rows, columns, p.y_stride});
}

void HeadNormBackward(const HeadNormParams& p, Operands& on) {
  on.RequireBlock(kHeadNormWarps * kWarpThreads);
  const int64_t columns = p.heads * p.head_size;
  const int64_t warps = on.launch().grid[0] * int64_t{kHeadNormWarps};
  on.Read("x", p.x, {p.rows, columns, p.x_stride});
  on.Read("w", p.w, {1, p.head_size, p.head_size});
  on.Read("dy", p.dy, {p.rows, columns, p.dy_stride});
  on.Write("dx", p.dx, {p.rows, columns, p.dx_stride});
  on.Array(kWrite, "partials", p.partials, warps * p.head_size);
}

void LayerNormForward(const LayerNormForwardParams& p, Operands& on) {
  on.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  on.Read("w", p.w, {1, p.columns, p.columns});
  on.Read("b", p.b, {1, p.columns, p.columns});
  on.Write("copy", p.copy, {p.rows, p.columns, p.copy_stride});
  on.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  on.Array(kWrite, "mean", p.mean, p.rows);
  on.Array(kWrite, "rstd", p.rstd, p.rows);
}

void LayerNormBackward(const LayerNormBackwardParams& p, Operands& on) {
  const int64_t partials = on.launch().grid[0];
  on.Require(partials <= p.rows, "more partial sums than rows");
  on.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  on.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  on.Read("w", p.w, {1, p.columns, p.columns});
  on.Array(kRead, "mean", p.mean, p.rows);
  on.Array(kRead, "rstd", p.rstd, p.rows);
  on.Read("dresidual", p.dresidual, {p.rows, p.columns, p.dresidual_stride});
  on.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  on.Array(kWrite, "dw_partials", p.dw_partials, partials * p.columns);
  on.Array(kWrite, "db_partials", p.db_partials, partials * p.columns);
}

void SwiGluForward(const SwiGluForwardParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("gate", p.gate, {p.rows, p.columns, p.gate_stride});
  on.Read("up", p.up, {p.rows, p.columns, p.up_stride});
  on.Write("y", p.y, {p.rows, p.columns, p.y_stride});
}

void SwiGluBackward(const SwiGluBackwardParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("gate", p.gate, {p.rows, p.columns, p.gate_stride});
  on.Read("up", p.up, {p.rows, p.columns, p.up_stride});
  on.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  on.Write("dgate", p.dgate, {p.rows, p.columns, p.dgate_stride});
  on.Write("dup", p.dup, {p.rows, p.columns, p.dup_stride});
  on.Write("y", p.y, {p.rows, p.columns, p.y_stride});
}

void GeluForward(const GeluParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  on.Write("y", p.y, {p.rows, p.columns, p.y_stride});
}

void GeluBackward(const GeluParams& p, Operands& on) {
  GeluForward(p, on);
  on.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  on.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
}

void AddInPlace(const AddInPlaceParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  on.Update("y", p.y, {p.rows, p.columns, p.y_stride});
}

void AddBias(const AddRowsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.period == 1, "a bias is a table of one row");
  on.Read("bias", p.table, {1, p.columns, p.columns});
  const Shape shape = {p.rows, p.columns, p.x_stride};
  p.accumulate != 0 ? on.Update("y", p.x, shape) : on.Write("y", p.x, shape);
}

void AddPositions(const AddRowsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.accumulate == 1 && p.period > 0, "positions are added");
  on.Read("table", p.table, {p.period, p.columns, p.table_stride});
  on.Update("x", p.x, {p.rows, p.columns, p.x_stride});
}

void BiasGradient(const BiasGradientParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, DivCeil(p.columns / WidthOf(on.launch().variant), int64_t{kFlatThreads}));
  on.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  on.Array(kWrite, "partials", p.partials, on.launch().grid[1] * p.columns);
}

void PositionGradient(const PositionGradientParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.period > 0, "a sequence has tokens");
  on.Read("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  on.Add(kUpdate,
         "dtable",
         p.dtable,
         {std::min(p.period, p.rows), p.columns, p.dtable_stride},
         OutputType(on.launch().variant));
}

void Rope(const RopeParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Require(p.sequence_tokens > 0, "a sequence has tokens");
  on.Require(p.half % WidthOf(on.launch().variant) == 0, "a half of a head is no whole vector");
  const int64_t positions = std::min(p.sequence_tokens, p.rows);
  on.Update("x", p.x, {p.rows, p.heads * 2 * p.half, p.x_stride});
  on.Add(kRead, "cosine", p.cosine, {positions, p.half, p.cosine_stride}, DType::kF32);
  on.Add(kRead, "sine", p.sine, {positions, p.half, p.sine_stride}, DType::kF32);
}

void RopeTable(const RopeTableParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Array(kRead, "inverse_frequency", p.inverse_frequency, p.half);
  on.Add(kWrite, "cosine", p.cosine, {p.positions, p.half, p.cosine_stride}, DType::kF32);
  on.Add(kWrite, "sine", p.sine, {p.positions, p.half, p.sine_stride}, DType::kF32);
}

void EmbeddingForward(const EmbeddingForwardParams& p, Operands& on) {
  on.Require(p.first >= 0 && p.rows <= p.vocabulary, "a table has rows of its vocabulary");
  on.Read("table", p.table, {p.rows, p.hidden, p.table_stride});
  const Shape out = {p.tokens, p.hidden, p.out_stride};
  const int32_t variant = on.launch().variant;
  if (IsMixed(variant)) {  // written one by one
    on.Add(kWrite, "out", p.out, out, OutputType(variant));
  } else {
    on.Write("out", p.out, out);
  }
  on.Array(kRead, "ids", p.ids, p.tokens);
}

void EmbeddingBackward(const EmbeddingBackwardParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, p.tokens);
  on.RequireGrid(1, DivCeil(p.hidden / WidthOf(on.launch().variant), int64_t{kFlatThreads}));
  on.Read("dout", p.dout, {p.tokens, p.hidden, p.dout_stride});
  on.Add(kUpdate,
         "dtable",
         p.dtable,
         {p.rows, p.hidden, p.dtable_stride},
         OutputType(on.launch().variant));
  on.Array(kRead, "ids", p.ids, p.tokens);
}

template <bool kGradient>
void CrossEntropy(const CrossEntropyParams& p, Operands& on) {
  const Shape shape = {p.tokens, p.vocabulary, p.logits_stride};
  kGradient ? on.Update("logits", p.logits, shape) : on.Read("logits", p.logits, shape);
  on.Array(kWrite, "loss", p.loss, p.tokens);
  on.Array(kRead, "targets", p.targets, p.tokens);
  on.Array(kRead, "device_loss_scale", p.device_loss_scale, 1);
}

void SumParts(const SumPartsParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  for (int64_t i = 0; i < int64_t{1} << p.pieces_log; ++i) {
    on.Add(kRead,
           "piece",
           p.pieces[static_cast<size_t>(i)],
           {p.rows, p.columns, p.piece_stride},
           DType::kF32);
  }
  on.Read("residual", p.residual, {p.rows, p.columns, p.residual_stride});
  on.Read("bias", p.bias, {1, p.columns, p.columns});
  on.Write("out", p.out, {p.rows, p.columns, p.out_stride});
}

void VocabularyStatistics(const VocabularyBlockParams& p, Operands& on) {
  on.Read("logits", p.logits, {p.tokens, p.columns, p.logits_stride});
  on.Array(kRead, "targets", p.targets, p.tokens);
  on.Add(kWrite, "statistics", p.statistics, {3, p.tokens, p.statistics_stride}, DType::kF32);
}

void VocabularyLoss(const VocabularyLossParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.Add(kUpdate,
         "statistics",
         p.statistics,
         {int64_t{3} << p.blocks_log, p.tokens, p.statistics_stride},
         DType::kF32);
  on.Array(kRead, "targets", p.targets, p.tokens);
  on.Array(kWrite, "loss", p.loss, p.tokens);
}

void VocabularyGradient(const VocabularyBlockParams& p, Operands& on) {
  on.Update("logits", p.logits, {p.tokens, p.columns, p.logits_stride});
  on.Array(kRead, "targets", p.targets, p.tokens);
  on.Add(kRead, "statistics", p.statistics, {3, p.tokens, p.statistics_stride}, DType::kF32);
  on.Array(kRead, "device_loss_scale", p.device_loss_scale, 1);
}

}  // namespace

std::vector<KernelOperands> RowKernels() {
  return {
      Declare<RmsNormForwardParams, RmsNormForward>(Kernel::kRmsNormForward, "RmsNormForward"),
      Declare<RmsNormBackwardParams, RmsNormBackward>(Kernel::kRmsNormBackward, "RmsNormBackward"),
      Declare<SumPartialsParams, SumPartials>(Kernel::kSumPartials, "SumPartials"),
      Declare<HeadNormParams, HeadNormForward>(Kernel::kHeadNormForward, "HeadNormForward"),
      Declare<HeadNormParams, HeadNormBackward>(Kernel::kHeadNormBackward, "HeadNormBackward"),
      Declare<LayerNormForwardParams, LayerNormForward>(Kernel::kLayerNormForward,
                                                        "LayerNormForward"),
      Declare<LayerNormBackwardParams, LayerNormBackward>(Kernel::kLayerNormBackward,
                                                          "LayerNormBackward"),
      Declare<SwiGluForwardParams, SwiGluForward>(Kernel::kSwiGluForward, "SwiGluForward"),
      Declare<SwiGluBackwardParams, SwiGluBackward>(Kernel::kSwiGluBackward, "SwiGluBackward"),
      Declare<GeluParams, GeluForward>(Kernel::kGeluForward, "GeluForward"),
      Declare<GeluParams, GeluBackward>(Kernel::kGeluBackward, "GeluBackward"),
      Declare<AddInPlaceParams, AddInPlace>(Kernel::kAddInPlace, "AddInPlace"),
      Declare<AddRowsParams, AddBias>(Kernel::kAddBias, "AddBias"),
      Declare<AddRowsParams, AddPositions>(Kernel::kAddPositions, "AddPositions"),
      Declare<BiasGradientParams, BiasGradient>(Kernel::kBiasGradient, "BiasGradient"),
      Declare<PositionGradientParams, PositionGradient>(Kernel::kPositionGradient,
                                                        "PositionGradient"),
      Declare<RopeParams, Rope>(Kernel::kRope, "Rope"),
      Declare<RopeTableParams, RopeTable>(Kernel::kRopeTable, "RopeTable"),
      Declare<EmbeddingForwardParams, EmbeddingForward>(Kernel::kEmbeddingForward,
                                                        "EmbeddingForward"),
      Declare<EmbeddingBackwardParams, EmbeddingBackward>(Kernel::kEmbeddingBackward,
                                                          "EmbeddingBackward"),
      Declare<CrossEntropyParams, CrossEntropy<false>>(Kernel::kCrossEntropyLoss,
                                                       "CrossEntropyLoss"),
      Declare<CrossEntropyParams, CrossEntropy<true>>(Kernel::kCrossEntropyGradient,
                                                      "CrossEntropyGradient"),
      Declare<SumPartsParams, SumParts>(Kernel::kSumParts, "SumParts"),
      Declare<VocabularyBlockParams, VocabularyStatistics>(Kernel::kVocabularyStatistics,
                                                           "VocabularyStatistics"),
      Declare<VocabularyLossParams, VocabularyLoss>(Kernel::kVocabularyLoss, "VocabularyLoss"),
      Declare<VocabularyBlockParams, VocabularyGradient>(Kernel::kVocabularyGradient,
                                                         "VocabularyGradient")};
}

}  // namespace ravel::kernels::cuda::emulated
