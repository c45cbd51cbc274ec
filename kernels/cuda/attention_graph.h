#pragma once

// Causal grouped-query attention as the graphs that cuDNN's engines recognise as flash attention:
// pure values, no library. An engine is found by the shape of the graph and the order of its
// operations, so the chains below are longer than the formula needs; they are not simplified.
// Standard library only.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda {

enum class GraphType { kBf16, kFp16, kF32, kInt32, kBoolean };

// The role of a graph's tensor for the caller.
enum class GraphRole {
  kVirtual,  // between operations; never in memory as far as the caller knows
  kScalar,   // one fp32 number, given by value
  kScratch,  // memory of the workspace
  // Operands, in the order of RavelCudaAttentionBuffers.
  kQ,
  kK,
  kV,
  kOut,
  kLogSumExp,
  kDOut,
  kDQ,
  kDK,
  kDV,
};

// [sequences, heads, rows, columns]; strides in elements.
using GraphSize = std::array<int64_t, 4>;

struct GraphTensor {
  GraphSize size;
  GraphSize stride;
  GraphType type = GraphType::kF32;
  GraphRole role = GraphRole::kVirtual;
  float value = 0.0f;        // of a scalar
  int64_t offset_bytes = 0;  // of scratch, in the workspace
};

enum class GraphOperator {
  kMatmul,
  kReshape,  // the same numbers under other sizes and strides
  kSum,      // over the axes that have size 1 in the output
  kMax,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kExp,
  kLog,
  kIdentity,
  kIndex,         // along `axis`
  kGreaterEqual,  // boolean
  kSelect,        // first input where the third is true, else the second
};

struct GraphOperation {
  GraphOperator op;
  std::vector<size_t> inputs;  // of tensors
  size_t output;
  int64_t axis = 0;
  GraphType compute = GraphType::kF32;
};

// Operations in an order in which each input is a tensor of the caller or was written before. What
// cuDNN calls a tensor's unique id is its index plus 1.
struct AttentionGraph {
  std::vector<GraphTensor> tensors;
  std::vector<GraphOperation> operations;
  int64_t scratch_bytes = 0;  // a multiple of 256, before the engine's own workspace
};

// out and the natural logarithm of the sum of exponentials of scaled scores.
AttentionGraph ForwardAttentionGraph(const RavelCudaAttention& attention);

// dq, dk, dv. Deterministic: without the fp32 accumulator of dq, to which blocks add in any order.
AttentionGraph BackwardAttentionGraph(const RavelCudaAttention& attention);

// The same forward pass as one node, from 9.21. `operands` has no operations: q, k, v, out,
// log_sum_exp, the scale, then the scores before and after the softmax. `mask` is the node's inner
// graph, from its first tensor to its last; its ids go on after those of the operands.
struct UnifiedAttention {
  AttentionGraph operands;
  AttentionGraph mask;
};
UnifiedAttention ForwardUnifiedAttention(const RavelCudaAttention& attention);

// Why no engine is asked: other dimensions than they take, rows that do not lie on 16 bytes, or a
// version of cuDNN known to be wrong there. Empty where one is asked. `version` is 91900 for 9.19.
std::string WhyNoAttentionEngine(const RavelCudaAttention& attention, uint64_t version);

// Oldest version whose bf16 attention is right (9.10.0 and 9.10.1 are withdrawn), and the oldest
// whose one-node attention has masks.
inline constexpr uint64_t kOldestCudnn = 91002;
inline constexpr uint64_t kOldestUnifiedMask = 92100;

}  // namespace ravel::kernels::cuda
