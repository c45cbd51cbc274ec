// The operands of every program against a second derivation of what instructions touch, made from
// op codes, groups and calls alone: it shares no code with the one that fills them.

#include "common/plan/program/program_operands.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/program/program_order.h"
#include "common/plan/sharding_plan.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/common/plan/random_units.h"
#include "tests/testing/sanitizer.h"

namespace ravel::plan {
namespace {

struct Touched {
  BufferId buffer = {};
  bool writes = false;
  bool operator==(const Touched&) const = default;
};

// A second, separate derivation of the buffers that the instructions of one program touch.
class OperandReference {
 public:
  OperandReference(const ShardingPlan& plan, const StepProgram& program)
      : plan_(plan),
        program_(program),
        model_(UsesOf(plan.inventory, plan.groups, program.phase != Phase::kEval)) {}

  std::vector<Touched> Next(const Instruction& at) {
    touched_.clear();
    switch (LabelOf(plan_.moves, at)) {
      case OpLabel::kGather:
        AddFirst({Of(BufferKind::kModelWeight, at.group), Of(BufferKind::kMainWeight, at.group)});
        Add(Of(BufferKind::kGathered, at.group), true);
        break;
      case OpLabel::kOuterGather:
        Add(Of(BufferKind::kModelWeight, at.group), true);
        break;
      case OpLabel::kForward:
      case OpLabel::kRecompute:
      case OpLabel::kBackward:
        AddUnit(at, model_.uses[use_]);
        use_ += at.op == OpCode::kRecompute ? 0 : 1;
        break;
      case OpLabel::kAllocStaging:
        Add(Of(BufferKind::kStaging, at.group, at.call), true);
        break;
      case OpLabel::kAccumulateGrad:
        Add(Of(BufferKind::kStaging, at.group, at.call), false);
        Add(Of(BufferKind::kLocalGrad, at.group, at.call), true);
        break;
      case OpLabel::kReduceScatter:
        AddSent(at);
        Add(Of(BufferKind::kReceive, at.group, at.call), true);
        Add(Of(BufferKind::kMainGrad, at.group, at.call), true);
        break;
      case OpLabel::kOuterReduce:
        Add(Of(BufferKind::kOuterReceive, at.group, at.call), true);
        Add({Root(at.group, at.call)}, !ReplicasCut(at.group));
        Add(Of(BufferKind::kOuterGrad, at.group, at.call), true);
        break;
      case OpLabel::kJoinGradients:
        for (const BufferId staging : Of(BufferKind::kStaging, at.group)) {
          const int call = plan_.buffers[static_cast<size_t>(staging)].call;
          Add({FinalSum(at.group, call)}, call == 0);
        }
        break;
      case OpLabel::kGatherGradient:
        Add({Root(at.group, 0)}, false);
        Add(Of(BufferKind::kFullGrad, at.group), true);
        break;
      case OpLabel::kStatsReduce:
        Add(Of(BufferKind::kShared, {}), false);
        for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) {
          if (plan_.groups[static_cast<size_t>(group)].trainable) {
            Add({FinalSum(group, 0)}, false);
          }
        }
        AddScales();
        break;
      case OpLabel::kOptimizerStep:
      case OpLabel::kOffloadGradient:
        AddFirst({Of(BufferKind::kFullGrad, at.group), {FinalSum(at.group, 0)}});
        at.op == OpCode::kOptimizerStep ? AddUpdated(at.group) : AddSentToHost(at.group);
        break;
      case OpLabel::kAmaxReduce:
        AddAmaxes();
        break;
      case OpLabel::kRefreshWeights:
        AddRefreshed(at.group);
        break;
      default:  // kFree, kDecideStep, kEndPhase; labels of logs alone
        break;
    }
    return touched_;
  }

 private:
  static constexpr int kAnyCall = -1;

