// Attention: cuDNN where it takes the operands (attention_plans.h), else our own kernel. Both save
// the same statistic, the natural logarithm of the sum of exponentials of scaled scores, so either
// may run backward after the other's forward.

#include <algorithm>
#include <initializer_list>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kMaxGridY = 65535;

struct AttentionLaunch {
  int64_t tokens;
  int64_t sequences;
  int32_t variant;
  int32_t head_limit;  // that the variant is compiled for
  DType type;
};

AttentionLaunch LaunchOf(const AttentionShape& shape, const TensorView& q) {
  CHECK_MSG(shape.sequence_tokens > 0 && shape.head_size > 0 && shape.kv_heads > 0,
            "sizes are positive");
  CHECK_MSG(shape.query_heads > 0 && shape.query_heads % shape.kv_heads == 0,
            "query heads are a multiple of kv heads");
  CHECK_MSG(shape.head_size <= kAttentionMaxHead, "heads of at most 256");
  CHECK_MSG(q.rows() % shape.sequence_tokens == 0, "tokens are whole sequences");
  RequireFloat(q);
  const int64_t sequences = q.rows() / shape.sequence_tokens;
  CHECK_MSG(shape.query_heads <= kMaxGridY && sequences <= kMaxGridY,
            "too many heads or sequences");
  int32_t bucket = 0;
  while ((int64_t{32} << bucket) < shape.head_size) {
    ++bucket;
  }
  const int32_t first = q.dtype == DType::kBF16 ? 4 : q.dtype == DType::kF16 ? 8 : 0;
  return {q.rows(), sequences, first + bucket, 32 << bucket, q.dtype};
}

AttentionParams ParamsOf(const AttentionShape& shape,
                         const TensorView& q,
                         const TensorView& k,
                         const TensorView& v,
                         const TensorView& out,
                         const TensorView& log_sum_exp) {
  const int64_t query_columns = shape.query_heads * shape.head_size;
  const int64_t kv_columns = shape.kv_heads * shape.head_size;
  RequireMatrix(q, q.rows(), query_columns, q.dtype);
  RequireMatrix(out, q.rows(), query_columns, q.dtype);
  RequireMatrix(k, q.rows(), kv_columns, q.dtype);
  RequireMatrix(v, q.rows(), kv_columns, q.dtype);
  RequireMatrix(log_sum_exp, shape.StatisticRows(q.rows()), shape.sequence_tokens, DType::kF32);
  CHECK_MSG(log_sum_exp.row_stride == shape.sequence_tokens, "log_sum_exp has no gaps");
  AttentionParams params = {};
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.out = out.data;
  params.log_sum_exp = log_sum_exp.As<float>();
  params.q_stride = q.row_stride;
  params.k_stride = k.row_stride;
  params.v_stride = v.row_stride;
  params.out_stride = out.row_stride;
  params.sequence_tokens = shape.sequence_tokens;
  params.query_heads = static_cast<int32_t>(shape.query_heads);
  params.kv_heads = static_cast<int32_t>(shape.kv_heads);
  params.head_size = static_cast<int32_t>(shape.head_size);
  params.scale = shape.scale;
  return params;
}

LaunchShape AttentionShapeOf(const AttentionShape& shape,
                             const AttentionLaunch& launch,
                             Kernel kernel,
                             int64_t heads) {
  return {.kernel = kernel,
          .variant = launch.variant,
          .grid = {static_cast<uint32_t>(DivCeil(shape.sequence_tokens, int64_t{kAttentionTile})),
                   static_cast<uint32_t>(heads),
                   static_cast<uint32_t>(launch.sequences)},
          .block = kAttentionThreads,
          .shared_bytes = AttentionSharedBytes(kernel, launch.head_limit)};
}

RavelCudaAttention DescriptionOf(const AttentionShape& shape,
                                 const AttentionLaunch& launch,
                                 const AttentionParams& params) {
  RavelCudaAttention attention = {};
  attention.sequences = launch.sequences;
  attention.sequence_tokens = shape.sequence_tokens;
  attention.query_heads = shape.query_heads;
  attention.kv_heads = shape.kv_heads;
  attention.head_size = shape.head_size;
  attention.q_stride = params.q_stride;
  attention.k_stride = params.k_stride;
  attention.v_stride = params.v_stride;
  attention.out_stride = params.out_stride;
  attention.dout_stride = params.dout_stride;
  attention.dq_stride = params.dq_stride;
  attention.dk_stride = params.dk_stride;
  attention.dv_stride = params.dv_stride;
  attention.scale = shape.scale;
  attention.type = static_cast<int32_t>(launch.type);
  return attention;
}

bool OnVectors(std::initializer_list<const void*> addresses) {
  constexpr uintptr_t kVectorBytes = 16;
  return std::all_of(addresses.begin(), addresses.end(), [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
  });
}

