// Sums over ranks of a tensor axis beside products: which steps run beside each other, that no wait
// is missing or needless, and what plans say of it.

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/device_kind.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_order.h"
#include "common/plan/report/step_timeline.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/tensor_plan.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;

struct OverlapCase {
  int64_t chunks = 1;
  bool sequence = false;
  RecomputePolicy recompute = RecomputePolicy::kNone;
};

JobSpec OverlapJob(const OverlapCase& tested) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.tensor = 2;
  spec.tensor_chunks = tested.chunks;
  spec.sequence_parallel = tested.sequence;
  spec.recompute = tested.recompute;
  spec.allow_padding = true;
  return spec;
}

ShardingPlan OverlapPlan(const OverlapCase& tested) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = OverlapJob(tested), .ranks = 4, .shared_memory = true});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

// The step of a pass of the first layer that the segment is in; of chunks one.
InstructionId StepOf(const ShardingPlan& plan,
                     const StepProgram& program,
                     OpCode op,
                     SegmentKind kind,
                     int chunk = 0) {
  for (const InstructionId id : program.instructions.ids()) {
    const Instruction& at = program.instructions[id];
    if (at.op != op || at.unit != UnitId(1)) {
      continue;
    }
    for (const SegmentSpec& segment : SegmentsOfStep(plan.inventory, at)) {
      if (segment.kind == kind && segment.chunk == chunk) {
        return id;
      }
    }
  }
  ADD_FAILURE() << "no step has the segment " << SegmentName(kind);
  return {};
}

// And the norm is after the sums of all chunks.
TEST(ActivationOverlap, GradientsOfWeightsRunBesideSumsOfInputGradients) {
  const struct {
    SegmentKind product, sum, weights, norm;
  } halves[] = {{SegmentKind::kMlpInputProduct,
                 SegmentKind::kMlpInput,
                 SegmentKind::kMlpWeights,
                 SegmentKind::kMlpNorm},
                {SegmentKind::kAttentionInputProduct,
                 SegmentKind::kAttentionInput,
                 SegmentKind::kAttentionWeights,
                 SegmentKind::kAttentionNorm}};
  for (const OverlapCase& tested : {OverlapCase{.chunks = 1},
                                    OverlapCase{.chunks = 4},
                                    OverlapCase{.chunks = 1, .sequence = true},
                                    OverlapCase{.chunks = 4, .sequence = true}}) {
    const ShardingPlan plan = OverlapPlan(tested);
    const StepProgram& program = plan.programs.front();
    const HappensBefore order(program);
    const auto step = [&](SegmentKind kind, int chunk = 0) {
      return StepOf(plan, program, OpCode::kBackward, kind, chunk);
    };
    for (const auto& half : halves) {
      for (int chunk = 0; chunk < tested.chunks; ++chunk) {
        EXPECT_TRUE(order.Before(step(half.product, chunk), step(half.sum, chunk)));
        EXPECT_TRUE(order.Before(step(half.sum, chunk), step(half.norm))) << chunk;
      }
      const InstructionId last = step(half.sum, static_cast<int>(tested.chunks) - 1);
      EXPECT_FALSE(order.Before(last, step(half.weights)));
      EXPECT_FALSE(order.Before(step(half.weights), last));
    }
  }
}

// Two buffers take turns, so that the third product waits for the first sum.
TEST(ActivationOverlap, OneChunkIsSummedWhileTheNextIsComputed) {
  for (const bool sequence : {false, true}) {
    const ShardingPlan plan = OverlapPlan({.chunks = 4, .sequence = sequence});
    const StepProgram& program = plan.programs.front();
    const HappensBefore order(program);
    const struct {
      OpCode op;
      SegmentKind product, sum;
    } lists[] = {
        {OpCode::kForward, SegmentKind::kAttentionOutput, SegmentKind::kAttentionResidual},
        {OpCode::kForward, SegmentKind::kMlpOutput, SegmentKind::kMlpResidual},
        {OpCode::kBackward, SegmentKind::kMlpInputProduct, SegmentKind::kMlpInput},
        {OpCode::kBackward, SegmentKind::kAttentionInputProduct, SegmentKind::kAttentionInput},
    };
    for (const auto& list : lists) {
      for (int chunk = 0; chunk < 4; ++chunk) {
        const InstructionId sum = StepOf(plan, program, list.op, list.sum, chunk);
        const InstructionId product = StepOf(plan, program, list.op, list.product, chunk);
        EXPECT_TRUE(order.Before(product, sum));
        if (chunk + 1 < 4) {
          const InstructionId next = StepOf(plan, program, list.op, list.product, chunk + 1);
          EXPECT_FALSE(order.Before(sum, next)) << SegmentName(list.sum) << " " << chunk;
          EXPECT_FALSE(order.Before(next, sum)) << SegmentName(list.sum) << " " << chunk;
        }
        if (chunk + 2 < 4) {
          EXPECT_TRUE(order.Before(sum, StepOf(plan, program, list.op, list.product, chunk + 2)));
        }
      }
    }
  }
}

TEST(ActivationOverlap, StepsOfChunksAreInTurn) {
  const ShardingPlan plan = OverlapPlan({.chunks = 2});
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kForward),
              ElementsAre("attention_norm attention attention_output",
                          "attention_residual*",
                          "attention_output",
                          "attention_residual*",
                          "mlp_norm mlp mlp_output",
                          "mlp_residual*",
                          "mlp_output",
                          "mlp_residual*"));
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kBackward),
              ElementsAre("mlp mlp_input_product",
                          "mlp_input*",
                          "mlp_input_product",
                          "mlp_input*",
                          "mlp_weights",
                          "mlp_norm attention attention_input_product",
                          "attention_input*",
                          "attention_input_product",
                          "attention_input*",
                          "attention_weights",
                          "attention_norm"));
}

