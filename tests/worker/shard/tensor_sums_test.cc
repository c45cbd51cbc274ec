// Gradients of which each rank of the tensor axis has an addend, over every transport of hosts and
// every strategy: of weights that heads share over the whole axis, of copied key heads among the
// ranks that have the same. The addends' sum depends on its order, so another tree shows.

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/model/tensor_cuts.h"
#include "tests/worker/shard/transport_ranks.h"

namespace ravel::shard {
namespace {

using model::UnitMemory;
using plan::SegmentKind;
using plan::UnitPass;

constexpr int64_t kTensorRanks = 4;

// As a tree 0, from the left to the right 1: 1 is lost in 1e8.
constexpr std::array<float, kTensorRanks> kOrdered = {1, 1e8F, -1e8F, 1};

float AddendOf(const plan::TensorSpec& tensor, int64_t coordinate, int64_t element) {
  if (!tensor.cut.partial_gradient) {
    return 3;
  }
  return element % 2 == 0 ? kOrdered.at(static_cast<size_t>(coordinate))
                          : static_cast<float>(coordinate + 1);
}

// The binary tree over the ranks that sum with `coordinate`, of addends of `times` micro-batches.
float TreeOf(const plan::TensorSpec& tensor, int64_t coordinate, int64_t element, float times) {
  if (!tensor.cut.partial_gradient) {
    return times * AddendOf(tensor, coordinate, element);
  }
  const int64_t ranks = tensor.cut.copies > 1 ? tensor.cut.copies : kTensorRanks;
  std::vector<float> level;
  for (int64_t i = 0; i < ranks; ++i) {
    level.push_back(times * AddendOf(tensor, coordinate / ranks * ranks + i, element));
  }
  for (; level.size() > 1; level.resize(level.size() / 2)) {
    for (size_t i = 0; i + 1 < level.size(); i += 2) {
      level[i / 2] = level[i] + level[i + 1];
    }
  }
  return level.front();
}

// Computes nothing but the gradients of the rank's place on the axis.
class AddendUnit final : public model::Module {
 public:
  AddendUnit(const plan::ModelInventory& inventory, plan::UnitId unit, int64_t coordinate)
      : Module({}), inventory_(inventory), unit_(unit), coordinate_(coordinate) {}

  void RunSegment(kernels::Stream&, const UnitMemory&, UnitPass, SegmentKind) const override {}
  void RunSegment(kernels::Stream&,
                  const UnitMemory& memory,
                  SegmentKind kind,
                  const std::vector<model::FreshGradient>& gradients) const override {
    Write(kind, memory.chunk, gradients);
  }
  void RunSegment(kernels::Stream&,
                  const UnitMemory& memory,
                  SegmentKind kind,
                  const std::vector<model::AccumulatingGradient>& gradients) const override {
    Write(kind, memory.chunk, gradients);
  }

 private:
  template <typename Gradient>
  void Write(SegmentKind kind, int chunk, const std::vector<Gradient>& gradients) const {
    std::vector<plan::TensorId> tensors = inventory_.units[unit_].tensors;
    const std::vector<plan::TensorId>& borrowed = inventory_.units[unit_].borrowed;
    tensors.insert(tensors.end(), borrowed.begin(), borrowed.end());
    for (const auto& segment : plan::SegmentsOf(inventory_, unit_, UnitPass::kBackward)) {
      const bool writes = segment.kind == kind && segment.chunk == chunk && chunk == 0 &&
                          kind != SegmentKind::kLossStatistics;
      for (size_t at = 0; writes && at < tensors.size(); ++at) {
        if (std::find(segment.weights.begin(), segment.weights.end(), tensors[at]) !=
            segment.weights.end()) {
          WriteTensor(tensors[at], gradients[at]);
        }
      }
    }
  }

  template <typename Gradient>
  void WriteTensor(plan::TensorId id, const Gradient& gradient) const {
    const plan::TensorSpec& tensor = inventory_.tensors[id];
    auto* values = gradient.view.template As<float>();
    for (int64_t i = 0; i < plan::ItemElements(tensor); ++i) {
      const float addend = AddendOf(tensor, coordinate_, i);
      values[i] = Gradient::kOutput == kernels::Output::kAccumulate ? values[i] + addend : addend;
    }
  }

  const plan::ModelInventory& inventory_;
  const plan::UnitId unit_;
  const int64_t coordinate_;
};

class GradientsAreTrees final : public StepActions {
 public:
  GradientsAreTrees(const plan::ShardingPlan& plan,
                    ParameterGroups& groups,
                    int64_t coordinate,
                    std::string& fault)
      : plan_(plan), groups_(groups), coordinate_(coordinate), fault_(fault) {}

