#include "tests/testing/emulated_cuda/emulated_attention.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr int64_t kVectorElements = 8;  // of bf16 or fp16 in 16 bytes
constexpr uintptr_t kVectorBytes = 16;
constexpr int64_t kMaxHead = 128;

AttentionShape ShapeOf(const RavelCudaAttention& attention) {
  return {.sequence_tokens = attention.sequence_tokens,
          .query_heads = attention.query_heads,
          .kv_heads = attention.kv_heads,
          .head_size = attention.head_size,
          .scale = attention.scale};
}

bool OnVectors(std::initializer_list<const void*> addresses) {
  uintptr_t all = 0;
  for (const void* address : addresses) {
    all |= reinterpret_cast<uintptr_t>(address);
  }
  return all % kVectorBytes == 0;
}

struct AttentionOperands {
  Operand q, k, v, out, log_sum_exp, dout, dq, dk, dv;
};

AttentionOperands OperandsOf(const RavelCudaAttention& a,
                             const RavelCudaAttentionBuffers& b,
                             DType dtype,
                             Operands& operands) {
  const int64_t tokens = a.sequences * a.sequence_tokens;
  const int64_t queries = a.query_heads * a.head_size;
  const int64_t keys = a.kv_heads * a.head_size;
  const bool backward = a.backward != 0;
  const Access::Kind result = backward ? kRead : kWrite;
  const auto add = [&](Access::Kind kind, const char* name, const void* data, const Shape& shape) {
    return operands.Add(kind, name, data, shape, dtype);
  };
  AttentionOperands all;
  all.q = add(kRead, "q", b.q, {tokens, queries, a.q_stride});
  all.k = add(kRead, "k", b.k, {tokens, keys, a.k_stride});
  all.v = add(kRead, "v", b.v, {tokens, keys, a.v_stride});
  all.out = add(result, "out", b.out, {tokens, queries, a.out_stride});
  all.log_sum_exp =
      operands.Add(result,
                   "log_sum_exp",
                   b.log_sum_exp,
                   {a.sequences * a.query_heads, a.sequence_tokens, a.sequence_tokens},
                   DType::kF32);
  if (backward) {
    all.dout = add(kRead, "dout", b.dout, {tokens, queries, a.dout_stride});
    all.dq = add(kWrite, "dq", b.dq, {tokens, queries, a.dq_stride});
    all.dk = add(kWrite, "dk", b.dk, {tokens, keys, a.dk_stride});
    all.dv = add(kWrite, "dv", b.dv, {tokens, keys, a.dv_stride});
  }
  return all;
}

void Run(Staging& on, const AttentionShape& shape, const AttentionOperands& all, bool backward) {
  std::vector<float> scratch(static_cast<size_t>(cpu::AttentionWorkspaceElements(shape)));
  const TensorView workspace = VectorView(scratch.data(), static_cast<int64_t>(scratch.size()));
  if (!backward) {
    cpu::ActiveOps().attention_forward({.shape = shape,
                                        .q = on.View(all.q),
                                        .k = on.View(all.k),
                                        .v = on.View(all.v),
                                        .out = on.View(all.out),
                                        .log_sum_exp = on.View(all.log_sum_exp),
                                        .workspace = workspace});
    return;
  }
  cpu::ActiveOps().attention_backward({.shape = shape,
                                       .q = on.View(all.q),
                                       .k = on.View(all.k),
                                       .v = on.View(all.v),
                                       .out = on.View(all.out),
                                       .log_sum_exp = on.View(all.log_sum_exp),
                                       .dout = on.View(all.dout),
                                       .dq = on.View(all.dq),
                                       .dk = on.View(all.dk),
                                       .dv = on.View(all.dv),
                                       .workspace = workspace});
}

}  // namespace

