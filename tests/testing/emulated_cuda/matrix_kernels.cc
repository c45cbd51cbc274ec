// Operands of the library's own gemm and attention kernels.

#include "common/check.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;

// A factor [rows, columns] as it lies in memory, from the distances of its neighbours in both
// directions, one of which is 1.
Shape ShapeOf(int64_t rows, int64_t columns, int64_t row, int64_t column) {
  return column == 1 ? Shape{rows, columns, row} : Shape{columns, rows, column};
}

void Gemm(const GemmParams& p, Operands& on) {
  on.RequireBlock(kFlatThreads);
  on.RequireGrid(0, DivCeil(p.n, int64_t{kGemmTile}));
  on.RequireGrid(1, DivCeil(p.m, int64_t{kGemmTile}));
  on.Require((p.a_row == 1 || p.a_column == 1) && (p.b_row == 1 || p.b_column == 1),
             "elements of no row lie side by side");
  const DType input = InputType(on.launch().variant);
  on.Add(kRead, "a", p.a, ShapeOf(p.m, p.k, p.a_row, p.a_column), input);
  on.Add(kRead, "b", p.b, ShapeOf(p.k, p.n, p.b_row, p.b_column), input);
  on.Array(kRead, "scale_a", p.scale_a, 1);
  on.Array(kRead, "scale_b", p.scale_b, 1);
  on.Add(p.accumulate != 0 ? kUpdate : kWrite,
         "c",
         p.c,
         {p.m, p.n, p.c_stride},
         OutputType(on.launch().variant));
}

void GemmFactors(const GemmFactorsParams& p, Operands& on) {
  on.RequireBlock(kWarpThreads);
  on.Array(kRead, "a", p.a, 1);
  on.Array(kRead, "b", p.b, 1);
  on.Array(kWrite, "to", p.to, 2);
}

template <Kernel kKernel>
void Attention(const AttentionParams& p, Operands& on) {
  constexpr bool kForward = kKernel == Kernel::kAttentionForward;
  constexpr bool kKeys = kKernel == Kernel::kAttentionBackwardKeys;
  const int32_t variant = on.launch().variant;
  const int32_t limit = 32 << variant % kAttentionHeads;
  on.RequireBlock(kAttentionThreads);
  on.RequireGrid(0, DivCeil(p.sequence_tokens, int64_t{kAttentionTile}));
  on.RequireGrid(1, kKeys ? p.kv_heads : p.query_heads);
  on.Require(p.head_size > 0 && p.head_size <= limit, "heads larger than the kernel's");
  on.Require(p.kv_heads > 0 && p.query_heads % p.kv_heads == 0, "heads do not group");
  on.Require(on.launch().shared_bytes == AttentionSharedBytes(kKernel, limit),
             "shared memory of another size");
  const int64_t sequences = on.launch().grid[2];
  const int64_t tokens = sequences * p.sequence_tokens;
  const int64_t queries = int64_t{p.query_heads} * p.head_size;
  const int64_t keys = int64_t{p.kv_heads} * p.head_size;
  const DType dtype = AttentionType(variant);
  const Access::Kind result = kForward ? kWrite : kRead;
  on.Add(kRead, "q", p.q, {tokens, queries, p.q_stride}, dtype);
  on.Add(kRead, "k", p.k, {tokens, keys, p.k_stride}, dtype);
  on.Add(kRead, "v", p.v, {tokens, keys, p.v_stride}, dtype);
  on.Add(result, "out", p.out, {tokens, queries, p.out_stride}, dtype);
  on.Array(result, "log_sum_exp", p.log_sum_exp, tokens * p.query_heads);
  if (kForward) {
    return;
  }
  on.Add(kRead, "dout", p.dout, {tokens, queries, p.dout_stride}, dtype);
  if (kKeys) {
    on.Add(kWrite, "dk", p.dk, {tokens, keys, p.dk_stride}, dtype);
    on.Add(kWrite, "dv", p.dv, {tokens, keys, p.dv_stride}, dtype);
  } else {
    on.Add(kWrite, "dq", p.dq, {tokens, queries, p.dq_stride}, dtype);
  }
}

}  // namespace

std::vector<KernelOperands> MatrixKernels() {
  return {Declare<GemmParams, Gemm>(Kernel::kGemm, "Gemm"),
          Declare<GemmFactorsParams, GemmFactors>(Kernel::kGemmFactors, "GemmFactors"),
          Declare<AttentionParams, Attention<Kernel::kAttentionForward>>(Kernel::kAttentionForward,
                                                                         "AttentionForward"),
          Declare<AttentionParams, Attention<Kernel::kAttentionBackwardKeys>>(
              Kernel::kAttentionBackwardKeys, "AttentionBackwardKeys"),
          Declare<AttentionParams, Attention<Kernel::kAttentionBackwardQueries>>(
              Kernel::kAttentionBackwardQueries, "AttentionBackwardQueries")};
}

}  // namespace ravel::kernels::cuda::emulated
