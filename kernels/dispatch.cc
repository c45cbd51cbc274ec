// Every op: shapes and types checked once, then the CPU implementation. On a CUDA stream
// kernels/cuda_host checks for itself, because there activations may be bf16.

#include <bit>

#include "common/check.h"
#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/bias.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cpu/step_statistics.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/digest.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/philox.h"
#include "kernels/rope.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"

namespace ravel::kernels {
namespace {

bool OnCuda(const Stream& stream) {
  return stream.backend() == Backend::kCuda;
}

void CheckMatrix(const TensorView& view, int64_t rows, int64_t columns, DType dtype = DType::kF32) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.rank == 2 && view.size[0] == rows && view.size[1] == columns, "wrong shape");
  CHECK_MSG(rows <= 1 || view.row_stride >= columns, "rows overlap");
  CHECK_MSG(view.present() || rows * columns == 0, "no data");
}

// A contiguous range of any rank.
void CheckFlat(const TensorView& view, int64_t elements, DType dtype = DType::kF32) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.elements() == elements && view.contiguous(), "wrong size, or not contiguous");
  CHECK_MSG(view.present() || elements == 0, "no data");
}

void CheckFlatIfPresent(const TensorView& view, int64_t elements) {
  if (view.present()) {
    CheckFlat(view, elements);
  }
}

// Columns are whole heads of the size of `w`.
void CheckHeads(const TensorView& x, const TensorView& w) {
  CheckFlat(w, w.elements());
  CHECK_MSG(w.elements() > 0 && x.size[1] % w.elements() == 0, "columns are whole heads");
}

void CheckRank2(const TensorView& view) {
  CHECK_MSG(view.rank == 2, "a matrix is expected");
}

void CheckPositions(const TensorView& x, const TensorView& table, int64_t sequence_tokens) {
  CheckMatrix(x, x.size[0], x.size[1]);
  CheckRank2(table);
  CheckMatrix(table, table.size[0], x.size[1]);
  CHECK_MSG(sequence_tokens > 0 && sequence_tokens <= table.size[0],
            "the table is shorter than a sequence");
}

void CheckIds(const TensorView& ids, int64_t limit, int64_t lowest) {
  const int32_t* values = ids.As<int32_t>();
  for (int64_t i = 0; i < ids.elements(); ++i) {
    CHECK_MSG(values[i] >= lowest && values[i] < limit, "id outside the vocabulary");
  }
}

}  // namespace

void Gemm(Stream& stream, const GemmArgs& args) {
  if (OnCuda(stream)) {
    cuda::Gemm(stream, args);
    return;
  }
  CheckRank2(args.a);
  CheckRank2(args.b);
  CheckRank2(args.c);
  const bool flip_a = args.transpose_a == Transpose::kYes;
  const bool flip_b = args.transpose_b == Transpose::kYes;
  const int64_t m = args.c.size[0];
  const int64_t n = args.c.size[1];
  const int64_t k = flip_a ? args.a.size[0] : args.a.size[1];
  CheckMatrix(args.a, flip_a ? k : m, flip_a ? m : k);
  CheckMatrix(args.b, flip_b ? n : k, flip_b ? k : n);
  CheckMatrix(args.c, m, n);
  cpu::Gemm(args);
}

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::RmsNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  const int64_t tokens = args.x.size[0];
  const int64_t hidden = args.x.size[1];
  CheckMatrix(args.x, tokens, hidden);
  CheckMatrix(args.y, tokens, hidden);
  CheckFlat(args.w, hidden);
  CheckFlat(args.rstd, tokens);
  if (args.residual.present()) {
    CheckMatrix(args.residual, tokens, hidden);
    CHECK_MSG(args.sum.present(), "a residual needs a place for the sum");
  }
  if (args.sum.present()) {
    CheckMatrix(args.sum, tokens, hidden);
  }
  cpu::ActiveOps().rms_norm_forward(args);
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::RmsNormBackward(stream, args);
    return;
  }
  CheckRank2(args.dy);
  const int64_t tokens = args.dy.size[0];
  const int64_t hidden = args.dy.size[1];
  CheckMatrix(args.dy, tokens, hidden);
  CheckMatrix(args.sum, tokens, hidden);
  CheckMatrix(args.dx, tokens, hidden);
  CheckFlat(args.w, hidden);
  CheckFlatIfPresent(args.dw, hidden);
  CheckFlat(args.rstd, tokens);
  if (args.dresidual.present()) {
    CheckMatrix(args.dresidual, tokens, hidden);
  }
  cpu::ActiveOps().rms_norm_backward(args);
}

void HeadNormForward(Stream& stream, const HeadNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::HeadNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckMatrix(args.x, args.x.size[0], args.x.size[1]);
  CheckMatrix(args.y, args.x.size[0], args.x.size[1]);
  CheckHeads(args.x, args.w);
  cpu::ActiveOps().head_norm_forward(args);
}

