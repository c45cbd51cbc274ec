// Ops: shapes and types checked once, then the CPU implementation. Activations and weights are all
// fp32, all bf16 or all fp16; statistics, losses, tables of angles and gradients of tables are
// fp32. On a CUDA stream kernels/cuda_host checks for itself.

#include <bit>

#include "common/check.h"
#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cpu/step_statistics.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/digest.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/operand_checks.h"
#include "kernels/philox.h"
#include "kernels/rope.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"

namespace ravel::kernels {
namespace {

void CheckPositions(const TensorView& x,
                    const TensorView& table,
                    DType table_dtype,
                    int64_t sequence_tokens) {
  CheckFloat(x);
  CheckMatrix(x, x.size[0], x.size[1], x.dtype);
  CheckRank2(table);
  CheckMatrix(table, table.size[0], x.size[1], table_dtype);
  CHECK_MSG(sequence_tokens > 0 && sequence_tokens <= table.size[0],
            "the table is shorter than a sequence");
}

void CheckIds(const TensorView& ids, int64_t limit, int64_t lowest) {
  const int32_t* values = ids.As<int32_t>();
  for (int64_t i = 0; i < ids.elements(); ++i) {
    CHECK_MSG(values[i] >= lowest && values[i] < limit, "id outside the vocabulary");
  }
}

int64_t VocabularyOf(const TableRows& rows, const TensorView& table) {
  CHECK_MSG(rows.first >= 0 && (rows.vocabulary > 0 || rows.first == 0),
            "a part of a table is of a vocabulary");
  return rows.vocabulary > 0 ? rows.vocabulary : table.size[0];
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
  CheckFloat(args.a);
  CheckFloat(args.c);
  CHECK_MSG(args.c.dtype == DType::kF32 || args.a.dtype != DType::kF32, "a gemm of fp32 is fp32");
  CHECK_MSG(args.c.dtype == DType::kF32 || args.c.dtype == args.a.dtype, "wrong element type");
  CheckMatrix(args.a, flip_a ? k : m, flip_a ? m : k, args.a.dtype);
  CheckMatrix(args.b, flip_b ? n : k, flip_b ? k : n, args.a.dtype);
  CheckMatrix(args.c, m, n, args.c.dtype);
  for (const TensorView& scale : {args.scale_a, args.scale_b}) {
    if (scale.present()) {
      CheckFlat(scale, 1);
    }
  }
  cpu::Gemm(args);
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
  CheckFloat(args.x);
  CheckMatrix(args.x, args.x.size[0], args.x.size[1], args.x.dtype);
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
  CheckFloat(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.y}) {
    CheckMatrix(view, args.gate.size[0], args.gate.size[1], args.gate.dtype);
  }
  cpu::ActiveOps().swi_glu_forward(args);
}

void SwiGluBackward(Stream& stream, const SwiGluBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::SwiGluBackward(stream, args);
    return;
  }
  CheckRank2(args.gate);
  CheckFloat(args.gate);
  for (const TensorView& view : {args.gate, args.up, args.dy, args.dgate, args.dup}) {
    CheckMatrix(view, args.gate.size[0], args.gate.size[1], args.gate.dtype);
  }
  if (args.y.present()) {
    CheckMatrix(args.y, args.gate.size[0], args.gate.size[1], args.gate.dtype);
  }
  cpu::ActiveOps().swi_glu_backward(args);
}

void GeluForward(Stream& stream, const GeluForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::GeluForward(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckFloat(args.x);
  for (const TensorView& view : {args.x, args.y}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1], args.x.dtype);
  }
  cpu::ActiveOps().gelu_forward(args);
}

void GeluBackward(Stream& stream, const GeluBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::GeluBackward(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckFloat(args.x);
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    CheckMatrix(view, args.x.size[0], args.x.size[1], args.x.dtype);
  }
  if (args.y.present()) {
    CheckMatrix(args.y, args.x.size[0], args.x.size[1], args.x.dtype);
  }
  cpu::ActiveOps().gelu_backward(args);
}

namespace {

// A contiguous view as a matrix of one row.
TensorView AsRow(const TensorView& view) {
  TensorView row = view;
  row.rank = 2;
  row.size = {1, view.elements()};
  row.row_stride = view.elements();
  return row;
}

}  // namespace