enum class Pass { kForward, kBackward };

// Bytes of the op's own workspace; 0 where it has no memory.
uint64_t WorkspaceBytes(const TensorView& workspace) {
  return workspace.present()
             ? static_cast<uint64_t>(workspace.elements() * DTypeBytes(workspace.dtype))
             : 0;
}

// False where our own kernel is to run: fp32, operands that do not begin on 16 bytes, and what the
// stream has no engine for.
bool RunThroughCudnn(LaunchStream& on,
                     Pass pass,
                     const AttentionShape& shape,
                     const AttentionLaunch& launch,
                     const AttentionParams& p,
                     const TensorView& workspace) {
  if (!IsNarrow(launch.type) ||
      !OnVectors({p.q, p.k, p.v, p.out, p.log_sum_exp, p.dout, p.dq, p.dk, p.dv})) {
    return false;
  }
  RavelCudaAttention attention = DescriptionOf(shape, launch, p);
  attention.backward = pass == Pass::kBackward ? 1 : 0;
  return on.RunAttention(attention,
                         {.q = p.q,
                          .k = p.k,
                          .v = p.v,
                          .out = p.out,
                          .log_sum_exp = p.log_sum_exp,
                          .dout = p.dout,
                          .dq = p.dq,
                          .dk = p.dk,
                          .dv = p.dv,
                          .workspace = workspace.data,
                          .workspace_bytes = WorkspaceBytes(workspace)});
}

AttentionParams BackwardParamsOf(const AttentionBackwardArgs& args) {
  AttentionParams params = ParamsOf(args.shape, args.q, args.k, args.v, args.out, args.log_sum_exp);
  RequireMatrix(args.dout, args.q.rows(), args.q.size[1], args.q.dtype);
  RequireMatrix(args.dq, args.q.rows(), args.q.size[1], args.q.dtype);
  RequireMatrix(args.dk, args.q.rows(), args.k.size[1], args.q.dtype);
  RequireMatrix(args.dv, args.q.rows(), args.k.size[1], args.q.dtype);
  params.dout = args.dout.data;
  params.dq = args.dq.data;
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.dout_stride = args.dout.row_stride;
  params.dq_stride = args.dq.row_stride;
  params.dk_stride = args.dk.row_stride;
  params.dv_stride = args.dv.row_stride;
  return params;
}

}  // namespace

int64_t PrepareAttention(Stream& stream, const AttentionBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  AttentionBackwardArgs placed = args;  // checked as operands are, which have memory
  for (TensorView* view : {&placed.q,
                           &placed.k,
                           &placed.v,
                           &placed.out,
                           &placed.log_sum_exp,
                           &placed.dout,
                           &placed.dq,
                           &placed.dk,
                           &placed.dv}) {
    view->data = view->present() ? view->data : &placed;
  }
  const AttentionLaunch launch = LaunchOf(args.shape, args.q);
  RavelCudaAttention attention = DescriptionOf(args.shape, launch, BackwardParamsOf(placed));
  if (launch.tokens == 0 || !IsNarrow(launch.type)) {
    return 0;
  }
  attention.backward = 1;
  const uint64_t workspace_bytes = WorkspaceBytes(args.workspace);
  const int64_t backward_bytes = on.PrepareAttention(attention, workspace_bytes);
  attention.backward = 0;
  for (int64_t* stride :
       {&attention.dout_stride, &attention.dq_stride, &attention.dk_stride, &attention.dv_stride}) {
    *stride = 0;
  }
  return std::max(backward_bytes, on.PrepareAttention(attention, workspace_bytes));
}

void AttentionForward(Stream& stream, const AttentionForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const AttentionLaunch launch = LaunchOf(args.shape, args.q);
  const AttentionParams params =
      ParamsOf(args.shape, args.q, args.k, args.v, args.out, args.log_sum_exp);
  if (launch.tokens == 0 ||
      RunThroughCudnn(on, Pass::kForward, args.shape, launch, params, args.workspace)) {
    return;
  }
  on.Run(AttentionShapeOf(args.shape, launch, Kernel::kAttentionForward, args.shape.query_heads),
         params);
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const AttentionLaunch launch = LaunchOf(args.shape, args.q);
  const AttentionParams params = BackwardParamsOf(args);
  if (launch.tokens == 0 ||
      RunThroughCudnn(on, Pass::kBackward, args.shape, launch, params, args.workspace)) {
    return;
  }
  on.Run(AttentionShapeOf(args.shape, launch, Kernel::kAttentionBackwardKeys, args.shape.kv_heads),
         params);
  on.Run(AttentionShapeOf(
             args.shape, launch, Kernel::kAttentionBackwardQueries, args.shape.query_heads),
         params);
}

}  // namespace ravel::kernels::cuda
