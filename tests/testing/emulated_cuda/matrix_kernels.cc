// The library's own gemm and attention kernels.

#include "common/check.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;

// A factor [rows, columns] given by the distance of its neighbours in both directions, one of
// which is 1: the matrix as it lies in memory, and whether that is the transpose.
struct Factor {
  Shape shape;
  Transpose transpose = Transpose::kNo;
};

Factor FactorOf(int64_t rows, int64_t columns, int64_t row, int64_t column) {
  return column == 1 ? Factor{{rows, columns, row}, Transpose::kNo}
                     : Factor{{columns, rows, column}, Transpose::kYes};
}

PlannedLaunch PlanGemm(const KernelLaunch& launch, const GemmParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, DivCeil(p.n, int64_t{kGemmTile}));
  operands.RequireGrid(1, DivCeil(p.m, int64_t{kGemmTile}));
  operands.Require((p.a_row == 1 || p.a_column == 1) && (p.b_row == 1 || p.b_column == 1),
                   "elements of no row lie side by side");
  const Factor a = FactorOf(p.m, p.k, p.a_row, p.a_column);
  const Factor b = FactorOf(p.k, p.n, p.b_row, p.b_column);
  const bool accumulate = p.accumulate != 0;
  const DType input = InputType(launch.variant);
  const Operand left = operands.Add(kRead, "a", p.a, a.shape, input);
  const Operand right = operands.Add(kRead, "b", p.b, b.shape, input);
  const Operand c = operands.Add(
      accumulate ? kUpdate : kWrite, "c", p.c, {p.m, p.n, p.c_stride}, OutputType(launch.variant));
  return operands.Plan([=](Staging& on) {
    cpu::Gemm({.a = on.View(left),
               .transpose_a = a.transpose,
               .b = on.View(right),
               .transpose_b = b.transpose,
               .c = on.View(c),
               .output = accumulate ? Output::kAccumulate : Output::kOverwrite});
  });
}

constexpr int32_t kBf16Heads = 4;  // variants from here on are bf16

AttentionShape ShapeOf(const AttentionParams& p) {
  return {.sequence_tokens = p.sequence_tokens,
          .query_heads = p.query_heads,
          .kv_heads = p.kv_heads,
          .head_size = p.head_size,
          .scale = p.scale};
}

// The operands that all three kernels have.
struct AttentionOperands {
  Operands all;
  int64_t tokens;
  DType dtype;
  Operand q, k, v, out, log_sum_exp;

  AttentionOperands(const KernelLaunch& launch, const AttentionParams& p, Kernel kernel)
      : all(launch),
        tokens(int64_t{launch.grid[2]} * p.sequence_tokens),
        dtype(launch.variant >= kBf16Heads ? DType::kBF16 : DType::kF32) {
    const bool forward = kernel == Kernel::kAttentionForward;
    const int32_t limit = 32 << launch.variant % kBf16Heads;
    all.RequireBlock(kAttentionThreads);
    all.RequireGrid(0, DivCeil(p.sequence_tokens, int64_t{kAttentionTile}));
    all.RequireGrid(1, kernel == Kernel::kAttentionBackwardKeys ? p.kv_heads : p.query_heads);
    all.Require(p.head_size > 0 && p.head_size <= limit, "heads larger than the kernel's");
    all.Require(p.kv_heads > 0 && p.query_heads % p.kv_heads == 0, "heads do not group");
    all.Require(launch.shared_bytes == AttentionSharedBytes(kernel, limit),
                "shared memory of another size");
    const Access::Kind result = forward ? kWrite : kRead;
    q = all.Add(kRead, "q", p.q, {tokens, QueryColumns(p), p.q_stride}, dtype);
    k = all.Add(kRead, "k", p.k, {tokens, KvColumns(p), p.k_stride}, dtype);
    v = all.Add(kRead, "v", p.v, {tokens, KvColumns(p), p.v_stride}, dtype);
    out = all.Add(result, "out", p.out, {tokens, QueryColumns(p), p.out_stride}, dtype);
    log_sum_exp =
        all.Add(result,
                "log_sum_exp",
                p.log_sum_exp,
                {int64_t{launch.grid[2]} * p.query_heads, p.sequence_tokens, p.sequence_tokens},
                DType::kF32);
  }
  static int64_t QueryColumns(const AttentionParams& p) {
    return int64_t{p.query_heads} * p.head_size;
  }
  static int64_t KvColumns(const AttentionParams& p) { return int64_t{p.kv_heads} * p.head_size; }
};