void AddInPlace(Stream& stream, const AddArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddInPlace(stream, args);
    return;
  }
  CheckFloat(args.x);
  if (args.x.rank == 2 && args.y.rank == 2) {
    CheckMatrix(args.x, args.x.size[0], args.x.size[1], args.x.dtype);
    CheckMatrix(args.y, args.x.size[0], args.x.size[1], args.x.dtype);
    cpu::ActiveOps().add_in_place(args);
    return;
  }
  const int64_t n = args.x.elements();
  CheckFlat(args.x, n, args.x.dtype);
  CheckFlat(args.y, n, args.x.dtype);
  cpu::ActiveOps().add_in_place({AsRow(args.x), AsRow(args.y)});
}

void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::EmbeddingForward(stream, args);
    return;
  }
  CheckRank2(args.table);
  CheckFloat(args.table);
  CheckMatrix(args.table, args.table.size[0], args.table.size[1], args.table.dtype);
  CHECK_MSG(args.out.dtype == args.table.dtype || args.out.dtype == DType::kF32,
            "rows of a table are of its type, or fp32");
  CheckMatrix(args.out, args.ids.elements(), args.table.size[1], args.out.dtype);
  CheckFlat(args.ids, args.ids.elements(), DType::kI32);
  CheckIds(args.ids, VocabularyOf(args.rows, args.table), 0);
  cpu::EmbeddingForward(args);
}

void EmbeddingBackward(Stream& stream, const EmbeddingBackwardArgs& args) {
  if (OnCuda(stream)) {
    cuda::EmbeddingBackward(stream, args);
    return;
  }
  CheckRank2(args.dtable);
  CheckMatrix(args.dtable, args.dtable.size[0], args.dtable.size[1]);
  CheckFloat(args.dout);
  CheckMatrix(args.dout, args.ids.elements(), args.dtable.size[1], args.dout.dtype);
  CheckFlat(args.ids, args.ids.elements(), DType::kI32);
  CheckIds(args.ids, VocabularyOf(args.rows, args.dtable), 0);
  cpu::ActiveOps().embedding_backward(args);
}

void AddPositions(Stream& stream, const AddPositionsArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddPositions(stream, args);
    return;
  }
  CheckRank2(args.x);
  CheckPositions(args.x, args.table, args.x.dtype, args.sequence_tokens);
  cpu::ActiveOps().add_positions(args);
}

void PositionGradient(Stream& stream, const PositionGradientArgs& args) {
  if (OnCuda(stream)) {
    cuda::PositionGradient(stream, args);
    return;
  }
  CheckRank2(args.dx);
  CheckPositions(args.dx, args.dtable, DType::kF32, args.sequence_tokens);
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
  CheckFloat(x);
  CheckMatrix(x, tokens, x.size[1], x.dtype);
  CheckMatrix(w, w.size[0], x.size[1], x.dtype);
  CheckFlat(targets, tokens, DType::kI32);
  CheckFlat(loss, tokens);
  CHECK_MSG(workspace.size[0] > 0 || tokens == 0, "the workspace has no rows");
  CheckFlat(workspace, workspace.size[0] * w.size[0], x.dtype);
  CheckMatrix(workspace, workspace.size[0], w.size[0], x.dtype);
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
  CheckMatrix(args.dx, args.x.size[0], args.x.size[1], args.x.dtype);
  CHECK_MSG(args.loss_scale == 1.0f || args.x.dtype == DType::kF16, "a loss scale is for fp16");
  CHECK_MSG(args.device_loss_scale == nullptr, "a host reads no memory of devices");
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
  CheckFloat(args.q);
  for (const TensorView& view : {args.q, args.out}) {
    CheckMatrix(view, tokens, shape.query_heads * shape.head_size, args.q.dtype);
  }
  for (const TensorView& view : {args.k, args.v}) {
    CheckMatrix(view, tokens, shape.kv_heads * shape.head_size, args.q.dtype);
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
  CheckFloat(args.q);
  for (const TensorView& view : {args.q, args.out, args.dout, args.dq}) {
    CheckMatrix(view, tokens, shape.query_heads * shape.head_size, args.q.dtype);
  }
  for (const TensorView& view : {args.k, args.v, args.dk, args.dv}) {
    CheckMatrix(view, tokens, shape.kv_heads * shape.head_size, args.q.dtype);
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
  CheckMatrix(args.x, args.x.size[0], args.x.size[1]);
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

void AddDigest(Stream& stream, const AddDigestArgs& args) {
  if (OnCuda(stream)) {
    cuda::AddDigest(stream, args);
    return;
  }
  CheckFlat(args.range, args.range.elements(), args.range.dtype);
  *args.sum += cpu::DigestRange(args.range, args.first_index);
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