void HeadNormBackward(Stream& stream, const HeadNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::HeadNormBackward(stream, args);
    return;
  }
  CheckRank2(args.x);
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1]);
  }
  CheckHeads(args.x, args.w);
  CheckFlatIfPresent(args.dw, args.w.elements());
  cpu::ActiveOps().head_norm_backward(args);
}

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::LayerNormForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  const int64_t tokens = args.x.size[0];
  const int64_t hidden = args.x.size[1];
  CheckMatrix(args.x, tokens, hidden);
  CheckMatrix(args.y, tokens, hidden);
  CheckFlat(args.w, hidden);
  CheckFlat(args.b, hidden);
  CheckFlat(args.mean, tokens);
  CheckFlat(args.rstd, tokens);
  if (args.copy.present()) {
    CheckMatrix(args.copy, tokens, hidden);
  }
  cpu::ActiveOps().layer_norm_forward(args);
}

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::LayerNormBackward(stream, args);
    return;
  }
  CheckRank2(args.dy);
  const int64_t tokens = args.dy.size[0];
  const int64_t hidden = args.dy.size[1];
  for (const TensorView& view : {args.dy, args.x, args.dx}) {
    CheckMatrix(view, tokens, hidden);
  }
  CheckFlat(args.w, hidden);
  CheckFlat(args.mean, tokens);
  CheckFlat(args.rstd, tokens);
  CheckFlatIfPresent(args.dw, hidden);
  CheckFlatIfPresent(args.db, hidden);
  if (args.dresidual.present()) {
    CheckMatrix(args.dresidual, tokens, hidden);
  }
  cpu::ActiveOps().layer_norm_backward(args);
}

void AddBias(Stream& stream, const AddBiasArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddBias(stream, args);
    return;
  }
  CheckRank2(args.y);
  CheckMatrix(args.y, args.y.size[0], args.y.size[1]);
  CheckFlat(args.bias, args.y.size[1]);
  cpu::ActiveOps().add_bias(args);
}

void BiasGradient(Stream& stream, const BiasGradientArgs& args) {
  if (OnCuda(stream)) {
    cuda::BiasGradient(stream, args);
    return;
  }
  CheckRank2(args.dy);
  CheckMatrix(args.dy, args.dy.size[0], args.dy.size[1]);
  CheckFlat(args.db, args.dy.size[1]);
  cpu::ActiveOps().bias_gradient(args);
}

void BuildRopeTable(Stream& stream, const RopeTableArgs& args) {
  if (OnCuda(stream)) {
    cuda::BuildRopeTable(stream, args);
    return;
  }
  CheckRank2(args.cosine);
  const int64_t positions = args.cosine.size[0];
  const int64_t half = args.cosine.size[1];
  CheckFlat(args.inverse_frequency, half);
  CheckMatrix(args.cosine, positions, half);
  CheckMatrix(args.sine, positions, half);
  cpu::BuildRopeTable(args);
}

void Rope(Stream& stream, const RopeArgs& args) {
  if (OnCuda(stream)) {
    cuda::Rope(stream, args);
    return;
  }
  CheckRank2(args.x);
  CHECK_MSG(args.head_size > 0 && args.head_size % 2 == 0, "a head has an even size");
  CHECK_MSG(args.sequence_tokens > 0, "a sequence has tokens");
  CHECK_MSG(args.x.size[1] % args.head_size == 0, "columns are whole heads");
  CHECK_MSG(args.cosine.rows() >= std::min(args.sequence_tokens, args.x.rows()),
            "the table is shorter than a sequence");
  CheckMatrix(args.x, args.x.size[0], args.x.size[1]);
  CheckMatrix(args.cosine, args.cosine.rows(), args.head_size / 2);
  CheckMatrix(args.sine, args.cosine.rows(), args.head_size / 2);
  cpu::ActiveOps().rope(args);
}

void SwiGluForward(Stream& stream, const SwiGluForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::SwiGluForward(stream, args);
    return;
  }
  CheckRank2(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.y}) {
    CheckMatrix(view, args.gate.size[0], args.gate.size[1]);
  }
  cpu::ActiveOps().swi_glu_forward(args);
}

void SwiGluBackward(Stream& stream, const SwiGluBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::SwiGluBackward(stream, args);
    return;
  }
  CheckRank2(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.dy, args.dgate, args.dup}) {
    CheckMatrix(view, args.gate.size[0], args.gate.size[1]);
  }
  if (args.y.present()) {
    CheckMatrix(args.y, args.gate.size[0], args.gate.size[1]);
  }
  cpu::ActiveOps().swi_glu_backward(args);
}