  std::vector<BufferId> Of(BufferKind kind, BufferIndex::Owner owner, int call = kAnyCall) const {
    std::vector<BufferId> found;
    for (const BufferId i : plan_.buffers.ids()) {
      const ProgramBuffer& buffer = plan_.buffers[i];
      const BufferIndex::Owner of =
          buffer.group >= 0 ? BufferIndex::Owner(buffer.group) : buffer.unit;
      if (buffer.kind == kind && of == owner && (call == kAnyCall || buffer.call == call)) {
        found.push_back(i);
      }
    }
    return found;
  }
  void Add(const std::vector<BufferId>& buffers, bool writes) {
    for (const BufferId buffer : buffers) {
      touched_.push_back({.buffer = buffer, .writes = writes});
    }
  }
  // Reads the first of several lists that is not empty.
  void AddFirst(const std::vector<std::vector<BufferId>>& lists) {
    for (const std::vector<BufferId>& list : lists) {
      if (!list.empty()) {
        Add(list, false);
        return;
      }
    }
  }
  void AddRefreshed(GroupId group) {
    Add(Of(BufferKind::kMainWeight, group), false);
    Add(Of(BufferKind::kAmax, {}), false);
    Add(Of(BufferKind::kDelayedScales, {}), false);
    Add(Of(BufferKind::kModelWeight, group), true);
  }
  bool OnHost(GroupId group) const {
    const std::vector<BufferId> states = Of(BufferKind::kState, group);
    return plan_.options.offload_copies && !states.empty() &&
           plan_.buffers[states.front()].memory == MemoryKind::kOffload;
  }
  // The host has main weights of recipes, and makes codes of them.
  void AddSentToHost(GroupId group) {
    if (Quantized(group)) {
      return;
    }
    if (plan_.options.main_type == plan_.options.weight_type) {
      Add(Of(BufferKind::kMainWeight, group), false);
    } else if (plan_.options.main_type == DType::kI16) {
      Add(Of(BufferKind::kModelWeight, group), false);
    }
  }
  void AddUpdated(GroupId group) {
    const Recipe recipe = plan_.groups[group].recipe;
    const bool measures = Quantized(group) && !OnHost(group);
    const bool encodes = Quantized(group) && recipe != Recipe::kCurrent && recipe != Recipe::kNvFp4;
    Add(Of(BufferKind::kMainWeight, group), true);
    if (!Quantized(group) || encodes) {
      Add(Of(BufferKind::kModelWeight, group), true);
    }
    Add(Of(BufferKind::kState, group), true);
    if (measures) {
      Add(Of(BufferKind::kAmax, {}), true);
    }
    if (encodes && measures) {
      Add(Of(BufferKind::kDelayedScales, {}), false);
    }
  }
  void AddScales() {
    Add(Of(BufferKind::kAmaxFlags, {}), true);
    Add(Of(BufferKind::kAmax, {}), false);
    Add(Of(BufferKind::kDelayedScales, {}), false);
  }
  void AddAmaxes() {
    for (const GroupId group : plan_.groups.ids()) {
      if (Quantized(group)) {
        Add(Of(BufferKind::kMainWeight, group), false);
      }
    }
    for (const BufferKind kind : {BufferKind::kAmax,
                                  BufferKind::kAmaxReceive,
                                  BufferKind::kAmaxPart,
                                  BufferKind::kDelayedScales}) {
      Add(Of(kind, {}), true);
    }
  }
  bool Quantized(GroupId group) const { return plan_.groups[group].recipe != Recipe::kNone; }
  bool ReplicasCut(GroupId group) const {
    return PlacementOn(plan_.roles[group].measured, kReplicateAxis).in_flat_family();
  }
  // The slot of a replica's counter that ends with the sum.
  BufferId Root(GroupId group, int call) const {
    for (const BufferId buffer : Of(BufferKind::kMainGrad, group, call)) {
      if (plan_.buffers[static_cast<size_t>(buffer)].slot == CounterRoot(plan_.lanes.Inner())) {
        return buffer;
      }
    }
    ADD_FAILURE() << "group " << group << " has no sum of call " << call;
    return 0;
  }
  BufferId FinalSum(GroupId group, int call) const {
    return ReplicasCut(group) ? Of(BufferKind::kOuterGrad, group, call).front() : Root(group, call);
  }
  // Staging, or of lanes that are summed first the root of their counter.
  void AddSent(const Instruction& at) {
    if (!plan_.lanes.blocks) {
      const std::vector<BufferId> staging = Of(BufferKind::kStaging, at.group, at.call);
      const bool rounds = plan_.options.gradient_wire == WireType::kBF16 &&
                          plan_.buffers[staging.front()].dtype == DType::kF32;
      Add(staging, rounds);
      return;
    }
    for (const BufferId buffer : Of(BufferKind::kLocalGrad, at.group, at.call)) {
      if (plan_.buffers[static_cast<size_t>(buffer)].slot == CounterRoot(plan_.lanes.Local())) {
        Add({buffer}, false);
      }
    }
  }
  void AddUnit(const Instruction& at, const UnitUse& use) {
    const bool backward = at.op == OpCode::kBackward;
    for (const GroupId group : use.needs) {
      Add(Of(BufferKind::kGathered, group), false);
    }
    // A backward may use up what it reads.
    Add(Of(BufferKind::kSaved, use.unit, use.call), at.op != OpCode::kRecompute);
    Add(Of(BufferKind::kRemade, use.unit), true);
    Add(Of(BufferKind::kWorkspace, use.unit), true);
    for (const GradientId id : backward ? use.gradients : std::vector<GradientId>()) {
      const GradientCall& call = model_.gradients[static_cast<size_t>(id)];
      Add(Of(BufferKind::kStaging, call.group, call.call), true);
    }
    if (backward && !use.gradients.empty()) {
      Add(Of(BufferKind::kLeaves, use.unit), true);
    }
    Add(Of(BufferKind::kShared, {}), true);
    if (std::any_of(use.needs.begin(), use.needs.end(), [&](GroupId g) { return Quantized(g); })) {
      const bool stages = program_.phase != Phase::kEval && plan_.options.amax_history > 0;
      Add(Of(BufferKind::kAmax, {}), stages);
      Add(Of(BufferKind::kDelayedScales, {}), false);
      if (program_.phase != Phase::kEval) {
        Add(Of(BufferKind::kAmaxFlags, {}), true);
      }
    }
  }

