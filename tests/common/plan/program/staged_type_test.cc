// Which gradients are staged in bf16, and that nothing is ever added to one.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Eight lanes of one micro-batch each.
JobSpec NarrowJob() {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 3, 96, 257), 8);
  spec.compute = ComputeType::kBF16;
  spec.gradient_wire = WireType::kBF16;
  return spec;
}

ShardingPlan Make(const JobSpec& spec, int64_t ranks = 2, bool shared_memory = false) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = shared_memory});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : ShardingPlan{};
}

// The same job, staged in fp32 as before there was a choice.
ShardingPlan StagedWide(ShardingPlan plan) {
  plan.options.staged_type = DType::kF32;
  plan.options.staging_window_bytes = 0;
  EXPECT_TRUE(PlanPrograms(plan).ok());
  return plan;
}

// Names of the units whose gradients are staged in bf16; what they receive is of the same type.
std::vector<std::string> NarrowUnits(const ShardingPlan& plan) {
  std::vector<std::string> units;
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::kStaging) {
      EXPECT_TRUE(buffer.kind == BufferKind::kReceive || buffer.group < 0 ||
                  buffer.dtype != DType::kBF16 || buffer.kind == BufferKind::kGathered ||
                  buffer.kind == BufferKind::kModelWeight)
          << buffer.name;
      continue;
    }
    const int64_t elements = plan.groups[buffer.group].layout.total_elements();
    EXPECT_EQ(buffer.bytes, elements * DTypeBytes(buffer.dtype)) << buffer.name;
    for (const ProgramBuffer& other : plan.buffers) {
      if (other.kind == BufferKind::kReceive && other.group == buffer.group &&
          other.call == buffer.call) {
        EXPECT_EQ(other.dtype, buffer.dtype) << other.name;
      }
    }
    if (buffer.dtype == DType::kBF16) {
      units.push_back(plan.inventory.units[buffer.unit].name);
    }
  }
  std::sort(units.begin(), units.end());
  return units;
}

const std::vector<std::string> kLayers = {"layers.0", "layers.1", "layers.2"};

TEST(StagedType, LayersAreStagedInBf16UnderEveryStrategyOnAnyNumberOfRanks) {
  for (const bool tied : {false, true}) {
    for (const bool shared : {false, true}) {
      for (const int64_t ranks : {1, 2, 3, 4}) {
        for (const Strategy strategy : {Strategy::kNoShard,
                                        Strategy::kOptim,
                                        Strategy::kOptimGrads,
                                        Strategy::kOptimGradsParams}) {
          JobSpec spec = NarrowJob();
          spec.model->tie_word_embeddings = tied;
          spec.strategy = strategy;
          spec.replicas = ranks == 4 ? 2 : 1;
          const ShardingPlan plan = Make(spec, ranks, shared);
          EXPECT_EQ(NarrowUnits(plan), kLayers);
          EXPECT_EQ(NarrowUnits(StagedWide(plan)), std::vector<std::string>());
        }
      }
    }
  }
}

TEST(StagedType, WhatMoreIsAddedToStaysFp32) {
  const std::vector<std::string> none;
  JobSpec spec = NarrowJob();
  spec.layer_drop = 0.25;  // a lane that leaves a layer out fills its gradient with zeros
  EXPECT_EQ(NarrowUnits(Make(spec)), kLayers);
  spec = NarrowJob();
  spec.freeze = {"model.layers.1.*"};
  EXPECT_EQ(NarrowUnits(Make(spec)), (std::vector<std::string>{"layers.0", "layers.2"}));
  spec = NarrowJob();
  spec.micro_batch = 1;  // of two sequences
  EXPECT_EQ(NarrowUnits(Make(spec)), none);
  spec = NarrowJob();
  spec.model->layer_sharing = true;
  EXPECT_EQ(NarrowUnits(Make(spec)), none);
  spec = NarrowJob();
  spec.gradient_wire = WireType::kF32;
  EXPECT_EQ(NarrowUnits(Make(spec)), none);
  spec = NarrowJob();
  spec.compute = ComputeType::kF32;
  EXPECT_EQ(NarrowUnits(Make(spec)), none);
}

TEST(StagedType, ReduceReadsBf16AndRoundsFp32InPlace) {
  const ShardingPlan plan = Make(NarrowJob());
  int64_t narrow = 0;
  int64_t wide = 0;
  for (const StepProgram& program : plan.programs) {
    for (const Instruction& at : program.instructions) {
      for (const Operand& operand : at.operands) {
        if (operand.role == Role::kSend) {
          const bool rounded = plan.buffers[operand.buffer].dtype == DType::kBF16;
          EXPECT_EQ(operand.access, rounded ? Access::kRead : Access::kAdd);
          ++(rounded ? narrow : wide);
        }
      }
    }
  }
  EXPECT_GT(narrow, 0);
  EXPECT_GT(wide, 0);
}