std::vector<float> WorkspaceOf(const AttentionShape& shape) {
  return std::vector<float>(static_cast<size_t>(cpu::AttentionWorkspaceElements(shape)));
}

TensorView ViewOf(std::vector<float>& values) {
  return VectorView(values.data(), static_cast<int64_t>(values.size()));
}

PlannedLaunch PlanAttentionForward(const KernelLaunch& launch, const AttentionParams& p) {
  const AttentionOperands o(launch, p, Kernel::kAttentionForward);
  const AttentionShape shape = ShapeOf(p);
  return o.all.Plan(
      [shape, q = o.q, k = o.k, v = o.v, out = o.out, lse = o.log_sum_exp](Staging& on) {
        std::vector<float> workspace = WorkspaceOf(shape);
        cpu::ActiveOps().attention_forward({.shape = shape,
                                            .q = on.View(q),
                                            .k = on.View(k),
                                            .v = on.View(v),
                                            .out = on.View(out),
                                            .log_sum_exp = on.View(lse),
                                            .workspace = ViewOf(workspace)});
      });
}

// A result that the other of the two backward kernels computes.
class Discarded {
 public:
  Discarded(int64_t rows, int64_t columns)
      : values_(static_cast<size_t>(rows * columns)), rows_(rows), columns_(columns) {}
  TensorView View() { return MatrixView(values_.data(), rows_, columns_); }

 private:
  std::vector<float> values_;
  int64_t rows_;
  int64_t columns_;
};

template <bool kKeys>
PlannedLaunch PlanAttentionBackward(const KernelLaunch& launch, const AttentionParams& p) {
  const Kernel kernel = kKeys ? Kernel::kAttentionBackwardKeys : Kernel::kAttentionBackwardQueries;
  AttentionOperands o(launch, p, kernel);
  const int64_t queries = AttentionOperands::QueryColumns(p);
  const int64_t keys = AttentionOperands::KvColumns(p);
  const int64_t tokens = o.tokens;
  const Operand dout = o.all.Add(kRead, "dout", p.dout, {tokens, queries, p.dout_stride}, o.dtype);
  Operand dq, dk, dv;
  if (kKeys) {
    dk = o.all.Add(kWrite, "dk", p.dk, {tokens, keys, p.dk_stride}, o.dtype);
    dv = o.all.Add(kWrite, "dv", p.dv, {tokens, keys, p.dv_stride}, o.dtype);
  } else {
    dq = o.all.Add(kWrite, "dq", p.dq, {tokens, queries, p.dq_stride}, o.dtype);
  }
  const AttentionShape shape = ShapeOf(p);
  const Operand q = o.q, k = o.k, v = o.v, out = o.out, lse = o.log_sum_exp;
  return o.all.Plan([=](Staging& on) {
    std::vector<float> workspace = WorkspaceOf(shape);
    Discarded other_dq(kKeys ? tokens : 0, queries);
    Discarded other_dk(kKeys ? 0 : tokens, keys);
    Discarded other_dv(kKeys ? 0 : tokens, keys);
    cpu::ActiveOps().attention_backward({.shape = shape,
                                         .q = on.View(q),
                                         .k = on.View(k),
                                         .v = on.View(v),
                                         .out = on.View(out),
                                         .log_sum_exp = on.View(lse),
                                         .dout = on.View(dout),
                                         .dq = kKeys ? other_dq.View() : on.View(dq),
                                         .dk = kKeys ? on.View(dk) : other_dk.View(),
                                         .dv = kKeys ? on.View(dv) : other_dv.View(),
                                         .workspace = ViewOf(workspace)});
  });
}

}  // namespace

std::vector<EmulatedKernel> MatrixKernels() {
  const std::vector<int32_t> heads = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<EmulatedKernel> all;
  AddKernel<GemmParams, PlanGemm>(
      Kernel::kGemm, "Gemm", {kF32Scalar, kBf16Scalar, kMixedScalar}, all);
  AddKernel<AttentionParams, PlanAttentionForward>(
      Kernel::kAttentionForward, "AttentionForward", heads, all);
  AddKernel<AttentionParams, PlanAttentionBackward<true>>(
      Kernel::kAttentionBackwardKeys, "AttentionBackwardKeys", heads, all);
  AddKernel<AttentionParams, PlanAttentionBackward<false>>(
      Kernel::kAttentionBackwardQueries, "AttentionBackwardQueries", heads, all);
  return all;
}

}  // namespace ravel::kernels::cuda::emulated