  const ShardingPlan& plan_;
  const StepProgram& program_;
  const ModelUses model_;
  size_t use_ = 0;
  std::vector<Touched> touched_;
};

std::string TouchedText(const ShardingPlan& plan, const std::vector<Touched>& all) {
  std::string text;
  for (const Touched& touched : all) {
    text += (touched.writes ? " writes " : " reads ") +
            plan.buffers[static_cast<size_t>(touched.buffer)].name;
  }
  return text;
}

// Returns the number of operands that were compared.
size_t CompareOperands(const ShardingPlan& plan, const std::string& name) {
  size_t compared = 0;
  for (const StepProgram& program : plan.programs) {
    OperandReference reference(plan, program);
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      std::vector<Touched> got;
      for (const Operand& operand : program.instructions[i].operands) {
        got.push_back({.buffer = operand.buffer, .writes = operand.writes()});
      }
      EXPECT_EQ(TouchedText(plan, got), TouchedText(plan, reference.Next(program.instructions[i])))
          << name << ": " << InstructionName(program, static_cast<int>(i));
      compared += got.size();
    }
  }
  return compared;
}

struct OperandAxes {
  Strategy shard;
  Strategy replicate;
  int64_t replicas;
};
constexpr OperandAxes kOperandAxes[] = {
    {Strategy::kNoShard, Strategy::kNoShard, 1},
    {Strategy::kOptim, Strategy::kNoShard, 1},
    {Strategy::kOptimGrads, Strategy::kNoShard, 1},
    {Strategy::kOptimGradsParams, Strategy::kNoShard, 1},
    {Strategy::kNoShard, Strategy::kNoShard, 2},
    {Strategy::kOptim, Strategy::kOptim, 2},
    {Strategy::kOptimGradsParams, Strategy::kNoShard, 2},
    {Strategy::kOptimGradsParams, Strategy::kOptim, 2},
};

class OperandsOfModels : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(OperandsOfModels, AreWhatInstructionsTouchUnderEveryStrategy) {
  size_t compared = 0;
  for (const OperandAxes& axes : kOperandAxes) {
    for (int variant = 0; variant < 16; ++variant) {
      JobSpec spec = testing::SpecOf(GetParam().config, 8);
      spec.strategy = axes.shard;
      spec.replicate_strategy = axes.replicate;
      spec.replicas = axes.replicas;
      spec.micro_batch = 1;
      spec.global_batch = variant % 2 == 0 ? 8 : 24;
      spec.recompute = variant / 2 % 2 == 0 ? RecomputePolicy::kNone : RecomputePolicy::kBlock;
      spec.gradient_wire = variant % 5 == 0 ? WireType::kBF16 : WireType::kF32;
      spec.compute = variant / 4 % 2 == 0 ? ComputeType::kF32 : ComputeType::kBF16;
      const bool shared = variant / 8 % 2 == 0;
      if (variant % 3 == 0) {
        spec.freeze = {"model.layers.0.*"};
      }
      const absl::StatusOr<ShardingPlan> plan =
          BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = shared});
      ASSERT_TRUE(plan.ok()) << plan.status();
      compared += CompareOperands(*plan, std::to_string(variant));
    }
  }
  EXPECT_GT(compared, 1000U);
}
TEST(Operands, AreWhatInstructionsOfQuantizedUnitsTouch) {
  for (const testing::RecipeCase& tested : testing::RecipeCases()) {
    for (const OperandAxes& axes : kOperandAxes) {
      for (const bool shared : {false, true}) {
        JobSpec spec = testing::RecipeSpecOf(tested.recipe);
        spec.strategy = axes.shard;
        spec.replicate_strategy = axes.replicate;
        spec.replicas = axes.replicas;
        spec.cpu_devices = shared;
        spec.recipe.keep_bf16 = {"model.layers.0.mlp.*"};
        const absl::StatusOr<ShardingPlan> plan =
            BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = shared});
        ASSERT_TRUE(plan.ok()) << plan.status();
        EXPECT_GT(CompareOperands(*plan, tested.name), 0U);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         OperandsOfModels,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

// Optional units, units that are called several times, borrowed and frozen tensors.
TEST(Operands, AreWhatInstructionsOfRandomUnitsTouch) {
  for (uint64_t seed = testing::kSeed;
       seed < testing::kSeed + ravel::testing::Fewer<uint64_t>(500, 10);
       ++seed) {
    testing::RandomPlans random(seed);
    const ShardingPlan plan = random.Next();
    EXPECT_GT(CompareOperands(plan, "seed " + std::to_string(seed)), 0U);
    for (const StepProgram& program : plan.programs) {
      for (const Instruction& at : program.instructions) {
        if (!IsCompute(at.op)) {
          continue;
        }
        const bool optional = plan.inventory.units[static_cast<size_t>(at.unit)].optional;
        for (const Operand& operand : at.operands) {
          const bool gradient = operand.role == Role::kGradient;
          EXPECT_EQ(operand.when, optional && !gradient ? When::kUsed : When::kLane);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ravel::plan