// A plan without any one wait of a step, or with an addend of another slot, is refused.
TEST(ActivationOverlap, EveryWaitOfAStepIsNeeded) {
  int64_t waits = 0;
  for (const int64_t chunks : {1, 4}) {
    for (const bool sequence : {false, true}) {
      const ShardingPlan plan = OverlapPlan(
          {.chunks = chunks, .sequence = sequence, .recompute = RecomputePolicy::kBlock});
      ASSERT_EQ(CheckPlan(plan), absl::OkStatus());
      for (const StepProgram& program : plan.programs) {
        for (const InstructionId id : program.instructions.ids()) {
          if (!IsCompute(program.instructions[id].op)) {
            continue;
          }
          for (size_t i = 0; i < program.instructions[id].waits.size(); ++i) {
            StepProgram changed = program;
            std::vector<InstructionId>& list = changed.instructions[id].waits;
            list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
            EXPECT_FALSE(CheckProgram(plan, changed).ok())
                << InstructionName(program, id) << " without wait " << i;
            ++waits;
          }
        }
      }
    }
  }
  EXPECT_GT(waits, 100);
}

TEST(ActivationOverlap, AnotherAddendIsCaught) {
  const ShardingPlan plan = OverlapPlan({.chunks = 4});
  const BufferId one = FindBuffer(plan.buffers, {.kind = BufferKind::kAddend, .slot = 1});
  const BufferId two = FindBuffer(plan.buffers, {.kind = BufferKind::kAddend, .slot = 2});
  ASSERT_TRUE(one >= 0 && two >= 0);
  StepProgram changed = plan.programs.front();
  for (Instruction& at : changed.instructions) {
    for (Operand& operand : at.operands) {
      operand.buffer = operand.buffer == one ? two : operand.buffer;
    }
  }
  EXPECT_THAT(std::string(CheckProgram(plan, changed).message()), ::testing::StartsWith("K1"));
  for (const BufferKind kind : {BufferKind::kAddend, BufferKind::kInputGradient}) {
    ShardingPlan smaller = plan;
    for (ProgramBuffer& buffer : smaller.buffers) {
      buffer.bytes -= buffer.kind == kind && buffer.slot != 1 ? 256 : 0;
    }
    EXPECT_THAT(std::string(CheckPlan(smaller).message()), ::testing::StartsWith("K13"));
  }
}

TEST(ActivationOverlap, ChunksMoveTheSameBytes) {
  for (const bool sequence : {false, true}) {
    EXPECT_EQ(StepWire(OverlapPlan({.chunks = 4, .sequence = sequence})).tensor(),
              StepWire(OverlapPlan({.sequence = sequence})).tensor());
  }
}

TEST(ActivationOverlap, ChunksAreSavedInPlans) {
  const ShardingPlan plan = OverlapPlan({.chunks = 4});
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->inventory.cut.chunks, 4);
  EXPECT_EQ(CheckPlan(*back), absl::OkStatus());
}

TEST(ActivationOverlap, WhatCannotBeChunksIsRefused) {
  const auto refusal = [](int64_t tensor, int64_t chunks, int64_t tokens) {
    JobSpec spec = OverlapJob({.chunks = chunks});
    spec.tensor = tensor;
    spec.data.sequence_length = tokens;
    spec.global_batch = spec.virtual_ranks;
    return std::string(BuildShardingPlan({.spec = spec, .ranks = tensor, .shared_memory = true})
                           .status()
                           .message());
  };
  EXPECT_THAT(refusal(2, 3, 12), ::testing::HasSubstr("parallelism.tensorChunks"));
  EXPECT_THAT(refusal(2, 32, 64), ::testing::HasSubstr("a power of two up to 16"));
  EXPECT_THAT(refusal(1, 2, 12), ::testing::HasSubstr("1 without parallelism.tensor"));
  EXPECT_THAT(refusal(2, 4, 12), ::testing::HasSubstr("a multiple of 8"));
}

// Each step after the one before it.
void TakeTurns(ShardingPlan& plan) {
  for (StepProgram& program : plan.programs) {
    InstructionId before;
    for (const InstructionId id : program.instructions.ids()) {
      if (!IsCompute(program.instructions[id].op)) {
        continue;
      }
      if (before >= 0) {
        program.instructions[id].waits.push_back(before);
      }
      before = id;
    }
  }
}

// The layers of a 70B model on the eight devices of a node.
TEST(ActivationOverlap, APlanSaysWhatItSaves) {
  const auto seconds = [](int64_t chunks, bool turns = false) {
    JobSpec spec = testing::SpecOf(testing::Llama(8192, 4, 28672, 32000), 1);
    spec.tensor = 8;
    spec.compute = ComputeType::kBF16;
    spec.tensor_chunks = chunks;
    spec.data.sequence_length = 2048;
    spec.global_batch = spec.micro_batch = 8;
    auto plan = BuildShardingPlan({.spec = spec, .ranks = 8, .shared_memory = false});
    EXPECT_TRUE(plan.ok()) << plan.status();
    if (turns) {
      TakeTurns(*plan);
    }
    return static_cast<double>(
               PredictStep(*plan, ParseDevices("8xH100-80G", false)->kind).step_ns) *
           1e-9;
  };
  const double turns = seconds(1, true);
  const double whole = seconds(1);
  const double chunks = seconds(4);
  EXPECT_LT(whole, 0.98 * turns);
  EXPECT_LT(chunks, 0.95 * whole);
  std::printf("predicted step: in turn %.1f ms, beside %.1f ms, in four chunks %.1f ms\n",
              1e3 * turns,
              1e3 * whole,
              1e3 * chunks);
}

}  // namespace
}  // namespace ravel::plan