void GeluForward(Stream& stream, const GeluForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::GeluForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  for (const TensorView& view : {args.x, args.y}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1]);
  }
  cpu::ActiveOps().gelu_forward(args);
}

void GeluBackward(Stream& stream, const GeluBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::GeluBackward(stream, args);
    return;
  }
  CheckRank2(args.x);
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1]);
  }
  if (args.y.present()) {
    CheckMatrix(args.y, args.x.size[0], args.x.size[1]);
  }
  cpu::ActiveOps().gelu_backward(args);
}

void AddInPlace(Stream& stream, const AddArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddInPlace(stream, args);
    return;
  }
  if (args.x.rank == 2 && args.y.rank == 2) {
    CheckMatrix(args.x, args.x.size[0], args.x.size[1]);
    CheckMatrix(args.y, args.x.size[0], args.x.size[1]);
    cpu::ActiveOps().add_in_place(args);
    return;
  }
  const int64_t n = args.x.elements();
  CheckFlat(args.x, n);
  CheckFlat(args.y, n);
  cpu::ActiveOps().add_in_place(
      {MatrixView(args.x.As<float>(), 1, n), MatrixView(args.y.As<float>(), 1, n)});
}

void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::EmbeddingForward(stream, args);
    return;
  }
  CheckRank2(args.table);
  CheckMatrix(args.table, args.table.size[0], args.table.size[1]);
  CheckMatrix(args.out, args.ids.elements(), args.table.size[1]);
  CheckFlat(args.ids, args.ids.elements(), DType::kI32);
  CheckIds(args.ids, args.table.size[0], 0);
  cpu::EmbeddingForward(args);
}

void EmbeddingBackward(Stream& stream, const EmbeddingBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::EmbeddingBackward(stream, args);
    return;
  }
  CheckRank2(args.dtable);
  CheckMatrix(args.dtable, args.dtable.size[0], args.dtable.size[1]);
  CheckMatrix(args.dout, args.ids.elements(), args.dtable.size[1]);
  CheckFlat(args.ids, args.ids.elements(), DType::kI32);
  CheckIds(args.ids, args.dtable.size[0], 0);
  cpu::ActiveOps().embedding_backward(args);
}

void AddPositions(Stream& stream, const AddPositionsArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddPositions(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckPositions(args.x, args.table, args.sequence_tokens);
  cpu::ActiveOps().add_positions(args);
}

void PositionGradient(Stream& stream, const PositionGradientArgs& args) {
  if (OnCuda(stream)) {
    cuda::PositionGradient(stream, args);
    return;
  }
  CheckRank2(args.dx);
  CheckPositions(args.dx, args.dtable, args.sequence_tokens);
  cpu::ActiveOps().position_gradient(args);
}

namespace {

void CheckHead(const TensorView& x,
               const TensorView& w,
               const TensorView& targets,
               const TensorView& loss,
               const TensorView& workspace) {
  CheckRank2(x);
  CheckRank2(w);
  CheckRank2(workspace);
  const int64_t tokens = x.size[0];
  CheckMatrix(x, tokens, x.size[1]);
  CheckMatrix(w, w.size[0], x.size[1]);
  CheckFlat(targets, tokens, DType::kI32);
  CheckFlat(loss, tokens);
  CHECK_MSG(workspace.size[0] > 0 || tokens == 0, "the workspace has no rows");
  CheckFlat(workspace, workspace.size[0] * w.size[0]);
  CheckMatrix(workspace, workspace.size[0], w.size[0]);
  CheckIds(targets, w.size[0], -1);
}

}  // namespace

void LinearCrossEntropyForward(Stream& stream, const LinearCrossEntropyForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::LinearCrossEntropyForward(stream, args);
    return;
  }
  CheckHead(args.x, args.w, args.targets, args.loss, args.workspace);
  cpu::LinearCrossEntropyForward(args);
}

void LinearCrossEntropyTrain(Stream& stream, const LinearCrossEntropyTrainArgs& args) {
  if (OnCuda(stream)) {
    cuda::LinearCrossEntropyTrain(stream, args);
    return;
  }
  CheckHead(args.x, args.w, args.targets, args.loss, args.workspace);
  CheckMatrix(args.dx, args.x.size[0], args.x.size[1]);
  if (args.dw.present()) {
    CheckMatrix(args.dw, args.w.size[0], args.w.size[1]);
  }
  cpu::LinearCrossEntropyTrain(args);
}

namespace {

void CheckAttention(const AttentionShape& shape, int64_t tokens) {
  CHECK_MSG(shape.sequence_tokens > 0 && shape.head_size > 0 && shape.kv_heads > 0,
            "sizes are positive");
  CHECK_MSG(shape.query_heads > 0 && shape.query_heads % shape.kv_heads == 0,
            "query heads are a multiple of kv heads");
  CHECK_MSG(tokens % shape.sequence_tokens == 0, "tokens are whole sequences");
}

void CheckWorkspace(const TensorView& workspace, const AttentionShape& shape) {
  CHECK_MSG(workspace.dtype == DType::kF32 && workspace.contiguous() && workspace.present() &&
                workspace.elements() >= AttentionWorkspaceElements(shape),
            "the workspace is too small");
}

}  // namespace