void RunOwnAttention(Kernel kernel, DType dtype, int64_t sequences, const AttentionParams& p) {
  const bool keys = kernel == Kernel::kAttentionBackwardKeys;
  const RavelCudaAttention attention = {.sequences = sequences,
                                        .sequence_tokens = p.sequence_tokens,
                                        .query_heads = p.query_heads,
                                        .kv_heads = p.kv_heads,
                                        .head_size = p.head_size,
                                        .q_stride = p.q_stride,
                                        .k_stride = p.k_stride,
                                        .v_stride = p.v_stride,
                                        .out_stride = p.out_stride,
                                        .dout_stride = p.dout_stride,
                                        .dq_stride = keys ? p.q_stride : p.dq_stride,
                                        .dk_stride = keys ? p.dk_stride : p.k_stride,
                                        .dv_stride = keys ? p.dv_stride : p.v_stride,
                                        .scale = p.scale,
                                        .backward = kernel != Kernel::kAttentionForward ? 1 : 0,
                                        .deterministic = 1,
                                        .type = static_cast<int32_t>(dtype)};
  const int64_t widest = std::max({p.q_stride, p.k_stride, p.v_stride});
  std::vector<float> dropped(static_cast<size_t>(sequences * p.sequence_tokens * widest));
  const RavelCudaAttentionBuffers buffers = {.q = p.q,
                                             .k = p.k,
                                             .v = p.v,
                                             .out = p.out,
                                             .log_sum_exp = p.log_sum_exp,
                                             .dout = p.dout,
                                             .dq = keys ? dropped.data() : p.dq,
                                             .dk = keys ? p.dk : dropped.data(),
                                             .dv = keys ? p.dv : dropped.data(),
                                             .workspace = nullptr,
                                             .workspace_bytes = 0};
  const KernelLaunch launch;
  Operands operands(launch);
  const AttentionOperands all = OperandsOf(attention, buffers, dtype, operands);
  Staging on;
  Run(on, ShapeOf(attention), all, attention.backward != 0);
  on.Finish();
}

std::string AttentionProblem(const RavelCudaAttention& attention) {
  const RavelCudaAttention& a = attention;
  if (static_cast<DType>(a.type) != DType::kBF16 && static_cast<DType>(a.type) != DType::kF16) {
    return "heads of another type than bf16 and fp16: no engine";
  }
  if (a.sequences < 1 || a.sequence_tokens < 1 || a.kv_heads < 1 || a.query_heads < 1 ||
      a.query_heads % a.kv_heads != 0) {
    return "sizes that no engine takes";
  }
  if (a.head_size % kVectorElements != 0 || a.head_size > kMaxHead) {
    return "heads of " + std::to_string(a.head_size) + " elements: no engine";
  }
  for (const int64_t stride : {a.q_stride,
                               a.k_stride,
                               a.v_stride,
                               a.out_stride,
                               a.dout_stride,
                               a.dq_stride,
                               a.dk_stride,
                               a.dv_stride}) {
    if (stride % kVectorElements != 0) {
      return "rows that do not begin on 16 bytes: no engine";
    }
  }
  return "";
}

uint64_t AttentionWorkspaceBytes(const RavelCudaAttention& attention) {
  constexpr int64_t kBytesPerRow = 256;
  return static_cast<uint64_t>(attention.sequences * attention.query_heads *
                               attention.sequence_tokens * kBytesPerRow);
}

PlannedLaunch PlanAttention(const RavelCudaAttention& attention,
                            const RavelCudaAttentionBuffers& buffers) {
  const KernelLaunch launch = {.name = attention.backward != 0 ? "attention backward"
                                                               : "attention forward"};
  Operands operands(launch);
  const std::string problem = AttentionProblem(attention);
  operands.Require(problem.empty(), problem);
  operands.Require(OnVectors({buffers.q,
                              buffers.k,
                              buffers.v,
                              buffers.out,
                              buffers.log_sum_exp,
                              buffers.dout,
                              buffers.dq,
                              buffers.dk,
                              buffers.dv}),
                   "operands do not begin on 16 bytes");
  const uint64_t bytes = AttentionWorkspaceBytes(attention);
  void* workspace = buffers.workspace;
  operands.Require(workspace != nullptr && buffers.workspace_bytes >= bytes,
                   "too little workspace");
  operands.Touch(kWrite, "workspace", workspace, static_cast<int64_t>(bytes));
  const AttentionOperands all =
      OperandsOf(attention, buffers, static_cast<DType>(attention.type), operands);
  const AttentionShape shape = ShapeOf(attention);
  const bool backward = attention.backward != 0;
  return operands.Plan([=] {
    std::memset(workspace, 0xFF, bytes);
    Staging on;
    Run(on, shape, all, backward);
    on.Finish();
  });
}

}  // namespace ravel::kernels::cuda::emulated
