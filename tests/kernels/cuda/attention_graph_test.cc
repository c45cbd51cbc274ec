// Graphs of attention as values, without a device.

#include "kernels/cuda/attention_graph.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "tests/kernels/cuda_host/described_attention.h"

namespace ravel::kernels::cuda::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const GraphTensor& TensorOf(const AttentionGraph& graph, GraphRole role) {
  const auto found = std::find_if(graph.tensors.begin(),
                                  graph.tensors.end(),
                                  [&](const GraphTensor& tensor) { return tensor.role == role; });
  CHECK(found != graph.tensors.end());
  return *found;
}

std::vector<GraphOperator> OperatorsOf(const AttentionGraph& graph) {
  std::vector<GraphOperator> operators;
  for (const GraphOperation& operation : graph.operations) {
    operators.push_back(operation.op);
  }
  return operators;
}

// Each input is the caller's or was written by an operation before; nothing is written twice.
void ExpectOrdered(const AttentionGraph& graph) {
  std::set<size_t> written;
  for (const GraphOperation& operation : graph.operations) {
    for (const size_t input : operation.inputs) {
      const GraphRole role = graph.tensors[input].role;
      const bool made_here = role == GraphRole::kVirtual || role == GraphRole::kScratch;
      EXPECT_TRUE(!made_here || written.contains(input)) << "tensor " << input;
    }
    EXPECT_TRUE(written.insert(operation.output).second) << "tensor " << operation.output;
  }
}

TEST(AttentionGraph, OperandsLieAsInOurMatrices) {
  const AttentionGraph graph = ForwardAttentionGraph(Described(2, false));
  const GraphTensor& q = TensorOf(graph, GraphRole::kQ);
  EXPECT_EQ(q.size, (GraphSize{2, 32, 8192, 128}));
  EXPECT_EQ(q.stride, (GraphSize{int64_t{8192} * 6144, 128, 6144, 1}));
  const GraphTensor& k = TensorOf(graph, GraphRole::kK);  // flipped: no copy is made for that
  EXPECT_EQ(k.size, (GraphSize{2, 8, 128, 8192}));
  EXPECT_EQ(k.stride, (GraphSize{int64_t{8192} * 6144, 128, 1, 6144}));
  EXPECT_EQ(TensorOf(graph, GraphRole::kV).size, (GraphSize{2, 8, 8192, 128}));
  const GraphTensor& out = TensorOf(graph, GraphRole::kOut);
  EXPECT_EQ(out.stride, (GraphSize{int64_t{8192} * 4096, 128, 4096, 1}));
  EXPECT_EQ(out.type, GraphType::kBf16);
  const GraphTensor& statistics = TensorOf(graph, GraphRole::kLogSumExp);
  EXPECT_EQ(statistics.size, (GraphSize{2, 32, 8192, 1}));
  EXPECT_EQ(statistics.stride, (GraphSize{32 * 8192, 8192, 1, 1}));
  EXPECT_EQ(statistics.type, GraphType::kF32);
}

TEST(AttentionGraph, OfFp16OnlyTheTypeIsAnother) {
  for (const bool backward : {false, true}) {
    RavelCudaAttention attention = Described(1, backward);
    const auto graph_of = [&] {
      return backward ? BackwardAttentionGraph(attention) : ForwardAttentionGraph(attention);
    };
    const AttentionGraph bf16 = graph_of();
    attention.type = static_cast<int32_t>(DType::kF16);
    const AttentionGraph fp16 = graph_of();
    ASSERT_EQ(fp16.tensors.size(), bf16.tensors.size());
    EXPECT_EQ(OperatorsOf(fp16), OperatorsOf(bf16));
    for (size_t i = 0; i < fp16.tensors.size(); ++i) {
      const GraphType type = bf16.tensors[i].type;
      EXPECT_EQ(fp16.tensors[i].type, type == GraphType::kBf16 ? GraphType::kFp16 : type);
    }
  }
}