  StatisticsMessages Measure(kernels::Stream&) override {
    return {.mine = &mine_, .all = all_.data(), .words = 1};
  }
  absl::Status Decide(kernels::Stream&) override {
    for (const ParameterGroup& group : groups_) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        const plan::TensorSpec& tensor = plan_.inventory.tensors[piece.tensor];
        piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) {
          for (int64_t i = 0; i < run.elements; ++i) {
            Check(tensor, run.first + i, group.optimizer_gradient()[run.offset + i]);
          }
        });
      }
    }
    return absl::OkStatus();
  }
  absl::Status UpdateGroup(kernels::Stream&, plan::GroupId, const QuantizedUpdate&) override {
    return absl::OkStatus();
  }

 private:
  // Rows have an even length, so an element of a part is as odd as it is in the whole.
  void Check(const plan::TensorSpec& tensor, int64_t element, float got) {
    const plan::LaneMap& lanes = plan_.lanes;
    const float of_lane =
        TreeOf(tensor, coordinate_, element, static_cast<float>(lanes.micro_batches));
    const float expected = static_cast<float>(lanes.lanes) * of_lane;
    if (got != expected && fault_.empty()) {
      fault_ = absl::StrCat(tensor.name, "[", element, "] is ", got, ", expected ", expected);
    }
  }

  const plan::ShardingPlan& plan_;
  ParameterGroups& groups_;
  const int64_t coordinate_;
  std::string& fault_;
  int64_t mine_ = 0;
  std::array<int64_t, 64> all_ = {};
};

struct SumsCase {
  std::string transport;
  plan::Strategy strategy = plan::Strategy::kOptimGradsParams;
  int64_t data_ranks = 1;
  int64_t replicas = 1;
  int64_t micro_batches = 1;

  std::string name() const {
    return absl::StrCat(transport,
                        "_strategy",
                        static_cast<int>(strategy),
                        "_",
                        replicas,
                        "x",
                        data_ranks / replicas,
                        "_micro",
                        micro_batches);
  }
};

plan::JobSpec SumsJob(const SumsCase& tested) {
  plan::ModelConfig config = plan::ArchitectureOf(plan::ArchitectureKind::kQwen3).defaults;
  config.vocab_size = 97;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.tie_word_embeddings = false;
  plan::JobSpec spec;
  spec.name = "sums";
  spec.model = config;
  spec.data.sequence_length = 16;
  spec.virtual_ranks = 4;
  spec.global_batch = 4 * tested.micro_batches;
  spec.micro_batch = 1;
  spec.allow_padding = true;
  spec.cpu_devices = true;
  spec.tensor = kTensorRanks;
  spec.strategy = tested.strategy;
  spec.replicas = tested.replicas;
  return spec;
}

class TensorSums : public ::testing::TestWithParam<SumsCase> {};

TEST_P(TensorSums, AreTreesOverTheRanksThatShareAWeight) {
  const SumsCase& tested = GetParam();
  const absl::StatusOr<plan::ShardingPlan> plan = plan::BuildShardingPlan(
      {.spec = SumsJob(tested),
       .ranks = tested.data_ranks * kTensorRanks,
       .shared_memory = tested.transport == "local" || tested.transport == "shm"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  RunRanks(tested.transport, static_cast<size_t>(plan->ranks), [&](comm::Communicator& group) {
    std::string fault;
    const absl::Status status =
        RunPrograms({.plan = *plan,
                     .module =
                         [&](plan::UnitId unit, int64_t coordinate) {
                           return std::make_unique<AddendUnit>(plan->inventory, unit, coordinate);
                         },
                     .actions =
                         [&](ParameterGroups& groups) {
                           return std::make_unique<GradientsAreTrees>(
                               *plan, groups, group.rank() % kTensorRanks, fault);
                         }},
                    group);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(fault, "") << "rank " << group.rank();
    if (!status.ok()) {
      group.Abort("a rank failed");
    }
  });
}

std::vector<SumsCase> AllSums() {
  std::vector<SumsCase> cases;
  int64_t turn = 0;
  for (const plan::Strategy strategy : {plan::Strategy::kNoShard,
                                        plan::Strategy::kOptim,
                                        plan::Strategy::kOptimGrads,
                                        plan::Strategy::kOptimGradsParams}) {
    for (const char* transport : {"local", "shm", "gloo", "mixed"}) {
      cases.push_back({.transport = transport,
                       .strategy = strategy,
                       .data_ranks = turn % 3 + 1,
                       .replicas = 1,
                       .micro_batches = turn % 2 + 1});
      turn += 1;
    }
    turn += 1;
  }
  cases.push_back({.transport = "local", .data_ranks = 4, .replicas = 2, .micro_batches = 2});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Transports,
                         TensorSums,
                         ::testing::ValuesIn(AllSums()),
                         [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace ravel::shard