int64_t AttentionWorkspaceElements(const AttentionShape& shape) {
  return cpu::AttentionWorkspaceElements(shape);
}

void AttentionForward(Stream& stream, const AttentionForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::AttentionForward(stream, args);
    return;
  }
  const AttentionShape& shape = args.shape;
  const int64_t tokens = args.q.rows();
  CheckAttention(shape, tokens);
  for (const TensorView& view : {args.q, args.out}) {
    CheckMatrix(view, tokens, shape.query_heads * shape.head_size);
  }
  for (const TensorView& view : {args.k, args.v}) {
    CheckMatrix(view, tokens, shape.kv_heads * shape.head_size);
  }
  CheckMatrix(args.log_sum_exp, shape.StatisticRows(tokens), shape.sequence_tokens);
  CheckWorkspace(args.workspace, shape);
  cpu::ActiveOps().attention_forward(args);
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::AttentionBackward(stream, args);
    return;
  }
  const AttentionShape& shape = args.shape;
  const int64_t tokens = args.q.rows();
  CheckAttention(shape, tokens);
  for (const TensorView& view : {args.q, args.out, args.dout, args.dq}) {
    CheckMatrix(view, tokens, shape.query_heads * shape.head_size);
  }
  for (const TensorView& view : {args.k, args.v, args.dk, args.dv}) {
    CheckMatrix(view, tokens, shape.kv_heads * shape.head_size);
  }
  CheckMatrix(args.log_sum_exp, shape.StatisticRows(tokens), shape.sequence_tokens);
  CheckWorkspace(args.workspace, shape);
  cpu::ActiveOps().attention_backward(args);
}

int64_t PrepareAttention(Stream& stream, const AttentionBackwardArgs& args) {
  return OnCuda(stream) ? cuda::PrepareAttention(stream, args) : 0;
}

void AdamWUpdate(Stream& stream, const AdamWArgs& args) {
  if (OnCuda(stream)) {
    cuda::AdamWUpdate(stream, args);
    return;
  }
  for (const TensorView& view : {args.p, args.g, args.m, args.v}) {
    CheckFlat(view, args.p.elements());
  }
  CheckPieces(args.table, args.p.elements());
  cpu::AdamWUpdate(args);
}

void TreeAdd(Stream& stream, const TreeAddArgs& args) {
  if (OnCuda(stream)) {
    cuda::TreeAdd(stream, args);
    return;
  }
  for (const TensorView& view : {args.a, args.b, args.out}) {
    CheckFlat(view, args.out.elements());
  }
  cpu::ActiveOps().tree_add(args);
}

void TreeSum(Stream& stream, const TreeSumArgs& args) {
  if (OnCuda(stream)) {
    cuda::TreeSum(stream, args);
    return;
  }
  CheckFlat(args.out, args.out.elements());
  CHECK_MSG(std::has_single_bit(args.pieces.size()), "pieces are a power of two");
  cpu::ActiveOps().tree_sum(args);
}

void CopyBytes(Stream& stream, const CopyArgs& args) {
  if (OnCuda(stream)) {
    cuda::CopyBytes(stream, args);
    return;
  }
  CHECK_GE(args.bytes, 0);
  if (args.bytes > 0) {
    CHECK(args.to != nullptr && args.from != nullptr);
    cpu::ActiveOps().copy_bytes(args.to, args.from, args.bytes);
  }
}

void RowSumSquares(Stream& stream, const RowSumSquaresArgs& args) {
  if (OnCuda(stream)) {
    cuda::RowSumSquares(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckFlat(args.x, args.x.elements());
  CheckFlat(args.sums, args.x.size[0]);
  cpu::ActiveOps().row_sum_squares(args);
}

double TreeSumDouble(const double* values, int64_t count) {
  return cpu::TreeSumDouble(values, count);
}

uint64_t DigestRange(Stream& stream, const TensorView& range, uint64_t first_index) {
  if (OnCuda(stream)) {
    return cuda::DigestRange(stream, range, first_index);
  }
  CheckFlat(range, range.elements(), range.dtype);
  return cpu::DigestRange(range, first_index);
}

void InitNormal(Stream& stream, const InitNormalArgs& args) {
  if (OnCuda(stream)) {
    cuda::InitNormal(stream, args);
    return;
  }
  CheckFlat(args.out, args.out.elements());
  CHECK_MSG(args.first_index >= 0, "an index is not negative");
  cpu::InitNormal(args);
}

}  // namespace ravel::kernels