TEST(StagedType, ReportsCountTwoBytes) {
  const ShardingPlan plan = Make(NarrowJob(), 4);
  const ShardingPlan wide = StagedWide(plan);
  EXPECT_LT(PeakBytes(plan), PeakBytes(wide));
  EXPECT_LT(plan.options.staging_window_bytes, wide.options.staging_window_bytes);
  EXPECT_EQ(StepWire(plan), StepWire(wide));
  int64_t layers = 0;
  int64_t all = 0;
  for (const GroupId group : plan.groups.ids()) {
    const int64_t elements = plan.groups[group].layout.total_elements();
    const UnitKind kind = plan.inventory.units[plan.groups[group].unit].kind;
    layers += kind == UnitKind::kLayer ? elements : 0;
    all += elements;
  }
  EXPECT_EQ(RoundedInPlaceBytes(wide), 6 * all * plan.lanes.turns());
  EXPECT_EQ(RoundedInPlaceBytes(plan), 6 * (all - layers) * plan.lanes.turns());
  EXPECT_THAT(PlanSummary(plan, {.verbose = true}),
              ::testing::AllOf(HasSubstr("bf16, and 3 groups stage them so; rounding the others"),
                               ::testing::ContainsRegex("staging/layers.0 [^\n]* bf16\n"),
                               ::testing::ContainsRegex("receive/layers.0 [^\n]* bf16\n"),
                               Not(::testing::ContainsRegex("staging/embed [^\n]* bf16\n"))));
  EXPECT_THAT(PlanSummary(wide, {.verbose = true}),
              ::testing::AllOf(HasSubstr("gradients travel as bf16; rounding them costs"),
                               Not(::testing::ContainsRegex("staging/[^\n]* bf16\n"))));
}

// The first message about a program of the plan whose gradients of layers are said to be bf16.
std::string FaultOfBf16Layers(ShardingPlan plan) {
  for (ProgramBuffer& buffer : plan.buffers) {
    const bool layer =
        buffer.unit >= 0 && plan.inventory.units[buffer.unit].kind == UnitKind::kLayer;
    if (buffer.kind == BufferKind::kStaging && layer) {
      buffer.dtype = DType::kBF16;
    }
  }
  EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K13")) << "of another type";
  for (const StepProgram& program : plan.programs) {
    const absl::Status checked = CheckProgram(plan, program);
    if (!checked.ok()) {
      return std::string(checked.message());
    }
  }
  return "";
}

TEST(StagedType, CheckerRefusesToAddToRoundedStaging) {
  JobSpec twice = NarrowJob();
  twice.model->layer_sharing = true;
  EXPECT_THAT(FaultOfBf16Layers(Make(twice)),
              ::testing::AllOf(StartsWith("K9"), HasSubstr("adds to staging/layers.")));
  JobSpec micro_batches = NarrowJob();
  micro_batches.micro_batch = 1;
  EXPECT_THAT(FaultOfBf16Layers(Make(micro_batches)),
              ::testing::AllOf(StartsWith("K9"), HasSubstr("adds to staging/layers.")));
  JobSpec wide = NarrowJob();
  wide.gradient_wire = WireType::kF32;
  EXPECT_THAT(FaultOfBf16Layers(Make(wide)),
              ::testing::AllOf(StartsWith("K9"), HasSubstr("as another type")));
}

TEST(StagedType, TravelsWithThePlanAndIsCheckedThere) {
  const ShardingPlan plan = Make(NarrowJob());
  const ShardingPlan wide = StagedWide(plan);
  EXPECT_NE(PlanHash(plan), PlanHash(wide));
  for (const ShardingPlan* each : {&plan, &wide}) {
    const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(*each));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->options.staged_type, each->options.staged_type);
    EXPECT_TRUE(back->buffers == each->buffers);
    EXPECT_EQ(SerializePlan(*back), SerializePlan(*each));
  }
  EXPECT_EQ(ToProto(wide).options().staged_element_bytes(), 0) << "as before there was a choice";
  v1::ShardingPlan proto = ToProto(plan);
  proto.mutable_options()->set_staged_element_bytes(0);
  EXPECT_THAT(std::string(FromProto(proto).status().message()), HasSubstr("buffers: not those"));
  proto.mutable_options()->set_staged_element_bytes(3);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.staged_element_bytes: expected 2 or 4, got 3"));
  JobSpec spec = NarrowJob();
  spec.gradient_wire = WireType::kF32;
  proto = ToProto(Make(spec));
  proto.mutable_options()->set_staged_element_bytes(2);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.staged_element_bytes: 2 needs a bf16 wire and bf16 weights"));
  spec = NarrowJob();
  spec.compute = ComputeType::kF32;
  proto = ToProto(Make(spec));
  proto.mutable_options()->set_staged_element_bytes(2);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("options.staged_element_bytes: 2 needs a bf16 wire and bf16 weights"));
}

}  // namespace
}  // namespace ravel::plan