TEST(AttentionGraph, ForwardIsTheChainThatEnginesKnow) {
  const AttentionGraph graph = ForwardAttentionGraph(Described(1, false));
  using enum GraphOperator;
  EXPECT_THAT(OperatorsOf(graph),
              ElementsAre(kMatmul,
                          kMultiply,
                          kIndex,
                          kIndex,
                          kGreaterEqual,
                          kSelect,
                          kMax,
                          kSubtract,
                          kExp,
                          kSum,
                          kLog,
                          kAdd,
                          kDivide,
                          kMatmul));
  ExpectOrdered(graph);
  EXPECT_EQ(graph.scratch_bytes, 0);
  EXPECT_EQ(graph.operations[2].axis, 2);
  EXPECT_EQ(graph.operations[3].axis, 3);
}

TEST(AttentionGraph, DeterministicBackwardHasNoAccumulator) {
  RavelCudaAttention attention = Described(1, true);
  const AttentionGraph fast = BackwardAttentionGraph(attention);
  attention.deterministic = 1;
  const AttentionGraph exact = BackwardAttentionGraph(attention);
  ExpectOrdered(fast);
  ExpectOrdered(exact);
  constexpr int64_t kRows = 32 * 8192 * 4;
  EXPECT_EQ(exact.scratch_bytes, kRows);
  EXPECT_EQ(fast.scratch_bytes, kRows + kRows * 128);
  EXPECT_EQ(fast.operations.back().op, GraphOperator::kIdentity);
  EXPECT_EQ(exact.operations.back().op, GraphOperator::kMatmul);
  EXPECT_EQ(exact.tensors[exact.operations.back().output].role, GraphRole::kDQ);
}

TEST(AttentionGraph, GradientsOfSharedKeysAreSummedOverTheirGroup) {
  RavelCudaAttention attention = Described(1, true);
  const auto sums = [](const AttentionGraph& graph) {
    const std::vector<GraphOperator> operators = OperatorsOf(graph);
    return std::count(operators.begin(), operators.end(), GraphOperator::kSum);
  };
  EXPECT_EQ(sums(BackwardAttentionGraph(attention)), 3);
  attention.kv_heads = 32;
  EXPECT_EQ(sums(BackwardAttentionGraph(attention)), 1);  // of dout * out alone
}

TEST(AttentionGraph, OneNodeHasTheMaskAsItsInnerGraph) {
  const UnifiedAttention unified = ForwardUnifiedAttention(Described(1, false));
  EXPECT_TRUE(unified.operands.operations.empty());
  EXPECT_EQ(unified.operands.tensors[1].size, (GraphSize{1, 8, 8192, 128}));  // keys upright
  EXPECT_EQ(unified.mask.operations.front().inputs, std::vector<size_t>{0});
  EXPECT_EQ(unified.mask.operations.back().output, unified.mask.tensors.size() - 1);
}

TEST(AttentionGraph, WhatNoEngineIsAskedForIsNamed) {
  RavelCudaAttention attention = Described(1, true);
  EXPECT_EQ(WhyNoAttentionEngine(attention, 91900), "");
  EXPECT_THAT(WhyNoAttentionEngine(attention, 91001), HasSubstr("older than 9.10.2"));
  attention.sequence_tokens = 1000;
  EXPECT_THAT(WhyNoAttentionEngine(attention, 91500), HasSubstr("no multiple of 128"));
  EXPECT_EQ(WhyNoAttentionEngine(attention, 91501), "");
  attention.dk_stride = 6146;
  EXPECT_THAT(WhyNoAttentionEngine(attention, 91900), HasSubstr("rows 6146 elements apart"));
  attention = Described(1, false);
  attention.head_size = 100;
  EXPECT_THAT(WhyNoAttentionEngine(attention, 91900), HasSubstr("heads of 100"));
}

}  // namespace
}  // namespace ravel::kernels::cuda::testing
